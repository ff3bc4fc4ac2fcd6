"""The native sequence for autograd, and the derivatives that the kernels lack."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastlstm.errors import KernelError
from fastlstm.ops import native_call
from fastlstm.ops.call import LSTMArgs, LSTMCall
from fastlstm.ops.cell_options import CellOptions
from fastlstm.ops.native_call import Gradients, SavedActivations
from fastlstm.ops.reference import run_reference

Grads = tuple[Tensor | None, ...]

NUM_ARGS = len(LSTMArgs._fields)


class LSTMFunction(torch.autograd.Function):
    """One direction or both of a layer with all activations saved: `native_call.forward`.

    `tensors` are the fields of an `LSTMArgs` for every direction. Returns `y`, then `hT` and `cT`
    of every direction. The first backward pass overwrites the activations; a second one computes
    them again.
    """

    @staticmethod
    def forward(ctx: Any, call: LSTMCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        is_bf16 = call.dtype is torch.bfloat16
        directions = _each(LSTMArgs, tensors)
        y, states, saved = native_call.forward(directions, is_bf16, True, call.options)
        ctx.save_for_backward(*tensors, y, *itertools.chain(*saved))
        ctx.set_materialize_grads(False)
        ctx.call, ctx.is_used, ctx.count = call, False, len(tensors)
        # As in torch, the joined output may be written to; the saved one has the states.
        return y if len(directions) == 1 else y.clone(), *states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Grads:
        tensors, count, call = ctx.saved_tensors, ctx.count, ctx.call
        directions, y = _each(LSTMArgs, tensors[:count]), tensors[count]
        needs = _each(LSTMArgs, ctx.needs_input_grad[1:])
        for args in directions:
            check_mask(args)
        slow = slow_gradients(directions, call.options, grads, needs, strict=call.strict)
        if slow is not None:
            return None, *slow
        saved: Any = _each(SavedActivations, tensors[count + 1 :])
        if ctx.is_used:
            is_bf16 = y.dtype is torch.bfloat16
            *_, saved = native_call.forward(directions, is_bf16, True, call.options)
        ctx.is_used = True
        found = native_call.backward(directions, y, saved, grads, needs, call.options)
        return None, *itertools.chain(*map(by_argument, directions, found, needs))


def _each(kind: Any, fields: Sequence[Any]) -> list[Any]:
    """Returns a named tuple `kind` for every direction, from the fields of all."""
    size = len(kind._fields)
    if len(fields) == size:
        return [kind(*fields)]
    return [kind(*fields[at : at + size]) for at in range(0, len(fields), size)]


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
    directions: Sequence[LSTMArgs],
    options: CellOptions,
    grads: Grads,
    needs: Sequence[LSTMArgs],
    *,
    strict: bool,
) -> Grads | None:
    """Returns gradients that the kernels cannot compute, or None if they can.

    `grads` are the gradients of `y`, then of `hT` and `cT` of every direction, or None; `needs`
    marks the arguments whose gradients are needed. torch's operators compute these gradients, in
    the dtype of each argument, differentiable in grad mode; `strict` raises KernelError instead.
    """
    present = [g for g in grads if g is not None]
    if not present:
        return (None,) * (NUM_ARGS * len(directions))
    if any(map(is_batched, present)):
        why = "gradients in batches (is_grads_batched=True, vectorize=True)"
    elif torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in itertools.chain(*directions, present)
    ):
        why = "a gradient that is itself differentiated (create_graph=True)"
    else:
        return None
    _refuse_or_warn(why, strict=strict)
    is_differentiable = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        given: list[Any] = list(itertools.chain(*directions))
        # Views: a tensor given as two arguments has a gradient for each.
        views = [
            t.view_as(t) if t is not None and need and t.is_floating_point() else t
            for t, need in zip(given, itertools.chain(*needs), strict=True)
        ]
        outputs = _reference_layer(_each(LSTMArgs, views), options)
        pairs = [
            (o, g.to(o.dtype))
            for o, g in zip(outputs, grads, strict=True)
            if g is not None and o.requires_grad
        ]
        gradients = torch.autograd.grad(
            [o for o, _ in pairs],
            [view for view, t in zip(views, given, strict=True) if view is not t],
            [g for _, g in pairs],
            create_graph=is_differentiable,
            allow_unused=True,
        )
    rest = iter(gradients)
    found = [None if view is t else next(rest) for view, t in zip(views, given, strict=True)]
    return tuple(g if g is None else g.to(t.dtype) for g, t in zip(found, given, strict=True))


def _reference_layer(directions: Sequence[LSTMArgs], options: CellOptions) -> list[Tensor]:
    """Returns `native_call.forward`'s `y` and states, in float32 by torch's operators."""
    outputs, states = [], []
    for k, args in enumerate(directions):
        steps = args if k == 0 else args._replace(rows=args.rows.flip(0))
        y, *last = run_reference(steps, options, torch.float32)
        outputs.append(y if k == 0 else y.flip(0))
        states += last
    return [outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2), *states]


def is_batched(t: Tensor) -> bool:
    """Whether a tensor stands for a batch of tensors, in vmap or with `is_grads_batched`."""
    of_torch = torch._C._functorch
    return of_torch.is_functorch_wrapped_tensor(t) or of_torch.is_legacy_batchedtensor(t)


def _refuse_or_warn(why: str, *, strict: bool) -> None:
    text = f"{why} needs a Python loop over time, the native LSTM kernels have no such derivative"
    if strict:
        raise KernelError(f"{text}; leave out strict and backend, or ask for a plain gradient")
    warnings.warn(text, stacklevel=3)
