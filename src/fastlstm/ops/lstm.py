"""One call of an LSTM layer: its arguments are checked, a backend is chosen and runs it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastlstm.errors import ShapeError
from fastlstm.ops.backends.native import NativeBackend
from fastlstm.ops.call import LSTMArgs, LSTMCall, LSTMOutput, describe_call
from fastlstm.ops.cell_options import TORCHS_CELL, CellOptions
from fastlstm.ops.registry import select


def run(
    args: LSTMArgs,
    options: CellOptions = TORCHS_CELL,
    *,
    backend: str | None = None,
    strict: bool = False,
    max_activation_bytes: int | None = None,
) -> LSTMOutput:
    """Runs one layer in one direction over a whole sequence.

    Args:
        args: tensors that fit each other (`check_args`); T and B may be 0.
        options: what the cell computes.
        backend: run this one instead of the best.
        strict: a slow path is a KernelError.
        max_activation_bytes: see `LSTMCall`.

    Returns:
        `y` `(T, B, H)` in the compute dtype, which is autocast's where autocast is on, else that of
        `args.rows`; `hT` and `cT` `(B, H)` in the dtypes of `h0` and `c0`. Matrix operands are
        rounded to the compute dtype, the kernels sum in float32. Gradients have the dtype of each
        argument.

    Raises:
        KernelError: no allowed kernel runs this call.
    """
    must = strict or backend is not None
    call = describe_call(args, options, max_activation_bytes=max_activation_bytes, strict=must)
    runner = select(call, backend=backend, strict=strict).backend
    y, hT, cT = runner.run(call, args) if call.T and call.B else _empty_output(call, args)
    return LSTMOutput(y, hT.to(args.h0.dtype), cT.to(args.c0.dtype))


def run_layer(
    directions: Sequence[LSTMArgs],
    options: CellOptions = TORCHS_CELL,
    *,
    backend: str | None = None,
    strict: bool = False,
    max_activation_bytes: int | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Runs one direction or both of a layer over a whole sequence.

    Args:
        directions: arguments of each, as in `run`. The second reads the same rows from the last
            step to the first; its begins and ends count its own steps.
        options: as in `run`.
        backend: as in `run`.
        strict: as in `run`.
        max_activation_bytes: as in `run`.

    Returns:
        `y` `(T, B, D * H)`; `hT` and `cT` of every direction in one list.

    Raises:
        KernelError: no allowed kernel runs this call.
    """
    if len(directions) == 2:
        must = strict or backend is not None
        call, other = (
            describe_call(args, options, max_activation_bytes=max_activation_bytes, strict=must)
            for args in directions
        )
        runner = select(call, backend=backend, strict=strict).backend
        if call == other and isinstance(runner, NativeBackend):
            found = runner.run_both(call, directions)
            if found is not None:
                return found
    outputs, states = [], []
    for index, args in enumerate(directions):
        steps = args if index == 0 else args._replace(rows=args.rows.flip(0))
        y, *last = run(
            steps, options, backend=backend, strict=strict,
            max_activation_bytes=max_activation_bytes,
        )  # fmt: skip
        outputs.append(y if index == 0 else y.flip(0))
        states += last
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2), states


def _empty_output(call: LSTMCall, args: LSTMArgs) -> LSTMOutput:
    """Returns an empty `y` for no step or lane; every argument still gets a (zero) gradient."""
    with torch.autocast(call.device, enabled=False):
        cast = args.embedded().cast(call.dtype)
        gates = cast.rows @ cast.w_ih.t() + cast.h0 @ cast.w_hh.t()
        for bias in (cast.b_ih, cast.b_hh):
            gates = gates if bias is None else gates + bias
        for each in args.norm():
            gates = gates if each is None else gates + 0.0 * each.sum().to(gates.dtype)
    return LSTMOutput(gates[..., : call.H], args.h0.clone(), args.c0.clone())


def check_args(args: LSTMArgs) -> None:
    """Raises ShapeError for an argument of the wrong shape, device or dtype."""
    rows, tokens, w_hh, weights = args.rows, args.tokens, args.w_hh, args.weights()
    if tokens is None:
        if rows.dim() != 3:
            raise ShapeError(f"x has shape {tuple(rows.shape)}, expected (T, B, I)")
    elif tokens.dim() != 2 or tokens.dtype != torch.int64:
        raise ShapeError(f"tokens are {tokens.dtype} {tuple(tokens.shape)}, expected int64 (T, B)")
    elif rows.dim() != 2:
        raise ShapeError(f"embedding has shape {tuple(rows.shape)}, expected (V, I)")
    if (args.b_ih is None) != (args.b_hh is None):
        raise ShapeError("one of b_ih and b_hh is missing; give both biases or none")
    G, H = w_hh.shape if w_hh.dim() == 2 else (0, 0)
    if w_hh.dim() != 2 or G != 4 * H:
        raise ShapeError(
            f"w_hh has shape {tuple(w_hh.shape)}, expected (4H, H); gates i, f, g, o are"
            " stacked along the first axis"
        )
    T, B, I, _ = args.sizes()  # noqa: E741
    if 0 in (I, H):
        raise ShapeError(f"input size {I} and hidden size {H} were given, both must be at least 1")
    if args.w_ih.dim() == 2 and args.w_ih.shape[1] != I:
        raise ShapeError(
            f"x has last axis {I}, this layer has input_size={args.w_ih.shape[1]}; pass x of"
            f" shape ({T}, {B}, {args.w_ih.shape[1]}) or weights w_ih of shape ({G}, {I})"
        )
    tensors = (args.h0, args.c0, *weights)
    shapes = ((B, H), (B, H), (G, I), (G, H), (G,), (G,))
    names = ("h0", "c0", "w_ih", "w_hh", "b_ih", "b_hh")
    for name, t, shape in zip(names, tensors, shapes, strict=True):
        if t is None:
            continue
        if t.shape != shape:
            raise ShapeError(
                f"{name} has shape {tuple(t.shape)}, expected {shape} for x {(T, B, I)} and hidden"
                f" size {H}"
            )
        if t.device != rows.device:
            raise ShapeError(f"{name} is on {t.device}, x on {rows.device}; move one of them")
        if not t.dtype.is_floating_point:
            raise ShapeError(f"{name} is {t.dtype}, expected a floating-point tensor")
    if tokens is not None and tokens.device != rows.device:
        raise ShapeError(f"tokens are on {tokens.device}, embedding on {rows.device}; move one")
    if not rows.dtype.is_floating_point:
        raise ShapeError(f"x is {rows.dtype}, expected a floating-point tensor; embed tokens first")
