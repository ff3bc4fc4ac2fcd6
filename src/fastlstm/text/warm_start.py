"""Training that starts with the model of another run: `train(start=RUN)`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastlstm.errors import ConfigError, FormatError, counted
from fastlstm.text.config import PRESETS, ModelConfig, TrainConfig
from fastlstm.text.files import LoadedModel, load_language_model
from fastlstm.text.stored_model import load_stored_model, weights_record

CONTINUED_RATE = 0.3
"""Ratio of the peak learning rate to the default, if a run starts with a model that was trained on
the same text; for another text the default is best (benchmarks/log)."""
_OF_TRAINING = {"dropout", "dropout_kind", "weight_drop", "recurrent_dropout", "zoneout"}
"""Options of a model that do not change its weights: the new run may set others."""


@dataclass(frozen=True)
class WarmStart:
    """The trained model that a run starts with: absolute `path`, `sha256` of its weights."""

    path: str
    loaded: LoadedModel
    sha256: str

    @staticmethod
    def of_run(path: str | os.PathLike[str]) -> WarmStart:
        """Loads the model of a run or checkpoint; FormatError for a pruned one."""
        loaded = load_language_model(path)
        about = loaded.config.get("compression", {})
        if about.get("structured") in ("none", "blocks"):
            raise FormatError(
                f"{path} is pruned ({about['prune']:.0%} zeros), and training on would fill the"
                f" zeros in; `fastlstm compress {path} --out NEW --budget 5m` trains on with them"
                " kept"
            )
        return WarmStart(os.path.abspath(path), loaded, weights_record(loaded.path).sha256)

    def options(self, config: TrainConfig, given: Collection[str]) -> TrainConfig:
        """Returns the options of the run, with the sizes and the vocabulary of the model.

        Raises ConfigError if one of the `given` options contradicts the model.
        """
        values = self._values()
        for name in sorted(given):
            self._refuse_other(name, config, values)
        own = {"dropout", *_OF_TRAINING.intersection(given)}
        kept = {name: value for name, value in values.items() if name not in own}
        kept |= {"preset": TrainConfig.preset, "vocab_size": TrainConfig.vocab_size}
        return dataclasses.replace(config, **kept)

    def _values(self) -> dict[str, Any]:
        values = dataclasses.asdict(self.loaded.model_config)
        return {**values, "vocab": self.loaded.tokenizer.kind}

    def _refuse_other(self, name: str, config: TrainConfig, values: Mapping[str, Any]) -> None:
        value, first = getattr(config, name), self.loaded.config.get("train", {})
        has = values.get(name)
        is_other = value not in (None, has)
        if name == "preset":
            sizes = PRESETS[value].items()
            is_other = any(getattr(config, n) is None and values[n] != size for n, size in sizes)
            has = ", ".join(f"{size} {values[size]}" for size in PRESETS[value])
        elif name == "vocab_size":  # as asked for; a short text has fewer tokens
            is_other = values["vocab"] == "bpe" and value not in (has, first.get(name))
        if is_other and name in {"preset", *values} - _OF_TRAINING:
            raise ConfigError(f"`{name}={value!r}`: the run in `start` has {has}; leave it out")

    def notes(self, config: TrainConfig) -> list[str]:
        model, tokenizer = self.loaded.model_config, self.loaded.tokenizer
        size = (
            f"{counted(model.num_layers, 'layer')} of {model.rnn_size} units,"
            f" {counted(model.vocab_size, 'token')} ({tokenizer.kind})"
        )
        defaults = ModelConfig(model.vocab_size)
        options = [
            f"{name} {value}"
            for name, value in self._values().items()
            if name not in ("vocab", "rnn_size", "num_layers", "dropout")
            and value != getattr(defaults, name)
            and value == getattr(config, name)
        ]
        notes = [f"from {self.loaded.path}: the weights, {', '.join([size, *options])}"]
        if (stored := self.loaded.weight_format) != "fp32":
            notes.append(
                f"the weights of {self.path} are stored as {stored}: training starts with these"
                " values and stores fp32"
            )
        return [*notes, *filter(None, [self.loaded.note])]


def refuse_other_start(
    run: Path, stored: Mapping[str, Any], start: str | os.PathLike[str] | None
) -> dict[str, str] | None:
    """Returns the model that a resumed run was started with: `start` in its config.json (`stored`).

    The `start` that is given now need not exist any more. Raises FormatError if the run was started
    with another model, or without one.
    """
    before: dict[str, str] | None = stored.get("start")
    if before is not None:
        for name in ("path", "model_sha256"):
            if type(before[name]) is not str:
                raise TypeError(f"start.{name} of config.json is {before[name]!r:.80}")
    if start is None or (
        before and before["path"] == os.path.abspath(start) and not Path(start).exists()
    ):
        return before
    if before is None:
        raise FormatError(
            f"'{run}' was started without `start`; leave it out to resume, or give another `out`"
        )
    if weights_record(load_stored_model(start).path).sha256 != before["model_sha256"]:
        raise FormatError(
            f"'{run}' was started with another model ({before['path']}), or {os.fspath(start)} has"
            " changed since; leave out `start` to resume, or give another `out`"
        )
    return before
