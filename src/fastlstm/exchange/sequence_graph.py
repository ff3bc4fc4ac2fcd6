"""A sequence model as a `Graph`: sequences in the user's units in, answers out.

The same as `SequenceRegressor.predict`, `SequenceClassifier.predict_proba` and the number of what
`SequenceClassifier.predict` returns.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from fastlstm.errors import ConfigError
from fastlstm.exchange.columns import scaled, unscaled
from fastlstm.exchange.graph import GraphBuilder
from fastlstm.exchange.lstm_layers import LSTMStack, lstm_layers
from fastlstm.forecast.window_forecaster import needs_float64
from fastlstm.sequence.answers import Labels

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastlstm.exchange.graph import Graph, Value
    from fastlstm.sequence.files import StoredSequenceModel


def sequence_graph(
    stored: StoredSequenceModel, weights: Mapping[str, Any], length: int | None = None
) -> Graph:
    """Describes a sequence model.

    Inputs: `values` `(B, T, C)` float32 in the user's units, padded at the end, and `lengths`
    `(B,)` int32, steps of each sequence, 1 to T. NaN is a missing value; a model that was trained
    without any takes it for the mean of its column.

    Outputs: of a regressor `answers` `(B, K)`; of a classifier `probabilities` `(B, K)` and
    `label` `(B,)` int32, the number of the likeliest class. The classes are in the metadata.

    Args:
        stored: the model.
        weights: by the names of its network; matrices may be `QuantizedMatrix`.
        length: T; None is any number.

    Raises:
        ConfigError: a column that needs float64.
    """
    config = stored.network.config
    mean, std = stored.mean.numpy(), stored.std.numpy()
    if len(large := np.flatnonzero(needs_float64(mean, std))):
        raise ConfigError(
            f"column {large[0]} of the sequences is so large beside its range that float32 loses"
            " its digits, and an exported model computes in float32: subtract a constant from it"
            " before training"
        )
    g = GraphBuilder("fastlstm_sequence", dict(weights))
    values = g.input("values", ("B", length or "T", config.num_columns))
    lengths = g.input("lengths", ("B",), "int32")
    columns = scaled(g, g.transpose(values, (1, 0, 2)), mean, std)
    parts = [columns.values]
    if config.has_missing:
        parts.append(g.cast(columns.is_there, "float32"))
    x = g.unary("relu", g.linear(g.concat(parts, -1), "embed.weight", "embed.bias"))
    H, D = config.hidden_size, 2 if config.bidirectional else 1
    stack = LSTMStack("lstm.", H, config.num_layers, D)
    y, state = lstm_layers(g, x, stack, lengths=lengths)
    if config.pooling == "mean":  # outputs of padding are zero
        count = g.reshape(g.cast(lengths, "float32"), ("B", 1))
        total = g.reshape(g.reduce("sum", y, 0), ("B", D * H))
        pooled = g.binary("div", total, count)
    else:
        hidden = state[-1][0]
        ways = [g.reshape(g.slice(hidden, 0, k, k + 1), ("B", H)) for k in range(D)]
        pooled = g.concat(ways, -1)
    outputs = g.linear(pooled, "head.weight", "head.bias")
    answers = stored.answers
    if isinstance(answers, Labels):
        g.output("probabilities", _softmax(g, outputs))
        g.output("label", _first_largest(g, outputs))
        g.graph.metadata["classes"] = json.dumps(answers.values, default=str)
    else:
        g.output("answers", unscaled(g, outputs, answers.mean, answers.std))
    return g.graph


def _softmax(g: GraphBuilder, x: Value) -> Value:
    shares = g.unary("exp", g.binary("sub", x, g.reduce("max", x, -1)))
    return g.binary("div", shares, g.reduce("sum", shares, -1))


def _first_largest(g: GraphBuilder, x: Value) -> Value:
    """Returns the place of the largest number of each row `(B, K)`, the first of several."""
    K = int(x.shape[1])
    is_largest = g.binary("equal", x, g.reduce("max", x, -1))
    behind = np.arange(K, 0, -1, dtype=np.float32)
    longest = g.reduce("max", g.where(is_largest, g.constant(behind), 0.0), -1)
    place = g.binary("sub", g.constant(np.float32(K)), longest)
    return g.cast(g.reshape(place, ("B",)), "int32")
