"""A sequence model to export: sequences in the user's units in, answers out.

The graph computes `SequenceRegressor.predict`, or `SequenceClassifier.predict_proba` and the number
of the predicted class.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastlstm.errors import ConfigError
from fastlstm.exchange.graph import Graph, GraphBuilder, Value
from fastlstm.exchange.source import SHAPES, Arrays, ExportSource, rounded_network
from fastlstm.exchange.trace import Traced, Tracer, Unwritable
from fastlstm.forecast.window_forecaster import needs_float64
from fastlstm.sequence import layer_stack as ls
from fastlstm.sequence.answers import Labels
from fastlstm.sequence.estimators import model_of
from fastlstm.sequence.files import StoredSequenceModel
from fastlstm.sequence.stack_module import StackNetwork

_LARGEST = float(np.finfo(np.float32).max)


class SequenceSource(ExportSource):
    """A sequence model."""

    kind = "sequence"

    def __init__(self, stored: StoredSequenceModel, weight_format: str) -> None:
        super().__init__(weight_format)
        self._given, network = stored, stored.network
        self._masks_zero = isinstance(network, StackNetwork) and network.stack.masks_zero
        if self._masks_zero:
            self.notes.append(
                "the file finds padding by `lengths`, not by token 0 (mask_zero): give sequences"
                " padded at the end, and the length of each"
            )
        network, self._weights = rounded_network(network, weight_format)
        self._stored = dataclasses.replace(stored, network=network)
        self._model: Any = model_of(self._stored)

    def graph(self) -> Graph:
        return sequence_graph(self._stored, self._weights, self.length)

    def in_fp32(self) -> SequenceSource:
        return SequenceSource(self._given, "fp32")

    def cases(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Yields random sequences of several lengths, with NaN if the model has missing values."""
        config = self._stored.network.config
        mean, std = self._stored.mean.numpy(), self._stored.std.numpy()
        for steps, B in SHAPES:
            T = self.length or steps
            rng = np.random.default_rng(steps)
            values = mean + std * rng.normal(size=(B, T, config.num_columns))
            values = values.clip(-_LARGEST, _LARGEST)
            if config.has_missing:
                values[rng.random(values.shape) < 0.1] = np.nan
            named: dict[str, NDArray[Any]] = {"values": values.astype(np.float32)}
            if num_tokens := getattr(config, "num_tokens", 0):
                first = min(int(self._masks_zero), num_tokens - 1)
                named = {"tokens": rng.integers(first, num_tokens, (B, T), dtype=np.int32)}
            lengths = rng.integers(1, T + 1, B, dtype=np.int32)
            lengths[0] = T
            yield {**named, "lengths": lengths}

    def run(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        values = inputs["tokens"] if "tokens" in inputs else inputs["values"]
        pairs = zip(values, inputs["lengths"].tolist(), strict=True)
        sequences = [steps[:length] for steps, length in pairs]
        if not isinstance(self._stored.answers, Labels):
            answers = np.asarray(self._model.predict(sequences))
            return {"answers": answers.reshape(len(sequences), -1)}
        probabilities = np.asarray(self._model.predict_proba(sequences))
        return {"probabilities": probabilities, "label": probabilities.argmax(-1)}

    def in_units(self, outputs: Arrays) -> dict[str, NDArray[Any]]:
        """Returns answers in standard deviations; for labels, whether they are the likeliest."""
        answers = self._stored.answers
        if isinstance(answers, Labels):
            likeliest = outputs["probabilities"].argmax(-1)
            is_likeliest = (outputs["label"] == likeliest).astype(np.float32)
            return {"probabilities": outputs["probabilities"], "label": is_likeliest}
        std = np.where(answers.std > 0, answers.std, 1)
        return {"answers": (outputs["answers"] - answers.mean) / std}


def sequence_graph(
    stored: StoredSequenceModel, weights: Mapping[str, Any], length: int | None = None
) -> Graph:
    """Returns the graph of a sequence model.

    Inputs: `values` `(B, T, C)` float32 in the user's units, or `tokens` `(B, T)` int32, padded at
    the end; `lengths` `(B,)` int32, steps of each sequence, 1 to T. NaN is a missing value; a model
    trained without missing values reads it as the mean of its column.

    Outputs: a regressor has `answers` `(B, K)`; a classifier has `probabilities` `(B, K)` and
    `label` `(B,)` int32, the number of the likeliest class. The metadata has the classes. Weights
    have the names of the network; T is `length`, or any number for None.
    """
    network = stored.network
    answers = stored.answers
    scales = {"column {} of the sequences": (stored.mean.numpy(), stored.std.numpy())}
    if not isinstance(answers, Labels):
        scales["answer {} of each sequence"] = (answers.mean, answers.std)
    for name, (mean, std) in scales.items():
        if len(large := np.flatnonzero(needs_float64(mean, std) & (std > 0))):
            raise ConfigError(
                f"{name.format(large[0])} is so large beside its range that float32 loses its"
                " digits, and an exported model computes in float32: subtract a constant from it"
                " before training"
            )
    g = Tracer("fastlstm_sequence", network, weights)
    T = length or "T"
    values: Any = (
        Traced(g.input("tokens", ("B", T), "int32"))
        if getattr(network.config, "num_tokens", 0)
        else g.traced_input("values", ("B", T, network.config.num_columns))
    )
    lengths: Any = Traced(g.input("lengths", ("B",), "int32"))
    if isinstance(network, StackNetwork):
        outputs = _imported(g, network, values, lengths)
    else:
        columns = (values.double() - stored.mean) / stored.std
        columns = columns if network.config.has_missing else columns.nan_to_num(0.0)
        with g.recording():
            answered: Any = network(columns, lengths)
        outputs = answered.value
    if isinstance(answers, Labels):
        g.output("probabilities", g.softmax(outputs))
        g.output("label", _first_largest(g, outputs))
        g.graph.metadata["classes"] = json.dumps(answers.values, default=str)
    else:
        scaled: Any = Traced(outputs)
        restored = scaled * torch.from_numpy(answers.std) + torch.from_numpy(answers.mean)
        g.output("answers", restored.value)
    return g.finished()


def _first_largest(g: GraphBuilder, x: Value) -> Value:
    """Returns the first index of the largest number in each row of `(B, K)`."""
    K = int(x.shape[1])
    is_largest = g.binary("equal", x, g.reduce("max", x, -1))
    behind = np.arange(K, 0, -1, dtype=np.float32)
    longest = g.reduce("max", g.where(is_largest, g.constant(behind), 0.0), -1)
    place = g.constant(np.float32(K)) - longest
    return g.cast(g.reshape(place, ("B",)), "int32")


def _imported(g: Tracer, network: StackNetwork, x: Traced, lengths: Traced) -> Value:
    """Returns the outputs `(B, K)` of an imported model, whose LSTMs skip padding."""
    before: ls.Layer | None = None
    value: Any = x
    with g.recording(lengths):
        for layer, module in zip(network.stack.logits.layers, network.model.layers, strict=True):
            try:
                match layer:
                    case ls.Steps(part="mean") if isinstance(before, ls.LSTMLayer):
                        steps: Any = lengths  # an LSTM writes 0 in padding
                        value = value.sum(1) / steps.float()[:, None]
                    case ls.Steps() | ls.LSTMLayer(reverses=True):
                        raise Unwritable("it would read the padding of shorter sequences")
                    case _:
                        value = module(value)
            except Unwritable as problem:
                raise ConfigError(
                    f"the layer '{layer.name}' ({type(layer).__name__}) of this imported model is"
                    f" not exported ({problem}): export the module of fastlstm.import_module, which"
                    " takes sequences of one length"
                ) from None
            before = layer
    result: Value = value.value
    return result
