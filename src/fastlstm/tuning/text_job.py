"""Text models as `tune` sees them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.text.train import train
from fastlstm.training.optimizer import DEFAULT_LEARNING_RATE
from fastlstm.tuning import moves
from fastlstm.tuning.job import Default, Job, Show
from fastlstm.tuning.predict import law_of
from fastlstm.tuning.preparation import prepare

if TYPE_CHECKING:
    from fastlstm.runs.events import Event, Observer
    from fastlstm.text.config import TrainConfig
    from fastlstm.training.callbacks import Callback
    from fastlstm.training.trainer import Trainer
    from fastlstm.tuning.halving import Changes
    from fastlstm.tuning.tune import Search

_RATE_SHIFT = 0.029
"""What twice the learning rate gains falls by 2 points in a run e times as long (docs/log.md)."""


@dataclass(frozen=True)
class TextJob(Job):
    """Runs of a text are compared by what the law of quality expects of the whole run.

    Attributes:
        has_law: whether the law was measured for such tokens; runs of others, which have the same
            time, are compared by what they ended at.
    """

    has_law: bool = True

    axes = tuple(moves.FIELDS)
    fields = moves.FIELDS
    size, per = "rnn_size", "token"

    @property
    def ending(self) -> str:
        return " expected" if self.has_law else super().ending

    def train(
        self,
        source: Any,
        config: TrainConfig,
        *,
        given: Collection[str],
        out: Path,
        observers: Sequence[Observer] = (),
        callbacks: Sequence[Callback] = (),
    ) -> None:
        train(
            source, out=out, config=config, given=given, as_text=True, observers=observers,
            callbacks=callbacks,
        )  # fmt: skip

    def prepare(
        self, trainer: Trainer, given: Collection[str], search: Search, show: Show
    ) -> Default:
        return prepare(self, trainer, given, search, show)

    def options_of(self, default: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
        return moves.options_of(default, changes)

    def label_of(self, changes: Changes) -> str:
        return moves.label_of(changes)

    def result(
        self, start: Event, end: Event, options: Mapping[str, Any], seconds: float, budget_s: float
    ) -> tuple[float, float]:
        setup_s = float(end["spent_s"]["setup"])
        times = 1.0
        if self.has_law and setup_s < seconds < budget_s:
            times = (budget_s - setup_s) / (seconds - setup_s)
        return float(end["best_bits_per_char"]), whole_run_bits(start, end, options, times)

    def told(self, measured: float, expected: float) -> str:
        whole = "" if measured == expected else f", the whole run {expected:.3f}"
        return self.figure(measured) + whole

    def figure(self, value: float, has_unit: bool = True) -> str:
        return f"{value:.3f}" + " bits/char" * has_unit


def whole_run_bits(start: Event, end: Event, options: Mapping[str, Any], times: float) -> float:
    """Returns what a run `times` as long as a complete short one is expected to end at.

    The law is that of the default learning rate. A higher one gains less in a longer run.
    """
    if times == 1.0:
        return float(end["best_bits_per_char"])
    optimizer = options["optimizer"]
    law = law_of(start, end, optimizer)
    bits = law.after(law.measured.times(times)).bits
    rate = options["learning_rate"] / DEFAULT_LEARNING_RATE.get(optimizer, options["learning_rate"])
    return bits * math.exp(_RATE_SHIFT * math.log(rate) * math.log(times))
