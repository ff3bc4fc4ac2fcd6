"""The native sequence recorded for autograd: everything kept, or in parts that are run again."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from fastlstm.errors import KernelError, counted
from fastlstm.ops import native_call
from fastlstm.ops.differentiable import gradients_by_operators, why_operators
from fastlstm.ops.native_call import Cell, Gradients, LSTMArgs, SavedActivations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

_NUM_TENSORS = len(LSTMArgs._fields)


class LSTMFunction(torch.autograd.Function):
    """The sequence with all gates kept. The first backward pass uses up what was kept."""

    @staticmethod
    def forward(
        ctx: Any, strict: bool, cell: Cell, is_bf16: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        y, hT, cT, kept = native_call.forward(LSTMArgs(*tensors), is_bf16, keep=True, cell=cell)
        assert kept is not None
        ctx.save_for_backward(*tensors, y, *kept)
        ctx.set_materialize_grads(False)
        ctx.strict, ctx.cell, ctx.is_bf16, ctx.is_used = strict, cell, is_bf16, False
        return y, hT, cT

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        s, y, saved = saved_tensors(ctx)
        if all(grad is None for grad in grads):
            return (None,) * (3 + _NUM_TENSORS)
        needs, wanted = _wanted(ctx, s)
        if (why := why_operators(s, grads)) is not None:
            slow = gradients_by_operators(s, ctx.cell, grads, needs, why, strict=ctx.strict)
            return None, None, None, *slow
        kept = SavedActivations(*saved)
        if ctx.is_used:
            *_, fresh = native_call.forward(s, ctx.is_bf16, keep=True, cell=ctx.cell)
            assert fresh is not None
            kept = fresh
        ctx.is_used = True
        given = (grads[0], grads[1], grads[2])
        found = native_call.backward(s, y, kept, given, wanted, ctx.cell)
        return None, None, None, *by_argument(s, found, needs)


class CheckpointedLSTMFunction(torch.autograd.Function):
    """The sequence in parts of `steps` steps, each run again when its gradients are due.

    Between the two passes only the states at the parts' beginnings are kept.
    """

    @staticmethod
    def forward(
        ctx: Any, steps: int, strict: bool, cell: Cell, is_bf16: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        s = LSTMArgs(*tensors)
        T, B, _, H = s.sizes
        y = native_call.empty((T, B, H), native_call.element_dtype(is_bf16))
        states: list[Tensor] = []
        h, c = s.h0, s.c0
        for first in range(0, T, steps):
            states += (h, c)
            part = _part(s._replace(h0=h, c0=c), first, steps)
            _, h, c, _ = native_call.forward(
                part, is_bf16, keep=False, cell=cell, first_row=first * B, y=y[first:][:steps]
            )
        ctx.save_for_backward(*tensors, y, *states[2:])
        ctx.set_materialize_grads(False)
        ctx.strict, ctx.cell, ctx.is_bf16, ctx.steps = strict, cell, is_bf16, steps
        return y, h, c

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        s, _, saved = saved_tensors(ctx)
        if all(grad is None for grad in grads):
            return (None,) * (4 + _NUM_TENSORS)
        needs, wanted = _wanted(ctx, s)
        if (why := why_operators(s, grads)) is not None:
            slow = gradients_by_operators(s, ctx.cell, grads, needs, why, strict=ctx.strict)
            return None, None, None, None, *slow
        states = (s.h0, s.c0, *saved)
        (T, B, *_), steps = s.sizes, ctx.steps
        dy, dh, dc = grads
        d_rows: list[Tensor] = []
        total: Gradients | None = None
        for number in reversed(range(-(-T // steps))):
            first = number * steps
            h, c = states[2 * number : 2 * number + 2]
            part = _part(s._replace(h0=h, c0=c), first, steps)
            part_y, _, _, kept = native_call.forward(
                part, ctx.is_bf16, keep=True, cell=ctx.cell, first_row=first * B
            )
            assert kept is not None
            given = (None if dy is None else dy[first:][:steps], dh, dc)
            found = native_call.backward(
                part, part_y, kept, given, wanted, ctx.cell, first_row=first * B
            )
            dh, dc = found.h0, found.c0
            if s.tokens is None and found.rows is not None:
                d_rows.append(found.rows)
                found = found._replace(rows=None)
            total = found if total is None else _sum(total, found)
        assert total is not None
        if d_rows:
            total = total._replace(rows=torch.cat(d_rows[::-1]))
        return None, None, None, None, *by_argument(s, total, needs)


def _part(s: LSTMArgs, first: int, steps: int) -> LSTMArgs:
    """Steps `first` to `first + steps` of a sequence whose states are those at `first`."""
    if s.tokens is None:
        s = s._replace(rows=s.rows[first:][:steps])
    else:
        s = s._replace(tokens=s.tokens[first:][:steps])
    T = s.sizes[0]
    begins, ends = (None if t is None else (t - first).clamp(0, T) for t in (s.begins, s.ends))
    return s._replace(begins=begins, ends=ends)


def _sum(total: Gradients, found: Gradients) -> Gradients:
    """Adds the gradients of an earlier part; its initial states' are those of the whole."""
    for name in set(Gradients._fields) - {"h0", "c0"}:
        sum_, part = getattr(total, name), getattr(found, name)
        if sum_ is not None:
            sum_ += part
    return total._replace(h0=found.h0, c0=found.c0)


@cache
def steps_per_part(
    T: int, B: int, H: int, is_bf16: bool, has_norm: bool, max_activation_bytes: int
) -> tuple[int, int]:
    """Returns the steps kept at a time within `max_activation_bytes`, and the bytes they take.

    The longest parts that fit, T itself where all of it does; where none fit, those that take
    least.
    """
    chunk = -(-native_call.CHUNK_ROWS // B)
    best = (T, bytes_kept(T, B, H, is_bf16, has_norm))
    for number in range(2, -(-T // chunk) + 1):
        if best[1] <= max_activation_bytes:
            break
        steps = -(-T // (number * chunk)) * chunk
        states = 2 * 4 * B * H * (-(-T // steps) - 1)
        size = states + bytes_kept(steps, B, H, is_bf16, has_norm)
        best = min(best, (steps, size), key=lambda pair: pair[1])
    return best


def describe_kept(
    T: int, B: int, H: int, is_bf16: bool, has_norm: bool, max_activation_bytes: int
) -> str:
    """Says what is kept for backward, and what that costs."""
    whole = bytes_kept(T, B, H, is_bf16, has_norm)
    steps, size = steps_per_part(T, B, H, is_bf16, has_norm, max_activation_bytes)
    if steps >= T:
        return f"keeps {size / 1e6:.1f} MB for backward"
    text = (
        f"keeps {size / 1e6:.1f} of {whole / 1e6:.1f} MB for backward and runs forward twice,"
        f" {counted(steps, 'step')} at a time"
    )
    if size > max_activation_bytes:
        text += f"; the {max_activation_bytes / 1e6:.1f} MB asked for cannot be had"
    return text


def bytes_kept(T: int, B: int, H: int, is_bf16: bool, has_norm: bool) -> int:
    """Returns the bytes that `SavedActivations` takes for a sequence."""
    sizes = native_call.kept_sizes(T, B, H, is_bf16, has_norm)
    dtypes = native_call.kept_dtypes(is_bf16)
    return sum(size * dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True))


def saved_tensors(ctx: Any) -> tuple[LSTMArgs, Tensor, tuple[Tensor, ...]]:
    """Returns the arguments, `y`, and what else was saved."""
    tensors = ctx.saved_tensors
    s = LSTMArgs(*tensors[:_NUM_TENSORS])
    if s.mask is not None and s.mask.requires_grad:
        raise KernelError("the recurrent mask has no gradient; detach it")
    return s, tensors[_NUM_TENSORS], tensors[_NUM_TENSORS + 1 :]


def _wanted(ctx: Any, s: LSTMArgs) -> tuple[dict[str, bool], tuple[bool, bool, bool, bool]]:
    """Returns which arguments need a gradient, by name and as `native_call.backward` asks."""
    needs = dict(zip(s._fields, ctx.needs_input_grad[-_NUM_TENSORS:], strict=True))
    return needs, (needs["rows"], needs["w_ih"], needs["w_hh"], needs["b_ih"] or needs["b_hh"])


def by_argument(s: LSTMArgs, found: Gradients, needs: dict[str, bool]) -> Iterator[Tensor | None]:
    """Yields the gradient of every argument in its dtype, None where none is needed."""
    by_name = {**found._asdict(), "b_ih": found.bias, "b_hh": found.bias}
    for name, t in zip(LSTMArgs._fields, s, strict=True):
        yield by_name[name].to(t.dtype) if t is not None and needs[name] else None
