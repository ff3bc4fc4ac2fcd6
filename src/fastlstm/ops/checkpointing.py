"""Activation checkpointing: the native sequence in parts, within a limit of bytes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fastlstm.errors import counted
from fastlstm.ops import native_call
from fastlstm.ops.autograd import by_argument, saved_tensors, slow_gradients
from fastlstm.ops.call import LSTMArgs, LSTMCall
from fastlstm.ops.kernels import element_dtype, empty, fastest_kernels
from fastlstm.ops.native_call import Gradients


class CheckpointedLSTMFunction(torch.autograd.Function):
    """The sequence in parts of `steps` steps; the backward pass runs each part again.

    Only the states at the begin of each part are saved.
    """

    @staticmethod
    def forward(ctx: Any, steps: int, call: LSTMCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, is_bf16 = LSTMArgs(*tensors), call.dtype is torch.bfloat16
        T, B, _, H = args.sizes()
        y = empty((T, B, H), element_dtype(is_bf16))
        states: list[Tensor] = []
        h, c = args.h0, args.c0
        for first in range(0, T, steps):
            states += (h, c)
            part = _part(args._replace(h0=h, c0=c), first, steps)
            _, (h, c), _ = native_call.forward(
                (part,), is_bf16, False, call.options, first_row=first * B, y=y[first:][:steps]
            )
        ctx.save_for_backward(*tensors, y, *states[2:])
        ctx.set_materialize_grads(False)
        ctx.call, ctx.steps = call, steps
        return y, h, c

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        args, _, saved = saved_tensors(ctx)
        call: LSTMCall = ctx.call
        needs = LSTMArgs(*ctx.needs_input_grad[2:])
        slow = slow_gradients((args,), call.options, grads, (needs,), strict=call.strict)
        if slow is not None:
            return None, None, *slow
        states = (args.h0, args.c0, *saved)
        (T, B, *_), steps = args.sizes(), ctx.steps
        dy, dh, dc = grads
        d_rows: list[Tensor] = []
        total: Gradients | None = None
        inner = needs._replace(h0=True, c0=True)  # type: ignore[arg-type]
        for number in reversed(range(-(-T // steps))):
            first = number * steps
            h, c = states[2 * number : 2 * number + 2]
            part = _part(args._replace(h0=h, c0=c), first, steps)
            part_y, _, fresh = native_call.forward(
                (part,), call.dtype is torch.bfloat16, True, call.options, first_row=first * B
            )
            part_grads = (None if dy is None else dy[first:][:steps], dh, dc)
            (gradients,) = native_call.backward(
                (part,), part_y, fresh, part_grads, (inner,), call.options, first_row=first * B
            )
            dh, dc = gradients.h0, gradients.c0
            if args.tokens is None and gradients.rows is not None:
                d_rows.append(gradients.rows)
                gradients = gradients._replace(rows=None)
            total = gradients if total is None else _sum(total, gradients)
        assert total is not None
        if d_rows:
            total = total._replace(rows=torch.cat(d_rows[::-1]))
        return None, None, *by_argument(args, total, needs)


def _part(args: LSTMArgs, first: int, steps: int) -> LSTMArgs:
    """Returns steps `first` to `first + steps`; the states in `args` are those at `first`."""
    if args.tokens is None:
        args = args._replace(rows=args.rows[first:][:steps])
    else:
        args = args._replace(tokens=args.tokens[first:][:steps])
    T = args.sizes()[0]
    begins, ends = (None if t is None else (t - first).clamp(0, T) for t in args[9:11])
    return args._replace(begins=begins, ends=ends)


def _sum(total: Gradients, part: Gradients) -> Gradients:
    """Adds the gradients of an earlier part; takes the gradients of that part's initial states."""
    for name, sum_, more in zip(Gradients._fields, total, part, strict=True):
        if name not in ("h0", "c0") and sum_ is not None and more is not None:
            sum_ += more
    return total._replace(h0=part.h0, c0=part.c0)


@lru_cache
def steps_per_part(call: LSTMCall) -> tuple[int, int]:
    """Returns the steps per part within `max_activation_bytes`, and the saved bytes.

    It takes the longest parts that fit: T steps without a limit. If none fit, it takes the parts
    with the fewest bytes.
    """
    T, B, limit = call.T, call.B, call.max_activation_bytes
    chunk = -(-native_call.CHUNK_ROWS // B)
    best = (T, bytes_saved(call))
    if limit is None:
        return best
    for number in range(2, -(-T // chunk) + 1):
        if best[1] <= limit:
            break
        steps = -(-T // (number * chunk)) * chunk
        states = 2 * 4 * B * call.H * (-(-T // steps) - 1)
        size = states + bytes_saved(call._replace(T=steps))
        best = min(best, (steps, size), key=lambda pair: pair[1])
    return best


def bytes_saved(call: LSTMCall) -> int:
    """Returns the bytes of a call's `SavedActivations`."""
    kernel = fastest_kernels(call.dtype is torch.bfloat16)
    layout = native_call.saved_layout(kernel, call.T, call.B, call.H, call.options.layer_norm)
    return sum(n * dtype.itemsize for n, dtype in layout)


def describe_saved(call: LSTMCall) -> str:
    """Describes what a call with a limit saves for backward, and the cost."""
    whole, limit = bytes_saved(call), call.max_activation_bytes or 0
    steps, size = steps_per_part(call)
    if steps >= call.T:
        return f"keeps {size / 1e6:.1f} MB for backward"
    text = (
        f"keeps {size / 1e6:.1f} of {whole / 1e6:.1f} MB for backward and runs forward twice,"
        f" {counted(steps, 'step')} at a time"
    )
    return text if size <= limit else f"{text}; it cannot stay within {limit / 1e6:.1f} MB"
