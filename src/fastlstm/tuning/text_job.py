"""Text models as `tune` sees them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.text.quality_prediction import Length
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
"""What twice the learning rate gains falls by 2 points in a run e times as long (benchmarks/log)."""


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
            callbacks=callbacks, stop=self.stop,
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
        self, start: Event, end: Event, options: Mapping[str, Any], default: Default,
        seconds: float, budget_s: float,
    ) -> tuple[float, float]:  # fmt: skip
        measured, setup_s = float(end["best_bits_per_char"]), float(end["spent_s"]["setup"])
        if not (self.has_law and setup_s < seconds < budget_s):
            return measured, measured
        lengths_s = seconds - setup_s, budget_s - setup_s
        return measured, whole_run_bits(start, end, options, default, lengths_s)

    def told(self, measured: float, expected: float) -> str:
        whole = "" if measured == expected else f", whole run expected {expected:.3f}"
        return self.figure(measured) + whole

    def figure(self, value: float, has_unit: bool = True) -> str:
        return f"{value:.3f}" + " bits/char" * has_unit


def whole_run_bits(
    start: Event, end: Event, options: Mapping[str, Any], default: Default,
    lengths_s: tuple[float, float],
) -> float:  # fmt: skip
    """Returns what the whole run is expected to end at, from a complete short one.

    What the law says of the settings is halfway corrected to what it says of the default: between
    optimizers and batches it errs by 2 to 4 % (benchmarks/log). It is the law of the default learning
    rate; a higher one gains less in a longer run.

    Args:
        start: the event that the short run began with.
        end: the event that it ended with.
        options: of the run.
        default: the settings that are compared with.
        lengths_s: seconds of training of the short run and the whole one.
    """
    times, optimizer = lengths_s[1] / lengths_s[0], options["optimizer"]
    law = law_of(start, end, optimizer)
    ratio = law.after(law.measured.times(times)).bits / law.measured_bits
    if default.units_per_s:
        tokens = default.units_per_s * lengths_s[0]
        sizes = [o["batch_size"] * o["seq_length"] for o in (options, default.options)]
        steps = tokens / (law.measured.tokens / law.measured.steps * sizes[1] / sizes[0])
        of_default = replace(
            law, rnn_size=default.options["rnn_size"], optimizer=default.options["optimizer"],
            measured=Length(tokens, steps), measured_bits=1.0,
        )  # fmt: skip
        ratio = math.sqrt(ratio * of_default.after(of_default.measured.times(times)).bits)
    rate = options["learning_rate"] / DEFAULT_LEARNING_RATE.get(optimizer, options["learning_rate"])
    return law.measured_bits * ratio * math.exp(_RATE_SHIFT * math.log(rate) * math.log(times))
