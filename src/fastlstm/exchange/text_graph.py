"""A text model as a `Graph`: tokens and a state in, logits and the new state out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastlstm.exchange.graph import GraphBuilder
from fastlstm.ops.cell_options import CellOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastlstm.exchange.graph import Graph
    from fastlstm.text.config import ModelConfig

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
    g = GraphBuilder("fastlstm_text", dict(weights))
    tokens = g.input("tokens", ("B",) if is_step else ("T", "B"), "int32")
    h, c = g.input("h", (L, "B", H)), g.input("c", (L, "B", H))
    x = g.gather("embedding.weight", tokens)
    if is_step:
        x = g.reshape(x, (1, "B", config.embed_size))
    options = CellOptions.of(config)
    hs, cs = [], []
    for k in range(L):
        names = [f"layers.{k}.{name}_l0" for name in ("weight_ih", "weight_hh")]
        biases = tuple(f"layers.{k}.{name}_l0" for name in ("bias_ih", "bias_hh"))
        direction = (names[0], names[1], biases)
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
