"""An imported sequence model as operations of a `Graph`."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING

from fastlstm.errors import ConfigError
from fastlstm.exchange.lstm_layers import LSTMStack, lstm_layers
from fastlstm.exchange.module_calls import log_softmax, softmax
from fastlstm.ops.cell_options import CellOptions
from fastlstm.sequence.layer_stack import (
    Dense,
    Dropout,
    Embedding,
    Function,
    Layer,
    LayerNorm,
    LSTMLayer,
    Merge,
    Steps,
)

if TYPE_CHECKING:
    from fastlstm.exchange.graph import GraphBuilder, Size, Value
    from fastlstm.sequence.stack_module import StackNetwork

_SELU, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805


def stack_outputs(g: GraphBuilder, network: StackNetwork, T: Size) -> Value:
    """Adds the inputs and layers of a model; returns its outputs `(B, K)`.

    Raises:
        ConfigError: a layer that is not exported; it is named.
    """
    config = network.config
    if config.num_tokens:
        x = g.transpose(g.input("tokens", ("B", T), "int32"), (1, 0))
    else:
        x = g.transpose(g.input("values", ("B", T, config.num_columns)), (1, 0, 2))
    lengths = g.input("lengths", ("B",), "int32")
    before: Layer | None = None
    for k, layer in enumerate(network.stack.layers):
        x = _added(g, f"model.layers.{k}.", layer, before, x, lengths)
        before = layer
    return x


def mean_of_steps(g: GraphBuilder, y: Value, lengths: Value) -> Value:
    """Returns the mean `(B, K)` of what an LSTM writes `(T, B, K)`, which is 0 in padding."""
    count = g.reshape(g.cast(lengths, "float32"), ("B", 1))
    total = g.reshape(g.reduce("sum", y, 0), ("B", y.shape[2]))
    return g.binary("div", total, count)


def _added(
    g: GraphBuilder, prefix: str, layer: Layer, before: Layer | None, x: Value, lengths: Value
) -> Value:
    match layer:
        case Embedding(masks_zero=False):
            return g.gather(f"{prefix}weight", x)
        case LSTMLayer(reverses=False):
            return _lstm(g, f"{prefix}lstm.", layer, x, lengths)
        case Dense():
            return g.linear(x, f"{prefix}weight", f"{prefix}bias")
        case LayerNorm():
            return g.layer_norm(x, f"{prefix}weight", f"{prefix}bias", layer.epsilon)
        case Function() if layer.function in _FUNCTIONS:
            return _FUNCTIONS[layer.function](g, x)
        case Dropout():
            return x
        case Steps(part="mean") if isinstance(before, LSTMLayer):
            return mean_of_steps(g, x, lengths)
    raise ConfigError(
        f"the layer '{layer.name}' ({type(layer).__name__}) of this imported model is not exported:"
        " the file that it was imported from has it"
    )


def _lstm(g: GraphBuilder, prefix: str, layer: LSTMLayer, x: Value, lengths: Value) -> Value:
    H, D = layer.hidden_size, 1 if layer.backward is None else 2
    options = CellOptions(
        activation=layer.activation, recurrent_activation=layer.recurrent_activation
    )
    y, state = lstm_layers(g, x, LSTMStack(prefix, H, 1, D, options=options), lengths=lengths)
    if layer.every_step:
        ways = [g.slice(y, 2, k * H, (k + 1) * H) for k in range(D)]
    else:
        ways = [g.reshape(g.slice(state[-1][0], 0, k, k + 1), ("B", H)) for k in range(D)]
    return _merged(g, ways, layer.merge)


def _merged(g: GraphBuilder, ways: list[Value], merge: Merge) -> Value:
    if len(ways) == 1 or merge == "concat":
        return g.concat(ways, -1)
    kind = "mul" if merge == "mul" else "add"
    both = reduce(lambda a, b: g.binary(kind, a, b), ways)
    return g.binary("mul", both, 0.5) if merge == "ave" else both


def _unary(kind: str) -> Callable[[GraphBuilder, Value], Value]:
    return lambda g, x: g.unary(kind, x)


def _hard_sigmoid(slope: float) -> Callable[[GraphBuilder, Value], Value]:
    def add(g: GraphBuilder, x: Value) -> Value:
        line = g.binary("add", g.binary("mul", x, slope), 0.5)
        return g.binary("minimum", g.binary("maximum", line, 0.0), 1.0)

    return add


def _softsign(g: GraphBuilder, x: Value) -> Value:
    size = g.binary("maximum", x, g.binary("mul", x, -1.0))
    return g.binary("div", x, g.binary("add", size, 1.0))


def _elu(alpha: float, scale: float) -> Callable[[GraphBuilder, Value], Value]:
    def add(g: GraphBuilder, x: Value) -> Value:
        below = g.binary("sub", g.unary("exp", g.binary("minimum", x, 0.0)), 1.0)
        both = g.binary("add", g.unary("relu", x), g.binary("mul", below, alpha))
        return g.binary("mul", both, scale)

    return add


_FUNCTIONS: dict[str, Callable[[GraphBuilder, Value], Value]] = {
    **{name: _unary(name) for name in ("relu", "tanh", "sigmoid", "softplus")},
    "linear": lambda g, x: x,
    "hard_sigmoid": _hard_sigmoid(1 / 6),
    "hard_sigmoid_0.2": _hard_sigmoid(0.2),
    "softsign": _softsign,
    "elu": _elu(1.0, 1.0),
    "selu": _elu(_SELU, _SELU_SCALE),
    "silu": lambda g, x: g.binary("mul", x, g.unary("sigmoid", x)),
    "exponential": _unary("exp"),
    "softmax": lambda g, x: softmax(g, x, -1),
    "log_softmax": lambda g, x: log_softmax(g, x, -1),
}
