"""Layers of torch as operations of a `Graph`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from fastlstm.exchange import module_calls, module_shapes
from fastlstm.exchange.graph import Value
from fastlstm.exchange.lstm_layers import LSTMStack, lstm_layers
from fastlstm.exchange.module_calls import Zeros
from fastlstm.exchange.module_shapes import Unwritable
from fastlstm.nn.dropout import WeightDrop
from fastlstm.nn.lstm import LSTM
from fastlstm.ops.cell_options import TORCHS_CELL

if TYPE_CHECKING:
    from fastlstm.exchange.graph import GraphBuilder


def call_layer(
    g: GraphBuilder, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Returns what a layer gives in evaluation.

    Args:
        g: the graph.
        name: of the layer in the module.
        layer: the layer.
        args: of the call, values of the graph for tensors.
        kwargs: of the call.

    Raises:
        Unwritable: another kind of layer, or one with something that the graph cannot hold.
    """
    function = next((f for kind, f in _LAYERS.items() if isinstance(layer, kind)), None)
    if function is None:
        raise Unwritable("no operation for it")
    if any(isinstance(value, Zeros) for value in args):
        raise Unwritable("zeros can only be the state of an LSTM")
    return function(g, f"{name}." if name else "", layer, *args, **kwargs)


def _lstm(
    g: GraphBuilder, prefix: str, layer: nn.LSTM, x: Value, hx: Any = None,
    lengths: Value | None = None, padding: str = "right",
) -> tuple[Value, tuple[Value, Value]]:  # fmt: skip
    hook = layer.weight_hook if isinstance(layer, LSTM) else None
    for problem, is_so in {
        f"proj_size={layer.proj_size}": layer.proj_size > 0,
        "a weight_hook": hook is not None and not isinstance(hook, WeightDrop),
        f"padding={padding!r}": lengths is not None and padding != "right",
        "a sequence without a batch": isinstance(x, Value) and len(x.shape) != 3,
        "an input that is no tensor": not isinstance(x, Value),
        "float lengths": lengths is not None and lengths.dtype != "int32",
    }.items():
        if is_so:
            raise Unwritable(f"an LSTM with {problem} cannot be written")
    D = 2 if layer.bidirectional else 1
    options = layer.options.in_evaluation() if isinstance(layer, LSTM) else TORCHS_CELL
    stack = LSTMStack(prefix, layer.hidden_size, layer.num_layers, D, layer.bias, options)
    state = None
    if hx is not None and not all(isinstance(part, Zeros) for part in hx):
        if any(isinstance(part, Zeros) for part in hx):
            raise Unwritable("a state of which a part is zeros cannot be written")
        cuts = [(k * D, (k + 1) * D) for k in range(layer.num_layers)]
        h, c = ([g.slice(part, 0, *cut) for cut in cuts] for part in hx)
        state = list(zip(h, c, strict=True))
    steps = g.transpose(x, (1, 0, 2)) if layer.batch_first else x
    y, after = lstm_layers(g, steps, stack, state, lengths)
    y = g.transpose(y, (1, 0, 2)) if layer.batch_first else y
    last_h, last_c = (g.concat(list(parts), 0) for parts in zip(*after, strict=True))
    return y, (last_h, last_c)


def _linear(g: GraphBuilder, prefix: str, layer: nn.Linear, x: Value) -> Value:
    return g.linear(x, f"{prefix}weight", None if layer.bias is None else f"{prefix}bias")


def _embedding(g: GraphBuilder, prefix: str, layer: nn.Embedding, x: Value) -> Value:
    if x.dtype != "int32" or layer.max_norm is not None:
        raise Unwritable("it reads whole numbers and has no max_norm")
    return g.gather(f"{prefix}weight", x)


def _layer_norm(g: GraphBuilder, prefix: str, layer: nn.LayerNorm, x: Value) -> Value:
    if len(layer.normalized_shape) != 1:
        raise Unwritable("it normalises more than one axis")
    size = layer.normalized_shape[0]
    for name, default in (("weight", np.ones), ("bias", np.zeros)):
        if getattr(layer, name) is None:
            g.graph.weights[f"{prefix}{name}"] = default(size, np.float32)
    return g.layer_norm(x, f"{prefix}weight", f"{prefix}bias", layer.eps)


def _same(g: GraphBuilder, prefix: str, layer: nn.Module, x: Value) -> Value:
    return x


def _unary(kind: str) -> Callable[..., Value]:
    return lambda g, prefix, layer, x: g.unary(kind, x)


def _softmax(g: GraphBuilder, prefix: str, layer: nn.Softmax, x: Value) -> Value:
    return module_calls.softmax(g, x, layer.dim)


def _log_softmax(g: GraphBuilder, prefix: str, layer: nn.LogSoftmax, x: Value) -> Value:
    return module_calls.log_softmax(g, x, layer.dim)


def _flatten(g: GraphBuilder, prefix: str, layer: nn.Flatten, x: Value) -> Value:
    return module_shapes.flatten(g, x, layer.start_dim, layer.end_dim)


_LAYERS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.LSTM: _lstm, nn.Linear: _linear, nn.Embedding: _embedding, nn.LayerNorm: _layer_norm,
    nn.Dropout: _same, nn.Identity: _same, nn.Softmax: _softmax, nn.LogSoftmax: _log_softmax,
    nn.Flatten: _flatten, nn.ReLU: _unary("relu"), nn.Sigmoid: _unary("sigmoid"),
    nn.Tanh: _unary("tanh"),
}  # fmt: skip
