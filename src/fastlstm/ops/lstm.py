"""The functional op: check the arguments, choose a backend, call it."""

from __future__ import annotations

import torch
from torch import Tensor

from fastlstm.errors import ShapeError
from fastlstm.ops.call import LSTMArgs, LSTMCall, LSTMOutput, describe_call
from fastlstm.ops.cell_options import TORCHS_CELL, CellOptions
from fastlstm.ops.registry import select


def lstm(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    *,
    tokens: Tensor | None = None,
    backend: str | None = None,
    strict: bool = False,
) -> LSTMOutput:
    """One LSTM layer, one direction, over a whole sequence.

    Args:
        x: `(T, B, I)`, any strides; T and B may be 0. With `tokens` an embedding `(V, I)`.
        h0: `(B, H)` initial output.
        c0: `(B, H)` initial cell.
        w_ih: `(4H, I)`, gate order i, f, g, o.
        w_hh: `(4H, H)`.
        b_ih: `(4H,)`; give both biases or none.
        b_hh: `(4H,)`.
        tokens: `(T, B)` int64 in `[0, V)`: rows of the embedding, which the kernels gather.
        backend: run this one instead of the best; a call it cannot run is a KernelError.
        strict: a slow path is a KernelError.

    Returns:
        `y` `(T, B, H)` in the compute dtype; `hT` and `cT` `(B, H)` in the dtypes of `h0` and `c0`.

    Raises:
        ShapeError: an argument of the wrong shape, dtype or device; the text names it.
        KernelError: no allowed kernel runs this call.

    Numerics:
        The compute dtype is autocast's where autocast is on, else `x`'s. The matrix operands are
        rounded to it; the kernels sum in float32. Gradients arrive in the dtype of each argument.
        With tokens the native kernel multiplies the embedding by `w_ih` once, `(V, 4H)`, and
        gathers its rows: the same sums, for `V` rows instead of `T*B`, where that is fewer.

    Cost:
        `8 T B H (I + H)` floating-point operations forward, twice that backward; with tokens
        `8 T B H H + 8 V H I`.
    """
    args = LSTMArgs(x, tokens, h0, c0, w_ih, w_hh, b_ih, b_hh)
    check_args(args)
    return run(args, backend=backend, strict=strict)


def run(
    args: LSTMArgs,
    options: CellOptions = TORCHS_CELL,
    *,
    backend: str | None = None,
    strict: bool = False,
    max_activation_bytes: int | None = None,
) -> LSTMOutput:
    """As `lstm`, for tensors that are known to fit each other (`check_args`); see `LSTMCall`."""
    must = strict or backend is not None
    call = describe_call(args, options, max_activation_bytes=max_activation_bytes, strict=must)
    runner = select(call, backend=backend, strict=strict).backend
    y, hT, cT = runner.run(call, args) if call.T and call.B else _empty_output(call, args)
    return LSTMOutput(y, hT.to(args.h0.dtype), cT.to(args.c0.dtype))


def _empty_output(call: LSTMCall, args: LSTMArgs) -> LSTMOutput:
    """No step or no lane: an empty `y` that every argument still gets its (zero) gradient from."""
    with torch.autocast(call.device, enabled=False):
        cast = args.embedded().cast(call.dtype)
        gates = cast.rows @ cast.w_ih.t() + cast.h0 @ cast.w_hh.t()
        for bias in (cast.b_ih, cast.b_hh):
            gates = gates if bias is None else gates + bias
        for each in (args.gamma_ih, args.gamma_hh, args.gamma_c, args.beta_c):
            gates = gates if each is None else gates + 0.0 * each.sum().to(gates.dtype)
    return LSTMOutput(gates[..., : call.H], args.h0.clone(), args.c0.clone())


def check_args(args: LSTMArgs) -> None:
    """Raises ShapeError for an argument of the wrong shape, device or dtype."""
    rows, tokens, w_hh, weights = args.rows, args.tokens, args.w_hh, args.weights
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
    T, B, I, _ = args.sizes  # noqa: E741
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
