"""`fastlstm predict`: what a run of a text ends at, from a short run with the same model."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.errors import Stopped, UsageError
from fastlstm.report.terminal import clock
from fastlstm.text.quality_prediction import Length, PredictedBits, QualityPrediction
from fastlstm.text.train import Source, train
from fastlstm.training.schedule import StopCriterion
from fastlstm.tuning.machine import describe_machine
from fastlstm.tuning.planned_run import PlannedRun, chosen_sizes, plan_run

if TYPE_CHECKING:
    from fastlstm.runs.events import Event, Observer
    from fastlstm.text.config import TrainConfig

MIN_MEASURED_S, _MAX_DEFAULT_S = 5.0, 120.0
_DEFAULT_SHARE = 0.1
_FACTORS = (0.5, 1.0, 2.0, 4.0)
"""Lengths, in lengths of the run, that a prediction is shown for."""


@dataclass(frozen=True)
class Prediction:
    """What a run is expected to end at.

    Attributes:
        law: the prediction for every length.
        length: of the run.
        config: of the run, with the size that its budget chose.
        fixed: the options that the budget chose, as names and values.
        measured_s: seconds that the short run took.
        num_layers: LSTM layers of the model; the law was measured with one.
        machine: CPU and versions.
    """

    law: QualityPrediction
    length: Length
    config: TrainConfig
    fixed: dict[str, Any]
    measured_s: float
    num_layers: int
    machine: dict[str, object]

    @property
    def bits(self) -> PredictedBits:
        """What the run ends at."""
        return self.law.after(self.length)

    def others(self) -> list[tuple[float, PredictedBits]]:
        """Returns seconds and bits of shorter and longer runs of the same model."""
        lengths = [self.length.times(factor) for factor in _FACTORS]
        return [(self.law.seconds_for(length), self.law.after(length)) for length in lengths]

    def to_dict(self) -> dict[str, object]:
        """Returns all of it for JSON."""
        lengths = [{"seconds": seconds, **asdict(bits)} for seconds, bits in self.others()]
        return {
            **asdict(self.bits), "seconds": self.law.seconds_for(self.length),
            "tokens": self.length.tokens, "measured": asdict(self.law), "chosen": self.fixed,
            "measured_s": self.measured_s, "lengths": lengths, "machine": self.machine,
        }  # fmt: skip


def predict_run(
    source: Source,
    config: TrainConfig,
    given: Collection[str] = (),
    measure_s: float | None = None,
    observers: Sequence[Observer] = (),
) -> Prediction:
    """Trains a short complete run and predicts what the whole run would end at.

    Args:
        source: as of `fastlstm.train`.
        config: options of the whole run.
        given: names of those that were chosen.
        measure_s: seconds of the short run; default is a tenth of the whole one, 5 s to 2 min.
        observers: get the events of the short run.

    Raises:
        UsageError: the whole run is no longer than the short one, or trains on BPE tokens.
        Stopped: SIGTERM or Ctrl-C; nothing is kept.
    """
    if config.vocab == "bpe":
        raise UsageError("predict needs a text of characters or bytes: --vocab is bpe")
    budget_s = StopCriterion.of(config, 1).budget_s
    if budget_s is not None:
        measure_s = _measure_s(measure_s, budget_s)
    planned = plan_run(source, config, given)
    fixed = chosen_sizes(config, planned.options)
    whole = replace(config, **fixed)
    short_s = measure_s or _MAX_DEFAULT_S
    short = replace(whole, steps=None, epochs=None, budget=f"{short_s:g}s")
    ends = list[Any]()

    def keep(event: Event) -> None:
        if event["event"] == "end":
            ends.append(event)

    with tempfile.TemporaryDirectory(prefix="fastlstm-predict-") as folder:
        try:
            train(
                source, out=Path(folder, "run"), config=short, given={*given, *fixed, "budget"},
                as_text=True, observers=[*observers, keep],
            )  # fmt: skip
        except Stopped:  # what it saved goes with the folder
            raise Stopped("stopped: of a short run that was not finished nothing follows") from None
    return _predicted(planned, whole, fixed, ends[0])


def _measure_s(asked: float | None, budget_s: float) -> float:
    seconds = asked or min(max(_DEFAULT_SHARE * budget_s, MIN_MEASURED_S), _MAX_DEFAULT_S)
    if seconds < MIN_MEASURED_S:
        raise UsageError(f"--measure is {seconds:g} s, expected at least {MIN_MEASURED_S:g} s")
    if seconds >= budget_s:
        raise UsageError(
            f"the run takes {clock(budget_s)} and --measure {clock(seconds)}: train it, or give a"
            " longer --budget"
        )
    return seconds


def law_of(start: Event, end: Event, optimizer: str) -> QualityPrediction:
    """Returns the law for the model of a complete run.

    Args:
        start: the event that the run began with, or another run of the same options.
        end: the event that it ended with.
        optimizer: of the run.
    """
    setup_s = float(end["spent_s"]["setup"])
    return QualityPrediction(
        rnn_size=int(start["model"]["rnn_size"]),
        optimizer=optimizer,
        train_tokens=int(start["num_units"]["train"]),
        measured=Length(float(end["units"]), float(end["step"])),
        measured_bits=float(end["best_bits_per_char"]),
        tokens_per_s=end["units"] / (end["elapsed_s"] - setup_s),
        setup_s=setup_s,
    )


def _predicted(
    planned: PlannedRun, config: TrainConfig, fixed: dict[str, Any], end: Event
) -> Prediction:
    """Returns the prediction from the event that the short run ended with."""
    law = law_of(planned.start, end, planned.options.optimizer)
    steps_per_epoch = law.train_tokens * law.measured.steps / law.measured.tokens
    stop = StopCriterion.of(config, max(1, int(steps_per_epoch)))
    if stop.total_steps is not None:
        length = law.measured.times(stop.total_steps / law.measured.steps)
    else:
        assert stop.budget_s is not None
        length = law.length_in(stop.budget_s)
    return Prediction(
        law, length, config, fixed, float(end["elapsed_s"]),
        int(planned.start["model"]["num_layers"]),
        describe_machine(),
    )  # fmt: skip
