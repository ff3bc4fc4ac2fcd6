"""Packed weights are kept between calls without gradients, and never outlive what they were."""

import pytest
import torch

from native_run import lstm


def check(ops, given):
    with torch.no_grad():
        got = lstm(*given.list(), backend="native")
        want = ops.reference(given, torch.float32, ())
    for name, value in zip(("y", "hT", "cT"), got, strict=True):
        ops.assert_close(name, value, want[name], torch.float32)


@pytest.mark.parametrize("name", ["w_ih", "b_ih"])
def test_a_weight_made_for_one_call(ops, name):
    given = ops.make(5, 4, 12, 24).copy(torch.float32, ())
    whole = given.tensors[name].clone()
    addresses = set()
    for k in range(50):
        given.tensors[name] = None  # its memory is free for the next one
        given.tensors[name] = whole * (1 + k)
        addresses.add(given.tensors[name].data_ptr())
        check(ops, given)
    assert len(addresses) < 50, "no address was used again: this proves nothing"


def test_values_swapped_through_data(ops):
    given = ops.make(5, 4, 12, 24).copy(torch.float32, ())
    weight = given.tensors["w_ih"]
    one = weight.clone()
    for k in range(30):
        weight.data = one * -1.0  # frees the memory that was packed, the next one may take it
        weight.data = one * (1 + k)
        check(ops, given)


def test_slices_of_one_tensor(ops):
    for I in (64, 40):  # noqa: E741
        given = ops.make(5, 4, I, 16).copy(torch.float32, ())
        if I == 64:
            whole, recurrent = given.tensors["w_ih"], given.tensors["w_hh"]
            biases = given.tensors["b_ih"], given.tensors["b_hh"]
        given.tensors.update(w_ih=whole[:, :I], w_hh=recurrent, b_ih=biases[0], b_hh=biases[1])
        check(ops, given)
