"""The native sequence for autograd, and the derivatives that the kernels lack."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from fastlstm.errors import KernelError
from fastlstm.ops import native_call
from fastlstm.ops.call import LSTMArgs, LSTMCall, LSTMOutput
from fastlstm.ops.cell_options import CellOptions
from fastlstm.ops.native_call import Gradients, SavedActivations
from fastlstm.ops.reference import run_reference

Grads = tuple[Tensor | None, ...]

NUM_ARGS = len(LSTMArgs._fields)


class LSTMFunction(torch.autograd.Function):
    """The sequence with all activations saved.

    The first backward pass overwrites the activations; a second one computes them again.
    """

    @staticmethod
    def forward(ctx: Any, call: LSTMCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        is_bf16 = call.dtype is torch.bfloat16
        y, hT, cT, saved = native_call.forward(LSTMArgs(*tensors), is_bf16, True, call.options)
        assert saved is not None
        ctx.save_for_backward(*tensors, y, *saved)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.is_used = call, False
        return y, hT, cT

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Grads:
        args, y, tensors = saved_tensors(ctx)
        call: LSTMCall = ctx.call
        needs = LSTMArgs(*ctx.needs_input_grad[1:])
        slow = slow_gradients(args, call.options, grads, needs, strict=call.strict)
        if slow is not None:
            return None, *slow
        saved = SavedActivations(*tensors)
        if ctx.is_used:
            *_, fresh = native_call.forward(args, y.dtype is torch.bfloat16, True, call.options)
            assert fresh is not None
            saved = fresh
        ctx.is_used = True
        gradients = native_call.backward(args, y, saved, grads, needs, call.options)
        return None, *by_argument(args, gradients, needs)


def saved_tensors(ctx: Any) -> tuple[LSTMArgs, Tensor, tuple[Tensor, ...]]:
    """Returns the arguments, `y`, and the other saved tensors."""
    tensors = ctx.saved_tensors
    args = LSTMArgs(*tensors[:NUM_ARGS])
    check_mask(args)
    return args, tensors[NUM_ARGS], tensors[NUM_ARGS + 1 :]


def check_mask(args: LSTMArgs) -> None:
    """Raises KernelError for a mask that requires a gradient."""
    if args.mask is not None and args.mask.requires_grad:
        raise KernelError("the recurrent mask has no gradient; detach it")


def by_argument(args: LSTMArgs, gradients: Gradients, needs: LSTMArgs) -> Grads:
    """Returns the gradient of every argument in its dtype, or None if not needed."""
    rows, h0, c0, w_ih, w_hh, bias, *norm = gradients
    grads = (rows, None, h0, c0, w_ih, w_hh, bias, bias, None, None, None, *norm, None)
    return tuple(
        g.to(t.dtype) if need and t is not None and g is not None else None
        for t, g, need in zip(args, grads, needs, strict=True)
    )


def slow_gradients(
    args: LSTMArgs, options: CellOptions, grads: Grads, needs: LSTMArgs, *, strict: bool
) -> Grads | None:
    """Returns gradients that the kernels cannot compute, or None if they can.

    `grads` are the gradients of `y`, `hT`, `cT`, or None; `needs` marks the arguments whose
    gradients are needed. torch's operators compute these gradients, in the dtype of each argument,
    differentiable in grad mode; `strict` raises KernelError instead.
    """
    present = [g for g in grads if g is not None]
    if not present:
        return (None,) * NUM_ARGS
    if any(map(is_batched, present)):
        why = "gradients in batches (is_grads_batched=True, vectorize=True)"
    elif torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (*args, *present)
    ):
        why = "a gradient that is itself differentiated (create_graph=True)"
    else:
        return None
    _refuse_or_warn(why, strict=strict)
    is_differentiable = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        # Views: a tensor given as two arguments has a gradient for each.
        views = {
            name: t.view_as(t)
            for (name, t), need in zip(args._asdict().items(), needs, strict=True)
            if t is not None and need and t.is_floating_point()
        }
        outputs = run_reference(args._replace(**views), options, torch.float32)
        pairs = [(o, g.to(o.dtype)) for o, g in zip(outputs, grads, strict=True) if g is not None]
        gradients = torch.autograd.grad(
            [o for o, _ in pairs],
            list(views.values()),
            [g for _, g in pairs],
            create_graph=is_differentiable,
            allow_unused=True,
        )
    by_name = {
        name: g.to(views[name].dtype)
        for name, g in zip(views, gradients, strict=True)
        if g is not None
    }
    return tuple(by_name.get(name) for name in LSTMArgs._fields)


def outputs_with_tangents(args: LSTMArgs, call: LSTMCall) -> LSTMOutput:
    """Runs a sequence by torch's operators in float32, for forward-mode derivatives.

    Raises KernelError with `call.strict`.
    """
    _refuse_or_warn("a derivative in forward mode (jvp)", strict=call.strict)
    out = run_reference(args, call.options, torch.float32)
    return out._replace(y=out.y.to(call.dtype))


def is_batched(t: Tensor) -> bool:
    """Whether a tensor stands for a batch of tensors, in vmap or with `is_grads_batched`."""
    of_torch = torch._C._functorch
    return of_torch.is_functorch_wrapped_tensor(t) or of_torch.is_legacy_batchedtensor(t)


def _refuse_or_warn(why: str, *, strict: bool) -> None:
    text = f"{why} needs a Python loop over time, the native LSTM kernels have no such derivative"
    if strict:
        raise KernelError(f"{text}; leave out strict and backend, or ask for a plain gradient")
    warnings.warn(text, stacklevel=3)
