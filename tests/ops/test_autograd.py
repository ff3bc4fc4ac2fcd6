"""The recorded sequence: repeated, partial and second derivatives, and what it refuses."""

import pytest
import torch

from fastlstm.errors import KernelError
from fastlstm.ops.autograd import LSTMFunction, by_argument, slow_gradients
from fastlstm.ops.call import LSTMArgs, describe_call
from fastlstm.ops.cell_options import TORCHS_CELL
from fastlstm.ops.native_call import Gradients
from fastlstm.ops.reference import run_reference

pytestmark = pytest.mark.isa

T, B, I, H = 5, 3, 4, 6  # noqa: E741
LOOP = "ignore:.* Python loop over time"


def made(ops, *, strict=False, **tensors):
    arguments = ops.make(T, B, I, H).copy(torch.float32)
    x, *rest = arguments.list()
    args = LSTMArgs(x, None, *rest)._replace(**tensors)
    call = describe_call(args, strict=strict)
    return arguments, args, call


def leaves(args):
    return [t for t in args if t is not None and t.requires_grad]


def loss_of(outputs):
    return sum(out.square().sum() for out in outputs)


def test_a_second_backward_pass_is_bit_equal(ops):
    _, args, call = made(ops)
    outputs = LSTMFunction.apply(call, *args)
    first = torch.autograd.grad(loss_of(outputs), leaves(args), retain_graph=True)
    second = torch.autograd.grad(loss_of(outputs), leaves(args))
    assert all(map(torch.equal, first, second))


@pytest.mark.filterwarnings(LOOP)
def test_a_second_derivative_equals_the_reference(ops):
    _, args, call = made(ops)
    x = args.rows

    def penalty(outputs):
        (dx,) = torch.autograd.grad(loss_of(outputs), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), args.w_hh)[0]

    found = penalty(LSTMFunction.apply(call, *args))
    torch.testing.assert_close(found, penalty(run_reference(args, TORCHS_CELL, torch.float32)))


def test_strict_refuses_a_second_derivative(ops):
    _, args, call = made(ops, strict=True)
    outputs = LSTMFunction.apply(call, *args)
    with pytest.raises(KernelError, match=r"create_graph=True.*leave out strict and backend"):
        torch.autograd.grad(loss_of(outputs), args.rows, create_graph=True)


@pytest.mark.filterwarnings(LOOP)
def test_gradients_in_batches_equal_single_ones(ops):
    _, args, call = made(ops)
    y, *_ = LSTMFunction.apply(call, *args)
    weights = torch.randn(3, *y.shape)
    batch = torch.autograd.grad(y, args.rows, weights, retain_graph=True, is_grads_batched=True)[0]
    for weight, found in zip(weights, batch, strict=True):
        (want,) = torch.autograd.grad(y, args.rows, weight, retain_graph=True)
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_a_mask_has_no_gradient(ops):
    mask = torch.ones(B, H, requires_grad=True)
    _, args, call = made(ops, mask=mask)
    outputs = LSTMFunction.apply(call, *args)
    with pytest.raises(KernelError, match="the recurrent mask has no gradient; detach it"):
        torch.autograd.grad(loss_of(outputs), args.rows)


def test_without_output_gradients_arguments_have_none(ops):
    _, args, _ = made(ops)
    needs = LSTMArgs(*(True,) * len(args))
    none = slow_gradients(args, TORCHS_CELL, (None, None, None), needs, strict=True)
    assert none == (None,) * len(args)


def test_gradients_arrive_at_their_arguments_in_their_dtype(ops):
    _, args, _ = made(ops)
    args = args._replace(w_ih=args.w_ih.detach().bfloat16(), b_hh=args.b_hh.detach().double())
    values = [torch.full((1,), float(n)) for n in range(6)]
    needs = LSTMArgs(*(True,) * len(args))._replace(h0=False)
    found = LSTMArgs(*by_argument(args, Gradients(*values), needs))
    assert found.h0 is None
    assert found.tokens is None
    assert found.gamma_c is None
    assert (float(found.rows), float(found.c0), float(found.w_ih), float(found.w_hh)) == (
        0,
        2,
        3,
        4,
    )
    assert float(found.b_ih) == float(found.b_hh) == 5.0
    assert (found.w_ih.dtype, found.b_hh.dtype) == (torch.bfloat16, torch.float64)
