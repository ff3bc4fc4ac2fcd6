"""The native kernels called directly: outputs and gradients of the reference, places checked."""

import pytest
import torch

from fastlstm.errors import ShapeError
from fastlstm.ops import kernels, native_call
from fastlstm.ops.call import LSTMArgs

pytestmark = pytest.mark.isa

T, B, I, H = 6, 3, 5, 9  # noqa: E741
NEEDS = LSTMArgs(*(True,) * len(LSTMArgs._fields))


def made(ops, dtype=torch.float32):
    arguments = ops.make(T, B, I, H)
    x, *rest = arguments.copy(dtype, ()).list()
    return arguments, LSTMArgs(x, None, *rest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward_are_those_of_the_reference(ops, dtype):
    arguments, args = made(ops, dtype)
    want = ops.reference(arguments, dtype, ops.names)
    is_bf16 = dtype is torch.bfloat16
    y, hT, cT, saved = native_call.forward(args, is_bf16, True)
    for name, value in (("y", y), ("hT", hT), ("cT", cT)):
        ops.assert_close(name, value, want[name], dtype)
    assert (y.dtype, hT.dtype, cT.dtype) == (dtype, torch.float32, torch.float32)
    grads = tuple(g.float() for g in (arguments.dy, arguments.dh, arguments.dc))
    found = native_call.backward(args, y, saved, grads, NEEDS)
    assert found.gamma_hh is None
    names = ("x", "h0", "c0", "w_ih", "w_hh", "b_ih")
    for name, value in zip(names, found[:6], strict=True):
        ops.assert_close(f"d{name}", value, want[f"d{name}"], dtype)


def test_only_what_is_needed_is_kept_and_computed(ops):
    arguments, args = made(ops)
    y, _, _, saved = native_call.forward(args, False, False)
    assert saved is None
    *_, saved = native_call.forward(args, False, True, y=y)
    needs = LSTMArgs(*(False,) * len(NEEDS))
    found = native_call.backward(args, y, saved, (arguments.dy.float(), None, None), needs)
    assert {n for n, g in found._asdict().items() if g is not None} == {"h0", "c0"}


def test_the_output_goes_where_it_is_told(ops):
    _, args = made(ops)
    place = torch.empty(T, B, H)
    y, *_ = native_call.forward(args, False, False, y=place)
    assert y is place
    assert torch.equal(place, native_call.forward(args, False, False)[0])


@pytest.mark.parametrize("token", [-1, 4, 1 << 40])
def test_a_token_that_is_no_row_is_refused_in_both_passes(ops, token):
    arguments, dense = made(ops)
    tokens = torch.randint(0, 4, (T, B))
    args = dense._replace(rows=torch.randn(4, I), tokens=tokens)
    y, _, _, saved = native_call.forward(args, False, True)
    tokens[2, 1] = token
    text = r"tokens run from -?\d+ to \d+, the embedding has rows 0 to 3"
    with pytest.raises(ShapeError, match=text):
        native_call.forward(args, False, True)
    with pytest.raises(ShapeError, match=text):
        native_call.backward(args, y, saved, (arguments.dy.float(), None, None), NEEDS)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("is_bf16", [False, True])
def test_the_layout_holds_what_is_kept(is_bf16, has_norm):
    kernel = kernels.fastest_kernels(is_bf16)
    gates, cells, normed, moments = native_call.saved_layout(kernel, T, B, H, has_norm)
    padded = -(-H // kernel.lanes) * kernel.lanes
    assert gates[0] >= T * B * 4 * padded
    assert cells == ((T + 1) * B * padded, torch.float32)
    assert normed[0] == (2 * gates[0] if has_norm else 0)
    assert moments == (4 * T * B if has_norm else 0, torch.float32)
