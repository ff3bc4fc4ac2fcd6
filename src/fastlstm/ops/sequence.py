"""The native sequence as one torch operator: schema, shapes without data, gradient.

Being one operator it is one node for torch.compile and torch.export.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastlstm.errors import KernelError
from fastlstm.ops import native_call
from fastlstm.ops.call import LSTMOutput
from fastlstm.ops.native_call import Kept, Sequence

_NUM_ARGUMENTS = len(Sequence._fields)


def run_sequence(s: Sequence, dtype: torch.dtype, *, keep: bool) -> LSTMOutput:
    """Runs a layer on the native kernels, recorded for autograd with `keep`.

    Args:
        s: arguments on the CPU.
        dtype: float32 or bfloat16, of the matrix operands and `y`.
        keep: a gradient will be asked for.

    Returns:
        `y` in `dtype`, `hT` and `cT` in float32.
    """
    is_bf16 = dtype == torch.bfloat16
    if keep or is_traced(s.rows):
        y, hT, cT, *_ = lstm_sequence(*s, is_bf16, keep)
        return LSTMOutput(y, hT, cT)
    y, hT, cT, _ = native_call.forward(s, is_bf16, keep=False)
    return LSTMOutput(y, hT, cT)


@torch.library.custom_op("fastlstm::lstm_sequence", mutates_args=())
def lstm_sequence(
    rows: Tensor,
    tokens: Tensor | None,
    h0: Tensor,
    c0: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    mask: Tensor | None,
    begins: Tensor | None,
    ends: Tensor | None,
    is_bf16: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns y, hT, cT, and what backward needs: gates and cells (empty without `keep`)."""
    s = Sequence(rows, tokens, h0, c0, w_ih, w_hh, b_ih, b_hh, mask, begins, ends)
    y, hT, cT, kept = native_call.forward(s, is_bf16, keep)
    return y, hT, cT, *(kept or (torch.empty(0), torch.empty(0)))


@lstm_sequence.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    *tensors, is_bf16, keep = args
    s = Sequence(*tensors)
    T, B, _, H = s.sizes
    gates, cells = native_call.kept_sizes(T, B, H, is_bf16) if keep else (0, 0)
    dtype = native_call.element_dtype(is_bf16)
    empty = s.h0.new_empty
    f32 = torch.float32
    return (
        empty((T, B, H), dtype=dtype),
        empty((B, H), dtype=f32),
        empty((B, H), dtype=f32),
        empty(gates, dtype=dtype if keep else f32),
        empty(cells, dtype=f32),
    )


@torch.library.custom_op("fastlstm::lstm_sequence_backward", mutates_args=())
def lstm_sequence_backward(
    rows: Tensor,
    tokens: Tensor | None,
    h0: Tensor,
    c0: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    mask: Tensor | None,
    begins: Tensor | None,
    ends: Tensor | None,
    y: Tensor,
    gates: Tensor,
    cells: Tensor,
    dy: Tensor | None,
    dhT: Tensor | None,
    dcT: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of rows, h0, c0, w_ih, w_hh and the bias; `gates` is left alone."""
    s = Sequence(rows, tokens, h0, c0, w_ih, w_hh, None, None, mask, begins, ends)
    found = native_call.backward(s, y, Kept(gates.clone(), cells), (dy, dhT, dcT), (True,) * 4)
    return tuple(found)  # type: ignore[return-value]


@lstm_sequence_backward.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    rows, tokens, h0, c0, w_ih, w_hh, _, _, _, y = args[:10]
    f32 = torch.float32
    return (
        torch.empty_like(rows, dtype=y.dtype if tokens is None else f32),
        torch.empty_like(h0, dtype=f32),
        torch.empty_like(c0, dtype=f32),
        torch.empty_like(w_ih, dtype=f32),
        torch.empty_like(w_hh, dtype=f32),
        w_hh.new_empty(w_hh.shape[0], dtype=f32),
    )


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, is_bf16, keep = inputs
    y, _, _, gates, cells = output
    ctx.save_for_backward(*tensors, y, gates, cells)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(gates, cells)
    ctx.is_bf16 = is_bf16
    ctx.is_used = not keep


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, y, gates, cells = ctx.saved_tensors
    s, given = Sequence(*tensors), (grads[0], grads[1], grads[2])
    if all(grad is None for grad in given):
        return (None,) * (_NUM_ARGUMENTS + 2)
    has_graph = any(t is not None and t.requires_grad for t in (*s, *given))
    if torch.is_grad_enabled() and has_graph and not is_traced(s.rows):
        raise KernelError(
            "the native LSTM kernel has no second derivative (create_graph=True);"
            " use backend='reference' for that"
        )
    if s.mask is not None and s.mask.requires_grad:
        raise KernelError("the recurrent mask has no gradient; detach it")
    names = Sequence._fields
    needs = {name: ctx.needs_input_grad[k] for k, name in enumerate(names)}
    wanted = (needs["rows"], needs["w_ih"], needs["w_hh"], needs["b_ih"] or needs["b_hh"])
    if is_traced(s.rows):
        rest = s._replace(b_ih=None, b_hh=None)
        found = native_call.Gradients(
            *lstm_sequence_backward(*(*rest[:6], *rest[8:]), y, gates, cells, *given)
        )
    else:
        if ctx.is_used:  # a second pass over the same graph: the first one used the gates up
            *_, kept = native_call.forward(s, ctx.is_bf16, keep=True)
            assert kept is not None
        else:
            kept = Kept(gates, cells)
        ctx.is_used = True
        found = native_call.backward(s, y, kept, given, wanted)
    by_name = {**found._asdict(), "b_ih": found.bias, "b_hh": found.bias}
    return (
        *(
            by_name[name].to(t.dtype) if t is not None and needs[name] else None
            for name, t in zip(names, s, strict=True)
        ),
        None,
        None,
    )


lstm_sequence.register_autograd(_backward, setup_context=_set_up)


def is_traced(t: Tensor) -> bool:
    """Whether a tracer records instead of computing: then no address may be asked for."""
    return (
        torch.compiler.is_compiling()
        or type(t) not in (Tensor, torch.nn.Parameter)
        or torch.utils._python_dispatch._get_current_dispatch_mode() is not None
    )
