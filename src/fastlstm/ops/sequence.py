"""The native sequence for torch: autograd functions, and one operator for what traces.

Being one operator it is one node for torch.compile and torch.export. Outside of a trace the
functions (ops/autograd.py) cost less per call, and a backward pass may overwrite what was kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fastlstm.errors import KernelError
from fastlstm.ops import native_call
from fastlstm.ops.autograd import (
    CheckpointedLSTMFunction,
    LSTMFunction,
    by_argument,
    saved_tensors,
    steps_per_part,
)
from fastlstm.ops.call import LSTMOutput
from fastlstm.ops.cell_call import CellCall
from fastlstm.ops.cell_options import ACTIVATIONS
from fastlstm.ops.cost import lstm_flop
from fastlstm.ops.differentiable import (
    gradients_by_operators,
    outputs_by_operators,
    why_operators,
)
from fastlstm.ops.native_call import PLAIN, Cell, LSTMArgs, SavedActivations

_OWN_TYPES = (Tensor, torch.nn.Parameter, type(None))
_NUM_TENSORS = len(LSTMArgs._fields)
_NUM_OPTIONS = len(Cell._fields) + 2


def run_sequence(
    s: LSTMArgs,
    dtype: torch.dtype,
    *,
    keep: bool,
    variant: CellCall | None = None,
    max_activation_bytes: int | None = None,
    strict: bool = False,
) -> LSTMOutput:
    """Runs a layer on the native kernels, recorded for autograd with `keep`.

    Args:
        s: arguments on the CPU.
        dtype: float32 or bfloat16, of the matrix operands and `y`.
        keep: a gradient will be asked for.
        variant: what the cell computes, with its tensors; default torch's.
        max_activation_bytes: how much may be kept for the backward pass, beside arguments and
            `y`; what it needs beyond is computed a second time. A graph that is traced keeps
            everything.
        strict: refuse a derivative that the kernels have not got, a tangent in forward mode too,
            instead of forming it slowly by torch's operators.

    Returns:
        `y` in `dtype`, `hT` and `cT` in float32.
    """
    is_bf16 = dtype == torch.bfloat16
    cell = PLAIN
    if variant is not None:
        s, cell = _with_variant(s, variant)
    if torch.autograd.forward_ad._current_level >= 0 and not torch.compiler.is_compiling():
        y, hT, cT = outputs_by_operators(s, cell, strict=strict)
        y = y.to(dtype)
    elif is_traced(*s):
        y, hT, cT, *_ = lstm_sequence(*s, *cell, is_bf16, keep)
    elif keep:
        y, hT, cT = _recorded(s, cell, is_bf16, max_activation_bytes, strict)
    else:
        y, hT, cT, _ = native_call.forward(s, is_bf16, keep=False, cell=cell)
    return LSTMOutput(y, hT, cT)


def _recorded(
    s: LSTMArgs, cell: Cell, is_bf16: bool, max_activation_bytes: int | None, strict: bool
) -> Any:
    if max_activation_bytes is not None:
        T, B, _, H = s.sizes
        steps, _ = steps_per_part(T, B, H, is_bf16, s.gamma_hh is not None, max_activation_bytes)
        if steps < T:
            return CheckpointedLSTMFunction.apply(steps, strict, cell, is_bf16, *s)  # type: ignore[no-untyped-call]
    return LSTMFunction.apply(strict, cell, is_bf16, *s)  # type: ignore[no-untyped-call]


def _with_variant(s: LSTMArgs, variant: CellCall) -> tuple[LSTMArgs, Cell]:
    norm = variant.norm or (None, None, None, None)
    names = ("mask", "gamma_ih", "gamma_hh", "gamma_c", "beta_c", "seed")
    found = zip(names, (variant.mask, *norm, variant.seed), strict=True)
    cell = Cell(
        ACTIVATIONS.index(variant.options.activation),
        ACTIVATIONS.index(variant.options.recurrent_activation),
        *variant.options.zoneout,
    )
    return s._replace(**dict(found)), cell


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
    gamma_ih: Tensor | None,
    gamma_hh: Tensor | None,
    gamma_c: Tensor | None,
    beta_c: Tensor | None,
    seed: Tensor | None,
    activation: int,
    recurrent_activation: int,
    zoneout_h: float,
    zoneout_c: float,
    is_bf16: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns y, hT, cT, and what backward needs: `SavedActivations`, empty without `keep`."""
    norm = (gamma_ih, gamma_hh, gamma_c, beta_c)
    s = LSTMArgs(rows, tokens, h0, c0, w_ih, w_hh, b_ih, b_hh, mask, begins, ends, *norm, seed)
    cell = Cell(activation, recurrent_activation, zoneout_h, zoneout_c)
    y, hT, cT, kept = native_call.forward(s, is_bf16, keep, cell)
    if kept is None:
        kept = SavedActivations(
            *(native_call.empty((0,), d) for d in native_call.kept_dtypes(is_bf16))
        )
    return y, hT, cT, *kept


@lstm_sequence.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    *_, is_bf16, keep = args
    s = LSTMArgs(*args[:_NUM_TENSORS])
    T, B, _, H = s.sizes
    sizes: tuple[int, ...] = (0,) * 4
    if keep:
        sizes = native_call.kept_sizes(T, B, H, is_bf16, s.gamma_hh is not None)
    dtypes = native_call.kept_dtypes(is_bf16)
    empty = s.h0.new_empty
    f32 = torch.float32
    return (
        empty((T, B, H), dtype=native_call.element_dtype(is_bf16)),
        empty((B, H), dtype=f32),
        empty((B, H), dtype=f32),
        *(empty(n, dtype=d) for n, d in zip(sizes, dtypes, strict=True)),
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
    gamma_ih: Tensor | None,
    gamma_hh: Tensor | None,
    gamma_c: Tensor | None,
    beta_c: Tensor | None,
    seed: Tensor | None,
    activation: int,
    recurrent_activation: int,
    zoneout_h: float,
    zoneout_c: float,
    y: Tensor,
    gates: Tensor,
    cells: Tensor,
    normed: Tensor,
    moments: Tensor,
    dy: Tensor | None,
    dhT: Tensor | None,
    dcT: Tensor | None,
) -> list[Tensor]:
    """Returns the gradients of `Gradients`, without those of a layer norm there is none of.

    What was kept is left alone.
    """
    norm = (gamma_ih, gamma_hh, gamma_c, beta_c)
    s = LSTMArgs(rows, tokens, h0, c0, w_ih, w_hh, None, None, mask, begins, ends, *norm, seed)
    cell = Cell(activation, recurrent_activation, zoneout_h, zoneout_c)
    kept = SavedActivations(gates.clone(), cells, normed.clone(), moments)
    found = native_call.backward(s, y, kept, (dy, dhT, dcT), (True,) * 4, cell)
    return [t for t in found if t is not None]


@lstm_sequence_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    rows, tokens, h0, c0, w_ih, w_hh, _, _, _, *norm = args[:13]
    y = args[18]
    f32 = torch.float32
    return [
        rows.new_empty(rows.shape, dtype=y.dtype if tokens is None else f32),
        *(t.new_empty(t.shape, dtype=f32) for t in (h0, c0, w_ih, w_hh)),
        w_hh.new_empty(w_hh.shape[0], dtype=f32),
        *(t.new_empty(t.shape, dtype=f32) for t in norm if t is not None),
    ]


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    cell = inputs[_NUM_TENSORS:-2]
    y, _, _, *kept = output
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], y, *kept)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*kept)
    ctx.cell, ctx.has_kept = Cell(*cell), inputs[-1]


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    s, y, saved = saved_tensors(ctx)
    if all(grad is None for grad in grads[:3]):
        return (None,) * (_NUM_TENSORS + _NUM_OPTIONS)
    if not ctx.has_kept:
        raise KernelError("lstm_sequence ran with keep=False and can have no gradient")
    needs = dict(zip(LSTMArgs._fields, ctx.needs_input_grad, strict=False))
    if (why := why_operators(s, grads[:3])) is not None:
        slow = gradients_by_operators(s, ctx.cell, grads[:3], needs, why, strict=False)
        return (*slow, *(None,) * _NUM_OPTIONS)
    found = native_call.Gradients(
        *lstm_sequence_backward(*s[:6], *s[8:], *ctx.cell, y, *saved, *grads[:3])
    )
    return (*by_argument(s, found, needs), *(None,) * _NUM_OPTIONS)


lstm_sequence.register_autograd(_backward, setup_context=_set_up)


@register_flop_formula(torch.ops.fastlstm.lstm_sequence)
def _forward_flop(rows: Any, tokens: Any, h0: Any, *args: Any, **kwargs: Any) -> int:
    """Of shapes, as `torch.utils.flop_counter` asks."""
    T, B = (rows if tokens is None else tokens)[:2]
    return lstm_flop(T, B, rows[-1], h0[1], V=None if tokens is None else rows[0])


@register_flop_formula(torch.ops.fastlstm.lstm_sequence_backward)
def _backward_flop(*args: Any, **kwargs: Any) -> int:
    return 2 * _forward_flop(*args)


def is_traced(*tensors: Tensor | None) -> bool:
    """Whether something else than torch's CPU kernels is to see this call: then it is an operator.

    A tracer records instead of computing, a subclass may hold no memory of its own, and a dual
    number carries a tangent: no address may be asked for.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch.utils._python_dispatch._get_current_dispatch_mode() is not None
        or any(type(t) not in _OWN_TYPES for t in tensors)
    )
