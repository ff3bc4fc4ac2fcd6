"""A text model as a `Graph` of operations, or as a `LayerStack`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastlstm.errors import ConfigError, Setting
from fastlstm.exchange.graph import GraphBuilder
from fastlstm.ops.cell_options import CellOptions
from fastlstm.sequence.layer_stack import (
    CellWeights,
    Dense,
    Embedding,
    Layer,
    LayerNorm,
    LayerStack,
    LSTMLayer,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from fastlstm.exchange.graph import Graph
    from fastlstm.text.config import ModelConfig

TEXT_GRAPH = "fastlstm_text"
"""Name of the graphs of text models."""
_PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
NORM_EPSILON = 1e-5
"""Of torch.nn.LayerNorm."""


def text_graph(weights: Mapping[str, Any], config: ModelConfig, *, is_step: bool) -> Graph:
    """Describes a text model.

    Inputs are `tokens` `(T, B)` int32, `h` and `c` `(L, B, H)`; outputs `logits` `(T, B, V)`,
    `h_out` and `c_out`. Of a step `tokens` are `(B,)` and `logits` `(B, V)`.

    Args:
        weights: by the names of `LanguageModel`; matrices may be `QuantizedMatrix`.
        config: of the model.
        is_step: one token per call, for targets without loops.
    """
    L, H, V = config.num_layers, config.rnn_size, config.vocab_size
    g = GraphBuilder(TEXT_GRAPH, dict(weights))
    tokens = g.input("tokens", ("B",) if is_step else ("T", "B"), "int32")
    h, c = g.input("h", (L, "B", H)), g.input("c", (L, "B", H))
    x = g.gather("embedding.weight", tokens)
    if is_step:
        x = g.reshape(x, (1, "B", config.embed_size))
    options = CellOptions.of(config)
    hs, cs = [], []
    for k in range(L):
        w_ih, w_hh, *biases = (f"layers.{k}.{name}_l0" for name in _PARAMETERS)
        direction = (w_ih, w_hh, tuple(biases))
        states = g.slice(h, 0, k, k + 1), g.slice(c, 0, k, k + 1)
        y, h_k, c_k = g.lstm(x, *states, [direction], options)
        if config.output_norm:
            y = g.layer_norm(y, f"norms.{k}.weight", f"norms.{k}.bias", NORM_EPSILON)
        x = g.binary("add", x, y) if config.residual and x.shape == y.shape else y
        hs.append(h_k)
        cs.append(c_k)
    if config.output_rank:
        x = g.linear(x, "projection.weight")
    output = "embedding.weight" if config.tie_weights else "output.weight"
    logits = g.linear(x, output, "output.bias")
    g.output("logits", g.reshape(logits, ("B", V)) if is_step else logits)
    g.output("h_out", g.concat(hs, 0))
    g.output("c_out", g.concat(cs, 0))
    return g.graph


def text_stack(weights: Mapping[str, NDArray[np.float32]], config: ModelConfig) -> LayerStack:
    """Describes a text model as layers: tokens in, logits out, from the zero state.

    A tied embedding appears twice, as two matrices.

    Raises:
        ConfigError: it is no plain sequence of layers.
    """
    options = CellOptions.of(config)
    if config.residual or options.layer_norm or options.zoneout != (0.0, 0.0):
        name = "residual" if config.residual else "layer_norm" if options.layer_norm else "zoneout"
        raise ConfigError("Keras has no layer for ", Setting(name), "; export to another target")
    layers: list[Layer] = [Embedding("embedding", weights["embedding.weight"])]
    for k in range(config.num_layers):
        own = {name: weights[f"layers.{k}.{name}_l0"] for name in _PARAMETERS}
        bias = own["bias_ih"] + own["bias_hh"]
        cell = CellWeights(own["weight_ih"], own["weight_hh"], bias)
        layers.append(
            LSTMLayer(
                f"lstm_{k}", cell, activation=options.activation,
                recurrent_activation=options.recurrent_activation,
            )
        )  # fmt: skip
        if config.output_norm:
            scale, shift = weights[f"norms.{k}.weight"], weights[f"norms.{k}.bias"]
            layers.append(LayerNorm(f"norm_{k}", scale, shift, NORM_EPSILON))
    if config.output_rank:
        first = weights["projection.weight"]
        layers.append(Dense("projection", first, np.zeros(len(first), np.float32)))
    output = weights["embedding.weight" if config.tie_weights else "output.weight"]
    layers.append(Dense("output", output, weights["output.bias"]))
    return LayerStack(tuple(layers), "fastlstm")
