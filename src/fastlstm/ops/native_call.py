"""The native LSTM on tensors: check nothing twice, convert, pass addresses.

csrc/lstm.h defines layouts and lifetimes. Nothing here knows of autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlstm.errors import ShapeError
from fastlstm.ops import kernels
from fastlstm.ops.call import LSTMArgs
from fastlstm.ops.cell_options import ACTIVATIONS, TORCHS_CELL, CellOptions
from fastlstm.ops.kernels import address_of, dense, each, element_dtype, elements, empty, floats
from fastlstm.ops.packed_weights import packed
from fastlstm.system import hardware

CHUNK_ROWS = 128
"""Rows per chunk of whole steps in `SavedActivations`: chunk_steps of csrc/lstm.h."""


class SavedActivations(NamedTuple):
    """What the backward pass needs, in the kernels' order.

    Attributes:
        gates: after their activations.
        cells: of every step.
        normed: both normalised products of a layer norm, or empty.
        moments: means and scales of every row of a layer norm, or empty.
    """

    gates: Tensor
    cells: Tensor
    normed: Tensor
    moments: Tensor


class Gradients(NamedTuple):
    """Gradients of a sequence's arguments; None if not needed."""

    rows: Tensor | None
    h0: Tensor | None
    c0: Tensor | None
    w_ih: Tensor | None
    w_hh: Tensor | None
    bias: Tensor | None
    gamma_ih: Tensor | None = None
    gamma_hh: Tensor | None = None
    gamma_c: Tensor | None = None
    beta_c: Tensor | None = None


def saved_layout(
    kernel: Any, T: int, B: int, H: int, has_norm: bool
) -> tuple[tuple[int, torch.dtype], ...]:
    """Returns the number of values and the dtype of each of `SavedActivations`."""
    padded = -(-H // kernel.lanes) * kernel.lanes
    is_known = isinstance(T, int) and isinstance(B, int)
    rows = kernel.gate_rows(T, B) if is_known else symbolic_gate_rows(T, B)
    gates, cells = rows * 4 * padded, (T + 1) * B * padded
    element, normed, moments = element_dtype(kernel.is_bf16), 0, 0
    if has_norm:
        normed, moments = 2 * gates, 4 * T * B
    return (gates, element), (cells, torch.float32), (normed, element), (moments, torch.float32)


def symbolic_gate_rows(T: Any, B: Any) -> Any:
    """As the kernels' `gate_rows`, for symbolic T and B of a graph with dynamic shapes."""
    steps = torch.sym_min(-(-CHUNK_ROWS // B), T)
    # Never below T * B: torch cannot derive that, and would ask whether there are 2 values or more.
    return torch.sym_max(-(-T // steps) * steps * B, T * B)


def forward(
    directions: Sequence[LSTMArgs],
    is_bf16: bool,
    keep: bool,
    options: CellOptions = TORCHS_CELL,
    *,
    first_row: int = 0,
    y: Tensor | None = None,
) -> tuple[Tensor, list[Tensor], list[Any]]:
    """Runs one direction or both of a layer on the CPU, with matrix operands in bf16 or float32.

    Both directions run side by side. The second reads the same rows from the last step to the
    first; its begins and ends count its own steps. `first_row` is the number of earlier rows
    `t * B + b` of a longer sequence, for its random draws.

    Returns `y` `(T, B, D * H)`, in the memory of `y` if given; `hT`, `cT` `(B, H)` float32 of every
    direction in one list; with `keep` the `SavedActivations` of every direction, else None each.
    Raises ShapeError for a token outside of the embedding.
    """
    T, B, I, H = directions[0].sizes()  # noqa: E741
    kernel = kernels.fastest_kernels(is_bf16)
    num = len(directions)
    y = empty((T, B, num * H), element_dtype(is_bf16)) if y is None else y
    threads, members = kernels.team_of_layer(T, B, I, H, num)
    packers = kernels.num_threads(B, I, H)
    states = [empty((B, H)) for _ in range(2 * num)]
    calls, all_saved, in_use = [], [], []
    for k, args in enumerate(directions):
        _check_tokens(args)
        weights = packed(args, kernel, packers, in_training=keep, index=k).memory
        rows = elements(args.rows, is_bf16)
        saved = None
        if keep:
            layout = saved_layout(kernel, T, B, H, args.gamma_hh is not None)
            saved = SavedActivations(*(empty((n,), dtype) for n, dtype in layout))
        given = (weights, *each(floats, (args.h0, args.c0, args.mask)))
        tokens, *ends = each(dense, (args.tokens, args.begins, args.ends))
        cell, kept = _native_options(args, options, first_row, saved)
        calls.append((
            T, B, I, H, k,
            *_input(rows, tokens, I, is_bf16),
            *map(address_of, (*given, *ends)),
            y.data_ptr() + k * H * y.itemsize, num * H, *map(address_of, states[2 * k : 2 * k + 2]),
            *(map(address_of, saved[:2]) if saved is not None else (0, 0)), cell,
        ))  # fmt: skip
        all_saved.append(saved)
        in_use.append((rows, given, tokens, ends, kept))
    first = directions[0]
    with kernels.profiled("fastlstm::lstm", first.rows, first.w_ih, first.w_hh, y):
        kernel.forward(threads, members, *calls)
    return y, states, all_saved


def _input(rows: Tensor, tokens: Tensor | None, I: int, is_bf16: bool) -> tuple[int, ...]:  # noqa: E741
    """Returns the fields of `Input` (csrc/lstm.h): address and number of rows, stride, tokens."""
    num_rows = rows.shape[0] if tokens is not None else rows.shape[0] * rows.shape[1]
    return rows.data_ptr(), num_rows, kernels.padded_columns(I, is_bf16), address_of(tokens)


def backward(
    directions: Sequence[LSTMArgs],
    y: Tensor,
    all_saved: Sequence[SavedActivations],
    grads: tuple[Tensor | None, ...],
    needs: Sequence[LSTMArgs],
    options: CellOptions = TORCHS_CELL,
    *,
    first_row: int = 0,
) -> list[Gradients]:
    """Runs `forward` backward; `gates` and `normed` of the saved activations are overwritten.

    `grads` are the gradients of `y` `(T, B, D * H)`, then of `hT` and `cT` `(B, H)` of every
    direction, or None each; `needs` marks arguments that need a gradient. Returns float32 gradients
    of every direction, for dense rows in the dtype of `y`; raises the errors of `forward`.
    """
    T, B, I, H = directions[0].sizes()  # noqa: E741
    num, is_bf16 = len(directions), y.dtype == torch.bfloat16
    kernel = kernels.fastest_kernels(is_bf16)
    threads, members = kernels.team_of_layer(T, B, I, H, num)
    packers = kernels.num_threads(B, I, H)
    dy = None if grads[0] is None else grads[0].to(y.dtype).contiguous()
    calls, found, in_use = [], [], []
    for k, (args, saved, need) in enumerate(zip(directions, all_saved, needs, strict=True)):
        _check_tokens(args)  # their memory may have been written to since: a data loader's buffer
        weights = _backward_weights(args, kernel, packers, k)
        rows = elements(args.rows, is_bf16)
        gradients = _empty_gradients(args, need, y.dtype)
        d_state = each(floats, grads[1 + 2 * k : 3 + 2 * k])
        h0, mask = each(floats, (args.h0, args.mask))
        tokens, begins, ends = each(dense, (args.tokens, args.begins, args.ends))
        cell, kept = _native_options(args, options, first_row, saved)
        at = k * H * y.itemsize
        calls.append((
            T, B, I, H, k,
            *_input(rows, tokens, I, is_bf16),
            *map(address_of, (*weights, h0, mask, begins, ends)),
            y.data_ptr() + at, num * H, *map(address_of, (saved.cells, saved.gates)),
            0 if dy is None else dy.data_ptr() + at, *map(address_of, d_state),
            *map(address_of, gradients[:6]), cell, *map(address_of, gradients[6:]),
        ))  # fmt: skip
        found.append(gradients)
        in_use.append((weights, rows, d_state, h0, mask, tokens, begins, ends, kept))
    first = directions[0]
    with kernels.profiled("fastlstm::lstm_backward", first.rows, first.w_ih, first.w_hh, y):
        kernel.backward(threads, members, *calls)
    return found


def _empty_gradients(args: LSTMArgs, needs: LSTMArgs, dtype: torch.dtype) -> Gradients:
    """Returns memory for the gradients that `needs` marks; layer norm needs all of its own."""
    _, B, I, H = args.sizes()  # noqa: E741
    rows = dtype if args.tokens is None else torch.float32
    return Gradients(
        empty(args.rows.shape, rows) if needs.rows else None,
        empty((B, H)) if needs.h0 else None,
        empty((B, H)) if needs.c0 else None,
        empty((4 * H, I)) if needs.w_ih else None,
        empty((4 * H, H)) if needs.w_hh else None,
        empty((4 * H,)) if needs.b_ih or needs.b_hh else None,
        *(None if t is None else empty(t.shape) for t in args.norm()),
    )


def _backward_weights(
    args: LSTMArgs, kernel: Any, threads: int, index: int
) -> tuple[Tensor | None, ...]:
    """Returns the packed weights; or for few rows None, w_ih and w_hh, which need no packing."""
    T, B, I, H = args.sizes()  # noqa: E741
    if args.gamma_hh is None and kernel.reads_unpacked(T, B, I, H):
        return None, floats(args.w_ih), floats(args.w_hh)
    weights = packed(args, kernel, threads, is_backward=True, in_training=True, index=index)
    return weights.memory, None, None


def _check_tokens(args: LSTMArgs) -> None:
    """The kernels read, and in backward write, the rows that tokens name."""
    if args.tokens is None:
        return
    num_rows = args.rows.shape[0]
    low, high = (int(v) for v in args.tokens.aminmax())
    if low < 0 or high >= num_rows:
        raise ShapeError(
            f"tokens run from {low} to {high}, the embedding has rows 0 to {num_rows - 1}"
        )


def _native_options(
    args: LSTMArgs, options: CellOptions, first_row: int, saved: SavedActivations | None
) -> tuple[int, object]:
    """Returns the address of the options, 0 for torch's cell, and what must live as long."""
    is_torchs = options is TORCHS_CELL or options.in_evaluation() == TORCHS_CELL
    if is_torchs and args.gamma_hh is None:
        return 0, None
    names = options.activation, options.recurrent_activation
    tensors = (
        *each(dense, (args.seed,)),
        *each(floats, args.norm()),
        *(saved[2:] if saved is not None else (None, None)),
    )
    native = hardware.native().LSTMCellCall(
        *map(ACTIVATIONS.index, names), *options.zoneout, first_row, *map(address_of, tensors)
    )
    return native.address, (native, tensors)
