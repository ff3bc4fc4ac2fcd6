"""Layers of an LSTM in a `Graph`, one way or both, as `fastlstm.LSTM` and `nn.LSTM` run them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastlstm.ops.cell_options import TORCHS_CELL

if TYPE_CHECKING:
    from fastlstm.exchange.graph import GraphBuilder, Value
    from fastlstm.ops.cell_options import CellOptions


class LSTMStack(NamedTuple):
    """What a graph needs to know of the layers.

    Attributes:
        prefix: of the names of their weights, such as "lstm.".
        hidden_size: H.
        num_layers: L.
        num_directions: D, 2 if they run both ways, else 1.
        has_bias: whether there are biases.
        options: of the cell.
    """

    prefix: str
    hidden_size: int
    num_layers: int
    num_directions: int = 1
    has_bias: bool = True
    options: CellOptions = TORCHS_CELL


State = list[tuple["Value", "Value"]]
"""h and c of every layer, `(D, B, H)` each."""


def lstm_layers(
    g: GraphBuilder,
    x: Value,
    stack: LSTMStack,
    state: State | None = None,
    lengths: Value | None = None,
) -> tuple[Value, State]:
    """Runs the layers.

    Args:
        g: the graph.
        x: `(T, B, I)`, without NaN.
        stack: the layers.
        state: before the first step; default zero.
        lengths: steps of each sequence, `(B,)` int32.

    Returns:
        Outputs `(T, B, D * H)`, and the state after the last step.
    """
    D = stack.num_directions
    if state is None:
        zero = zeros(g, x, (D, 1, stack.hidden_size))
        state = [(zero, zero)] * stack.num_layers
    after = []
    for layer, (h, c) in enumerate(state):
        directions = [_names(stack, layer, suffix) for suffix in ("", "_reverse")[:D]]
        x, h, c = g.lstm(x, h, c, directions, stack.options, lengths)
        after.append((h, c))
    return x, after


def _names(stack: LSTMStack, layer: int, suffix: str) -> tuple[str, str, tuple[str, ...]]:
    w_ih, w_hh, *biases = (
        f"{stack.prefix}{name}_l{layer}{suffix}"
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    return w_ih, w_hh, tuple(biases) if stack.has_bias else ()


def zeros(g: GraphBuilder, x: Value, shape: tuple[int, int, int]) -> Value:
    """Returns zeros of a shape `(D, 1, H)` with the batch of `x` `(T, B, I)`: `(D, B, H)`."""
    first = g.slice(x, 0, 0, 1) if isinstance(x.shape[0], int) else g.reduce("max", x, 0)
    is_nan = g.unary("is_nan", g.slice(first, 2, 0, 1))
    none = g.binary("mul", g.cast(is_nan, "float32"), 0.0)  # 0 for any number
    return g.binary("add", none, g.constant(np.zeros(shape, np.float32)))
