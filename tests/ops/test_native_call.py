"""The native kernels called directly: outputs and gradients of the reference, places checked."""

import pytest
import torch

from fastlstm.ops import kernels, native_call
from fastlstm.ops.call import LSTMArgs

pytestmark = pytest.mark.isa

T, B, I, H = 6, 3, 5, 9  # noqa: E741
NEEDS = LSTMArgs(*(True,) * len(LSTMArgs._fields))


def made(ops, dtype=torch.float32):
    arguments = ops.make(T, B, I, H)
    x, *rest = arguments.copy(dtype, ()).list()
    return arguments, LSTMArgs(x, None, *rest)


def test_only_what_is_needed_is_kept_and_computed(ops):
    arguments, args = made(ops)
    y, _, (saved,) = native_call.forward((args,), False, False)
    assert saved is None
    *_, saved = native_call.forward((args,), False, True, y=y)
    needs = LSTMArgs(*(False,) * len(NEEDS))
    grads = arguments.dy.float(), None, None
    (found,) = native_call.backward((args,), y, saved, grads, (needs,))
    assert all(g is None for g in found)


def test_the_output_is_written_to_given_memory(ops):
    _, args = made(ops)
    place = torch.empty(T, B, H)
    y, *_ = native_call.forward((args,), False, False, y=place)
    assert y is place
    assert torch.equal(place, native_call.forward((args,), False, False)[0])


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


def gradients_of(B, T, *, real=None, is_bf16=False):
    """The backward pass of a sequence of which only the first `real` lanes have a gradient."""
    rng = torch.Generator().manual_seed(0)
    whole = [torch.randn(T, 200, 32, generator=rng), *(torch.randn(200, 16, generator=rng),) * 2]
    weights = [torch.randn(n, generator=rng) for n in ((64, 32), (64, 16), (64,), (64,))]
    dy = torch.randn(T, 200, 16, generator=rng)
    dy[:, B if real is None else real :] = 0
    rows, h0, c0 = whole[0][:, :B].contiguous(), whole[1][:B], whole[2][:B]
    args = LSTMArgs(rows, None, h0, c0, *weights)
    y, _, saved = native_call.forward((args,), is_bf16, True)
    grads = dy[:, :B].contiguous(), None, None
    (found,) = native_call.backward((args,), y, saved, grads, (LSTMArgs(*(True,) * len(args)),))
    return found


SHORT = pytest.mark.parametrize(("B", "T"), [(1, 1), (3, 1), (1, 4), (4, 3), (10, 2)])


@SHORT
@pytest.mark.parametrize("is_bf16", [False, True])
def test_few_rows_have_the_bits_of_many(B, T, is_bf16):
    """Rows without a gradient add zeros; with them weights, and operands of sums, are packed."""
    kernel, lanes = kernels.fastest_kernels(is_bf16), min(200, 1280 // T)  # of one chunk
    assert kernel.reads_unpacked(T, B, 32, 16) == (kernel.isa not in ("amx_bf16", "neon_bf16"))
    assert not kernel.reads_unpacked(T, lanes, 32, 16)
    few = gradients_of(B, T, is_bf16=is_bf16)
    many = gradients_of(lanes, T, real=B, is_bf16=is_bf16)
    for name in () if is_bf16 else ("w_ih", "w_hh", "bias"):
        assert torch.equal(getattr(few, name), getattr(many, name)), name
    assert torch.equal(few.rows, many.rows[:, :B])
    for name in ("h0", "c0"):
        assert torch.equal(getattr(few, name), getattr(many, name)[:B]), name


@SHORT
def test_weight_gradients_of_few_rows_in_bf16_are_as_exact_as_of_many(B, T):
    want, few = gradients_of(B, T), gradients_of(B, T, is_bf16=True)
    many = gradients_of(min(200, 1280 // T), T, real=B, is_bf16=True)
    for name in ("w_ih", "w_hh", "bias"):
        exact, *found = (getattr(g, name) for g in (want, few, many))
        errors = [float((t - exact).norm() / exact.norm()) for t in found]
        assert errors[0] < 1.1 * errors[1] < 0.05, name
