"""The functional op: check the arguments, choose a backend, call it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fastlstm.errors import ShapeError
from fastlstm.ops.backends.native import NativeBackend
from fastlstm.ops.call import LSTMCall, LSTMOutput, LSTMWeights, describe_call
from fastlstm.ops.dispatch import select

if TYPE_CHECKING:
    from torch import Tensor


def lstm(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    *,
    backend: str | None = None,
    strict: bool = False,
) -> LSTMOutput:
    """One LSTM layer, one direction, over a whole sequence.

    Args:
        x: `(T, B, I)`, any strides; T and B may be 0.
        h0: `(B, H)` initial output.
        c0: `(B, H)` initial cell.
        w_ih: `(4H, I)`, gate order i, f, g, o.
        w_hh: `(4H, H)`.
        b_ih: `(4H,)`; give both biases or none.
        b_hh: `(4H,)`.
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

    Cost:
        `8 T B H (I + H)` floating-point operations forward, twice that backward.
    """
    weights = LSTMWeights(w_ih, w_hh, b_ih, b_hh)
    check_args(x, h0, c0, weights)
    call = describe_call(x, h0, c0, weights, strict=strict or backend is not None)
    chosen = select(call, backend=backend, strict=strict).backend
    if x.shape[0] == 0 or x.shape[1] == 0:
        return _nothing(call, x, h0, c0, weights)
    y, hT, cT = chosen.run(call, x, h0, c0, weights)
    return LSTMOutput(y, hT.to(h0.dtype), cT.to(c0.dtype))


def lstm_tokens(
    tokens: Tensor,
    embedding: Tensor,
    h0: Tensor,
    c0: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    *,
    backend: str | None = None,
    strict: bool = False,
) -> LSTMOutput:
    """`lstm` on rows of an embedding, without forming them where the kernel can.

    Args:
        tokens: `(T, B)` int64 in `[0, V)`.
        embedding: `(V, I)`.
        h0: as in `lstm`, like everything after it.
        c0: `(B, H)`.
        w_ih: `(4H, I)`.
        w_hh: `(4H, H)`.
        b_ih: `(4H,)`; give both biases or none.
        b_hh: `(4H,)`.
        backend: run this one instead of the best.
        strict: a slow path is a KernelError.

    Returns:
        As `lstm`.

    Numerics:
        The native kernel multiplies the embedding by `w_ih` once, `(V, 4H)`, and gathers its rows:
        the same sums, for `V` rows instead of `T*B`. It does so where `V` is the smaller number.

    Cost:
        `8 T B H H + 8 V H I` floating-point operations forward, twice that backward.
    """
    weights = LSTMWeights(w_ih, w_hh, b_ih, b_hh)
    must = strict or backend is not None
    call = _token_call(tokens, embedding, h0, c0, weights, strict=must)
    chosen = select(call, backend=backend, strict=strict).backend
    if isinstance(chosen, NativeBackend) and embedding.shape[0] < tokens.numel():
        y, hT, cT = chosen.run_tokens(call, tokens, embedding, h0, c0, weights)
        return LSTMOutput(y, hT.to(h0.dtype), cT.to(c0.dtype))
    x = torch.nn.functional.embedding(tokens, embedding)
    return lstm(x, h0, c0, *weights, backend=backend, strict=strict)


def _token_call(
    tokens: Tensor, embedding: Tensor, h0: Tensor, c0: Tensor, weights: LSTMWeights, *, strict: bool
) -> LSTMCall:
    """Checks the arguments as those of `lstm` on a view of the right shape."""
    x = check_tokens(tokens, embedding)
    check_args(x, h0, c0, weights)
    return describe_call(x, h0, c0, weights, strict=strict)


def check_tokens(tokens: Tensor, embedding: Tensor) -> Tensor:
    """Returns a view of the shape that the rows `embedding[tokens]` have, `(T, B, I)`."""
    if tokens.dim() != 2 or tokens.dtype != torch.int64:
        raise ShapeError(f"tokens are {tokens.dtype} {tuple(tokens.shape)}, expected int64 (T, B)")
    if embedding.dim() != 2:
        raise ShapeError(f"embedding has shape {tuple(embedding.shape)}, expected (V, I)")
    T, B = tokens.shape
    return embedding[:1].expand(T * B, -1).view(T, B, embedding.shape[1])


def _nothing(call: LSTMCall, x: Tensor, h0: Tensor, c0: Tensor, weights: LSTMWeights) -> LSTMOutput:
    """No step or no lane: an empty `y` that every argument still gets its (zero) gradient from."""
    with torch.autocast(call.device, enabled=False):
        rows, h, w_ih, w_hh = (t.to(call.dtype) for t in (x, h0, weights.w_ih, weights.w_hh))
        gates = rows @ w_ih.t() + h @ w_hh.t()
        for bias in (weights.b_ih, weights.b_hh):
            gates = gates if bias is None else gates + bias.to(call.dtype)
    return LSTMOutput(gates[..., : call.H], h0.clone(), c0.clone())


def check_args(x: Tensor, h0: Tensor, c0: Tensor, weights: LSTMWeights) -> None:
    """Raises ShapeError for arguments of `lstm` that do not fit each other."""
    if x.dim() != 3:
        raise ShapeError(f"x has shape {tuple(x.shape)}, expected (T, B, I)")
    if (weights.b_ih is None) != (weights.b_hh is None):
        raise ShapeError("one of b_ih and b_hh is missing; give both biases or none")
    T, B, I = x.shape  # noqa: E741
    G, H = weights.w_hh.shape if weights.w_hh.dim() == 2 else (0, 0)
    if weights.w_hh.dim() != 2 or G != 4 * H:
        raise ShapeError(
            f"w_hh has shape {tuple(weights.w_hh.shape)}, expected (4H, H); gates i, f, g, o are"
            " stacked along the first axis"
        )
    if 0 in (I, H):
        raise ShapeError(f"input size {I} and hidden size {H} were given, both must be at least 1")
    if weights.w_ih.dim() == 2 and weights.w_ih.shape[1] != I:
        raise ShapeError(
            f"x has last axis {I}, this layer has input_size={weights.w_ih.shape[1]}; pass x of"
            f" shape ({T}, {B}, {weights.w_ih.shape[1]}) or weights w_ih of shape ({G}, {I})"
        )
    expected = {"h0": (B, H), "c0": (B, H), "w_ih": (G, I), "b_ih": (G,), "b_hh": (G,)}
    given = {"h0": h0, "c0": c0, **weights._asdict()}
    for name, value in given.items():
        if value is None:
            continue
        if name in expected and tuple(value.shape) != expected[name]:
            raise ShapeError(
                f"{name} has shape {tuple(value.shape)}, expected {expected[name]} for x"
                f" {tuple(x.shape)} and hidden size {H}"
            )
        if value.device != x.device:
            raise ShapeError(f"{name} is on {value.device}, x on {x.device}; move one of them")
        if not value.dtype.is_floating_point:
            raise ShapeError(f"{name} is {value.dtype}, expected a floating-point tensor")
    if not x.dtype.is_floating_point:
        raise ShapeError(f"x is {x.dtype}, expected a floating-point tensor; embed tokens first")
