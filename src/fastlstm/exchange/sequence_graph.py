"""A sequence model as a `Graph`: sequences in the user's units in, answers out.

The same as `SequenceRegressor.predict`, `SequenceClassifier.predict_proba` and the number of what
`SequenceClassifier.predict` returns.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from fastlstm.errors import ConfigError
from fastlstm.exchange.columns import Columns, scaled, unscaled
from fastlstm.exchange.graph import GraphBuilder
from fastlstm.exchange.lstm_layers import LSTMStack, lstm_layers
from fastlstm.exchange.module_calls import softmax
from fastlstm.exchange.stack_graph import mean_of_steps, stack_outputs
from fastlstm.forecast.window_forecaster import needs_float64
from fastlstm.sequence.answers import Labels
from fastlstm.sequence.stack_module import StackNetwork

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastlstm.exchange.graph import Graph, Value
    from fastlstm.sequence.files import StoredSequenceModel
    from fastlstm.sequence.model import NetworkConfig


def sequence_graph(
    stored: StoredSequenceModel, weights: Mapping[str, Any], length: int | None = None
) -> Graph:
    """Describes a sequence model.

    Inputs: `values` `(B, T, C)` float32 in the user's units (of token ids `tokens` `(B, T)` int32),
    padded at the end, and `lengths` `(B,)` int32, steps of each sequence, 1 to T. NaN is a missing
    value; a model that was trained without any takes it for the mean of its column.

    Outputs: of a regressor `answers` `(B, K)`; of a classifier `probabilities` `(B, K)` and
    `label` `(B,)` int32, the number of the likeliest class. The classes are in the metadata.

    Args:
        stored: the model.
        weights: by the names of its network; matrices may be `QuantizedMatrix`.
        length: T; None is any number.

    Raises:
        ConfigError: a column that needs float64.
    """
    network = stored.network
    mean, std = stored.mean.numpy(), stored.std.numpy()
    if len(large := np.flatnonzero(needs_float64(mean, std))):
        raise ConfigError(
            f"column {large[0]} of the sequences is so large beside its range that float32 loses"
            " its digits, and an exported model computes in float32: subtract a constant from it"
            " before training"
        )
    g = GraphBuilder("fastlstm_sequence", dict(weights))
    T = length or "T"
    if isinstance(network, StackNetwork):
        outputs = stack_outputs(g, network, T)
    else:
        values = g.input("values", ("B", T, network.config.num_columns))
        lengths = g.input("lengths", ("B",), "int32")
        columns = scaled(g, g.transpose(values, (1, 0, 2)), mean, std)
        outputs = _outputs(g, network.config, columns, lengths)
    answers = stored.answers
    if isinstance(answers, Labels):
        g.output("probabilities", softmax(g, outputs, -1))
        g.output("label", _first_largest(g, outputs))
        g.graph.metadata["classes"] = json.dumps(answers.values, default=str)
    else:
        g.output("answers", unscaled(g, outputs, answers.mean, answers.std))
    return g.graph


def _outputs(g: GraphBuilder, config: NetworkConfig, columns: Columns, lengths: Value) -> Value:
    """Returns what a `SequenceNetwork` does, `(B, K)`."""
    parts = [columns.values]
    if config.has_missing:
        parts.append(g.cast(columns.is_there, "float32"))
    x = g.unary("relu", g.linear(g.concat(parts, -1), "embed.weight", "embed.bias"))
    H, D = config.hidden_size, 2 if config.bidirectional else 1
    stack = LSTMStack("lstm.", H, config.num_layers, D)
    y, state = lstm_layers(g, x, stack, lengths=lengths)
    if config.pooling == "mean":
        pooled = mean_of_steps(g, y, lengths)
    else:
        hidden = state[-1][0]
        ways = [g.reshape(g.slice(hidden, 0, k, k + 1), ("B", H)) for k in range(D)]
        pooled = g.concat(ways, -1)
    return g.linear(pooled, "head.weight", "head.bias")


def _first_largest(g: GraphBuilder, x: Value) -> Value:
    """Returns the place of the largest number of each row `(B, K)`, the first of several."""
    K = int(x.shape[1])
    is_largest = g.binary("equal", x, g.reduce("max", x, -1))
    behind = np.arange(K, 0, -1, dtype=np.float32)
    longest = g.reduce("max", g.where(is_largest, g.constant(behind), 0.0), -1)
    place = g.binary("sub", g.constant(np.float32(K)), longest)
    return g.cast(g.reshape(place, ("B",)), "int32")
