"""Packed weights are those of an earlier call while the weights are what they were.

All the ways to write to weights are in tests/nn/test_changed_weights.py.
"""

import gc

import pytest
import torch

from fastlstm.ops.call import LSTMArgs
from fastlstm.ops.kernels import fastest_kernels
from fastlstm.ops.packed_weights import _PACKED, freeze, packed, thaw

T, B, I, H = 4, 2, 5, 7  # noqa: E741


@pytest.fixture
def args(ops):
    x, *rest = ops.make(T, B, I, H).copy(torch.float32, ()).list()
    return LSTMArgs(x, None, *rest)


def pack(args, is_bf16=False, **options):
    return packed(args, fastest_kernels(is_bf16), 1, **options)


def test_weights_are_packed_once_per_pass_and_kernel(args):
    first = pack(args)
    assert pack(args) is first
    backward = pack(args, is_backward=True)
    assert pack(args, is_backward=True) is backward
    assert backward.memory.data_ptr() != first.memory.data_ptr()
    half = pack(args, is_bf16=True)
    assert half is not first
    assert half.memory.nbytes != first.memory.nbytes


@pytest.mark.parametrize("name", ["w_ih", "w_hh", "b_ih", "b_hh"])
def test_a_change_of_any_weight_packs_again(args, name):
    first = pack(args)
    content = first.memory.clone()
    getattr(args, name).mul_(2)
    again = pack(args)
    assert again is not first
    assert not torch.equal(again.memory, content)
    getattr(args, name).data.mul_(2)  # counted by no version: a fingerprint sees it
    assert pack(args) is not again


def test_another_tensor_with_the_same_values_packs_again(args):
    first = pack(args)
    assert pack(args._replace(w_ih=args.w_ih.clone())) is not first


def test_a_fused_optimizer_is_seen(args):
    first = pack(args)
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.Adam([weight], fused=True).step()
    assert pack(args) is not first


def test_in_training_they_are_kept_from_the_second_call_on(args):
    first = pack(args, in_training=True)
    assert first.contents.fingerprint is None
    second = pack(args, in_training=True)
    assert second is not first
    assert second.contents.fingerprint is not None
    assert pack(args, in_training=True) is second


def test_tensors_made_in_inference_mode_are_packed_once(args):
    with torch.inference_mode():
        args = args._replace(w_ih=args.w_ih.clone())
        first = pack(args)
        assert pack(args) is first
        args.w_ih.view(-1)[3] += 1
        assert pack(args) is not first


def test_frozen_weights_are_those_that_torch_counts(args):
    freeze(args.w_hh)
    first = pack(args)
    args.w_ih.data.view(-1)[3] += 1
    assert pack(args) is first
    args.b_hh.add_(1)
    again = pack(args)
    assert again is not first
    thaw(args.w_hh)
    assert pack(args) is again
    args.w_ih.data.view(-1)[3] += 1
    assert pack(args) is not again


def test_freezing_starts_from_the_current_weights(args):
    first = pack(args)
    args.w_ih.data.view(-1)[3] += 1
    freeze(args.w_hh)
    assert pack(args) is not first


def test_training_thaws(args):
    freeze(args.w_hh)
    first = pack(args)
    pack(args, in_training=True)
    args.w_ih.data.view(-1)[3] += 1
    assert not first.is_still(args.weights, 1)
    assert pack(args) is not first


def test_frozen_tensors_made_in_inference_mode_are_read(args):
    with torch.inference_mode():
        args = args._replace(w_ih=args.w_ih.clone())
        freeze(args.w_hh)
        first = pack(args)
        args.w_ih.view(-1)[3] += 1
        assert pack(args) is not first


def test_packed_weights_are_freed_with_their_weights(args):
    gc.collect()
    before = len(_PACKED[False])
    args = args._replace(w_hh=args.w_hh.clone())
    pack(args)
    assert len(_PACKED[False]) == before + 1
    del args
    gc.collect()
    assert len(_PACKED[False]) <= before
