"""The native sequence as one operator of torch: one node for torch.compile and torch.export.

It takes a list of the tensors that are not None, with a bitmask of their positions, because torch
2.13 silently drops gradients for a list with None. Outside a trace, ops/autograd.py costs less per
call and its backward pass may overwrite the saved activations.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fastlstm.errors import KernelError
from fastlstm.ops import native_call
from fastlstm.ops.autograd import NUM_ARGS, by_argument, check_mask, slow_gradients
from fastlstm.ops.call import LSTMArgs, LSTMCall, LSTMOutput
from fastlstm.ops.cell_options import OPTION_NAMES, CellOptions
from fastlstm.ops.kernels import element_dtype, empty, fastest_kernels
from fastlstm.ops.native_call import Gradients, SavedActivations

_OWN_TYPES = frozenset((Tensor, torch.nn.Parameter, type(None)))
_OUTPUTS = 1 + len(SavedActivations._fields)
"""`y` and the saved activations, as the backward operator takes them."""


def is_traced(*tensors: Tensor | None) -> bool:
    """Whether a tracer, transform or tensor subclass must see this call as an operator.

    Such tensors may have no memory, and a dual number carries a tangent: their addresses must not
    be used.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch.utils._python_dispatch._get_current_dispatch_mode() is not None
        or not _OWN_TYPES.issuperset(map(type, tensors))
    )


def run_custom_op(call: LSTMCall, args: LSTMArgs) -> LSTMOutput:
    """Runs a call as the operator, which saves everything for the backward pass."""
    tensors, present = present_tensors(args)
    is_bf16 = call.dtype == torch.bfloat16
    y, hT, cT, *_ = lstm_sequence(tensors, present, call.options.text, is_bf16, call.requires_grad)
    return LSTMOutput(y, hT, cT)


def present_tensors(tensors: Sequence[Tensor | None]) -> tuple[list[Tensor], int]:
    """Returns the tensors that are not None and a bitmask of their positions."""
    present = sum(1 << k for k, t in enumerate(tensors) if t is not None)
    return [t for t in tensors if t is not None], present


def all_tensors(tensors: Sequence[Any], present: int, count: int) -> list[Any]:
    """Returns a list of `count`: `tensors` at the bits of `present`, None elsewhere."""
    rest = iter(tensors)
    return [next(rest) if present >> k & 1 else None for k in range(count)]


@lru_cache
def parsed_options(text: str) -> CellOptions:
    """Returns the options of `CellOptions.text`."""
    return CellOptions(**dict(zip(OPTION_NAMES, ast.literal_eval(text), strict=True)))


@torch.library.custom_op("fastlstm::lstm_sequence", mutates_args=())
def lstm_sequence(
    tensors: list[Tensor], present: int, options: str, is_bf16: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Runs the tensors of an `LSTMArgs`.

    Returns y, hT, cT and `SavedActivations`, which are empty without `keep`.
    """
    args = LSTMArgs(*all_tensors(tensors, present, NUM_ARGS))
    y, (hT, cT), (saved,) = native_call.forward((args,), is_bf16, keep, parsed_options(options))
    if saved is None:
        layout = native_call.saved_layout(fastest_kernels(is_bf16), 0, 0, 0, has_norm=False)
        saved = SavedActivations(*(empty((n,), dtype) for n, dtype in layout))
    return y, hT, cT, *saved


@lstm_sequence.register_fake
def _(
    tensors: list[Tensor], present: int, options: str, is_bf16: bool, keep: bool
) -> tuple[Tensor, ...]:
    args = LSTMArgs(*all_tensors(tensors, present, NUM_ARGS))
    T, B, _, H = args.sizes()
    kernel, has_norm = fastest_kernels(is_bf16), args.gamma_hh is not None
    layout = native_call.saved_layout(kernel, *((T, B, H) if keep else (0, 0, 0)), has_norm)
    new, f32 = args.h0.new_empty, torch.float32
    return (
        new((T, B, H), dtype=element_dtype(is_bf16)),
        *(new((B, H), dtype=f32) for _ in range(2)),
        *(new(n, dtype=dtype) for n, dtype in layout),
    )


@torch.library.custom_op("fastlstm::lstm_sequence_backward", mutates_args=())
def lstm_sequence_backward(tensors: list[Tensor], present: int, options: str) -> list[Tensor]:
    """Takes arguments, `y`, saved activations, gradients of y, hT, cT; changes none of them.

    Returns the fields of `Gradients`, layer-norm gradients only if the cell has a layer norm.
    """
    args, (y, *activations), grads = _split(tensors, present)
    saved = SavedActivations(*activations)
    saved = saved._replace(gates=saved.gates.clone(), normed=saved.normed.clone())
    needs = LSTMArgs(*(True,) * NUM_ARGS)  # type: ignore[arg-type]
    (gradients,) = native_call.backward(
        (args,), y, (saved,), tuple(grads), (needs,), parsed_options(options)
    )
    return [t for t in gradients if t is not None]


@lstm_sequence_backward.register_fake
def _(tensors: list[Tensor], present: int, options: str) -> list[Tensor]:
    args, (y, *_), _ = _split(tensors, present)
    bias = args.w_hh.new_empty(args.w_hh.shape[:1])
    whole = [
        t for t in (args.h0, args.c0, args.w_ih, args.w_hh, bias, *args.norm()) if t is not None
    ]
    dtype = y.dtype if args.tokens is None else torch.float32
    return [
        args.rows.new_empty(args.rows.shape, dtype=dtype),
        *(t.new_empty(t.shape, dtype=torch.float32) for t in whole),
    ]


def _split(tensors: list[Tensor], present: int) -> tuple[LSTMArgs, list[Any], list[Any]]:
    """Returns the arguments; `y` and the saved activations; the gradients of the outputs."""
    whole = all_tensors(tensors, present, NUM_ARGS + _OUTPUTS + 3)
    return LSTMArgs(*whole[:NUM_ARGS]), whole[NUM_ARGS:][:_OUTPUTS], whole[NUM_ARGS + _OUTPUTS :]


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.present, ctx.options, _, ctx.has_kept = inputs
    y, _, _, *saved = output
    ctx.save_for_backward(*tensors, y, *saved)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*saved)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    args = LSTMArgs(*all_tensors(saved[:-_OUTPUTS], ctx.present, NUM_ARGS))
    check_mask(args)
    needs = LSTMArgs(*all_tensors(ctx.needs_input_grad[0], ctx.present, NUM_ARGS))
    if not ctx.has_kept and any(g is not None for g in grads[:3]):
        raise KernelError("lstm_sequence ran with keep=False and can have no gradient")
    options = parsed_options(ctx.options)
    gradients = slow_gradients((args,), options, grads[:3], (needs,), strict=False)
    if gradients is None:
        arguments = present_tensors((*args, *saved[-_OUTPUTS:], *grads[:3]))
        computed = Gradients(*lstm_sequence_backward(*arguments, ctx.options))
        gradients = by_argument(args, computed, needs)
    return [g for k, g in enumerate(gradients) if ctx.present >> k & 1], None, None, None, None


lstm_sequence.register_autograd(_backward, setup_context=_set_up)


def lstm_flop(T: int, B: int, I: int, H: int, V: int | None = None) -> int:  # noqa: E741
    """Returns the floating-point operations of a layer's forward pass; backward has twice as many.

    With tokens, the V rows of the embedding are multiplied once, not once per step.
    """
    rows = T * B if V is None else V
    return 8 * H * (rows * I + T * B * H)


@register_flop_formula(torch.ops.fastlstm.lstm_sequence)
def _forward_flop(shapes: Any, present: int, *args: Any, **kwargs: Any) -> int:
    """Takes shapes in place of tensors, for `torch.utils.flop_counter`."""
    rows, tokens, h0, *_ = all_tensors(shapes, present, NUM_ARGS)
    T, B = (rows if tokens is None else tokens)[:2]
    return lstm_flop(T, B, rows[-1], h0[1], V=None if tokens is None else rows[0])


@register_flop_formula(torch.ops.fastlstm.lstm_sequence_backward)
def _backward_flop(shapes: Any, present: int, *args: Any, **kwargs: Any) -> int:
    return 2 * _forward_flop(shapes, present)
