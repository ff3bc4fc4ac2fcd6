"""A sequence model to export: its graph and its own answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import ConfigError
from fastlstm.exchange.graph import Graph
from fastlstm.exchange.rounded_network import rounded_network
from fastlstm.exchange.sequence_graph import sequence_graph
from fastlstm.exchange.targets import Arrays, Form, Runner
from fastlstm.sequence.answers import Labels
from fastlstm.sequence.estimators import SequenceClassifier, SequenceRegressor
from fastlstm.sequence.files import StoredSequenceModel
from fastlstm.sequence.layer_stack import LayerStack

SHAPES = ((1, 1), (7, 3), (100, 64))
"""Steps and sequences, (T, B)."""


class SequenceSource:
    """A sequence model.

    Args:
        stored: the model.
        weight_format: "fp32", "fp16" or "int8".
    """

    kind = "sequence"

    def __init__(self, stored: StoredSequenceModel, weight_format: str) -> None:
        self.weight_format, self.notes = weight_format, list[str]()
        self._given = stored
        network, self._weights = rounded_network(stored.network, weight_format)
        self._stored = dataclasses.replace(stored, network=network)
        kind = SequenceClassifier if isinstance(stored.answers, Labels) else SequenceRegressor
        self._model: Any = kind()
        self._model._take(self._stored)

    def graph(self, form: Form) -> Graph:
        return sequence_graph(self._stored, self._weights, form.length)

    def stack(self) -> LayerStack:
        raise ConfigError("a sequence model is not written as Keras layers; export it to onnx")

    def unrounded(self) -> SequenceSource | None:
        return SequenceSource(self._given, "fp32") if self.weight_format != "fp32" else None

    def files(self) -> dict[str, bytes]:
        return {}

    def cases(self, form: Form) -> Iterator[dict[str, NDArray[Any]]]:
        """Yields random sequences of several lengths, some values missing where they may be."""
        config = self._stored.network.config
        mean, std = self._stored.mean.numpy(), self._stored.std.numpy()
        for steps, B in SHAPES:
            T = steps if form.length is None else form.length
            rng = np.random.default_rng(steps)
            values = mean + std * rng.normal(size=(B, T, config.num_columns))
            if config.has_missing:
                values[rng.random(values.shape) < 0.1] = np.nan
            named: dict[str, NDArray[Any]] = {"values": values.astype(np.float32)}
            if num_tokens := getattr(config, "num_tokens", 0):
                named = {"tokens": rng.integers(0, num_tokens, (B, T), dtype=np.int32)}
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
        """Returns answers in their deviations; of labels whether they are the likeliest ones."""
        answers = self._stored.answers
        if isinstance(answers, Labels):
            likeliest = outputs["probabilities"].argmax(-1)
            is_likeliest = (outputs["label"] == likeliest).astype(np.float32)
            return {"probabilities": outputs["probabilities"], "label": is_likeliest}
        std = np.where(answers.std > 0, answers.std, 1)
        return {"answers": (outputs["answers"] - answers.mean) / std}

    def figures(self, runner: Runner, form: Form) -> dict[str, Any]:
        """Returns nothing: the answers are compared, no data is at hand."""
        return {}
