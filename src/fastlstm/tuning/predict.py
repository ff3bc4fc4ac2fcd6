"""`fastlstm predict`: the result of a training run, from short runs of the same model.

A text needs one short run and the law of quality (`text/quality_law.py`). A table needs two:
each doubling of a complete run's length gains a fixed share of what the doubling before gained. Two
complete runs, one twice as long as the other, measure that gain. If the longer run is no better,
even longer runs will not be: a small table is learned within a hundred steps. The share and the
errors were measured on complete runs of 30 to 960 steps (`benchmarks/forecast_sizes.py --steps`,
`benchmarks/fit_loss_law.py`; benchmarks/log).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from fastlstm.errors import UsageError, counted
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.task import ForecastTask
from fastlstm.report.terminal import clock
from fastlstm.system.fields import ENDS
from fastlstm.text.config import TrainConfig
from fastlstm.text.quality_law import FEWEST_STEPS, Length, QualityPrediction
from fastlstm.text.size_plan import step_seconds
from fastlstm.text.task import TextTask
from fastlstm.training.schedule import SPREAD_SHARE, StopCriterion
from fastlstm.tuning.planned_run import chosen_sizes, describe_machine, end_of_run, plan_run
from fastlstm.tuning.table_job import TableJob

if TYPE_CHECKING:
    from fastlstm.runs.events import Event
    from fastlstm.text.quality_law import PredictedBits
    from fastlstm.text.train import Source
    from fastlstm.training.trainer import Trainer

MIN_MEASURED_S, _MAX_DEFAULT_S = 5.0, 120.0
_DEFAULT_SHARE, _MAX_SHARE = 0.1, 0.25
_STEPS_SHARE = 0.8
"""Share of the time of a short run that remains without set-up and evaluations."""
_FACTORS = (0.5, 1.0, 2.0, 4.0)
"""Lengths of the runs in the table of predictions, as multiples of the run's length."""
KEPT_GAIN = 0.6
"""Share of the gain of a doubling that the next one gains."""
_BELOW, _ABOVE = (0.025, 0.01), (0.045, 0.02)
"""Distances of the 90 % limits from the prediction, in shares of the loss: at the measured length,
and the increase per square root of doublings. A longer run is more often worse than predicted, as
it overfits a small table."""
FEWEST_TABLE_STEPS = 60
"""Fewest steps of the longer short run: the law was measured on runs of 60 steps or more."""
_LONGER = 0.65
"""Share of the longer short run in the time of both."""


@dataclass(frozen=True)
class RunPrediction(ABC):
    """The predicted result of a run of `steps` steps, from the `measured` short runs; `fixed` are
    the options that the budget chose."""

    measured: Any
    steps: float
    fixed: dict[str, Any]

    @abstractmethod
    def after(self, steps: float) -> Any:
        """Returns the predicted result of a run of so many steps."""

    @abstractmethod
    def seconds_for(self, steps: float) -> float:
        """Returns the seconds of a run of so many steps."""

    def others(self) -> list[tuple[float, Any]]:
        """Returns seconds and predicted result of shorter and longer runs of the same model."""
        lengths = [self.steps * factor for factor in _FACTORS]
        return [(self.seconds_for(steps), self.after(steps)) for steps in lengths]

    def to_dict(self) -> dict[str, object]:
        lengths = [{"seconds": seconds, **asdict(found)} for seconds, found in self.others()]
        return {
            **asdict(self.after(self.steps)), "seconds": self.seconds_for(self.steps),
            "steps": self.steps, "measured": asdict(self.measured), "chosen": self.fixed,
            "lengths": lengths, "machine": describe_machine(),
        }  # fmt: skip


@dataclass(frozen=True)
class Prediction(RunPrediction):
    """The predicted result of a run of a text; the short run took `measured_s`."""

    measured: QualityPrediction
    measured_s: float

    def length(self, steps: float) -> Length:
        return self.measured.measured.times(steps / self.measured.measured.steps)

    def after(self, steps: float) -> PredictedBits:
        return self.measured.after(self.length(steps))

    def seconds_for(self, steps: float) -> float:
        return self.measured.seconds_for(self.length(steps))

    def to_dict(self) -> dict[str, object]:
        tokens = self.length(self.steps).tokens
        return {**super().to_dict(), "tokens": tokens, "measured_s": self.measured_s}


def predict_run(
    source: Source, config: TrainConfig, given: Collection[str] = (),
    measure_s: float | None = None, measure_steps: int | None = None,
) -> Prediction:  # fmt: skip
    """Trains a short complete run and predicts the result of the whole run.

    The short run takes `measure_s` seconds; default is a tenth of the whole run, 5 s to 2 min, or
    up to a quarter of it for 120 steps. Or it takes `measure_steps` steps; default for a run that
    ends by steps or epochs is a tenth of its steps, at least 120. Raises UsageError: the whole run
    is no longer than the short run, or trains on BPE tokens; or Stopped: SIGTERM or Ctrl-C.
    """
    if config.vocab == "bpe":
        raise UsageError("predict needs a text of characters or bytes: --vocab is bpe")
    if measure_s is not None and measure_steps is not None:
        raise UsageError("--measure and --measure-steps are both given: leave one out")
    if measure_steps is not None and measure_steps < 1:
        raise UsageError(f"--measure-steps is {measure_steps}, expected at least 1")
    budget_s, step_s, short_s = StopCriterion.of(config, 1).budget_s, list[float](), 0.0
    if measure_steps is None and (budget_s is not None or measure_s is not None):
        short_s = short_run_s(measure_s, budget_s)

    def look(trainer: Trainer) -> None:
        if short_s and not measure_s and trainer.plan.device.type == "cpu":
            step_s.append(_step_s(trainer))

    planned = plan_run(source, config, given, look)
    stop = StopCriterion.of(planned.options, planned.steps_per_epoch)
    if step_s and budget_s is not None:
        few_s = step_s[0] * FEWEST_STEPS / _STEPS_SHARE
        short_s = max(short_s, min(few_s, _MAX_SHARE * budget_s))
    end: dict[str, Any] = {"budget": f"{short_s:g}s"}
    if not short_s:
        end = {"steps": short_steps(measure_steps, stop.total_steps, FEWEST_STEPS)}
    fixed = chosen_sizes(config, planned.options)
    # A short run would choose shorter sequences.
    batches = {n: getattr(planned.options, n) for n in ("batch_size", "accumulate", "seq_length")}
    short = replace(config, **{**fixed, **batches, **dict.fromkeys(ENDS), **end})
    ended = end_of_run(source, short, {*given, *fixed, *batches, *end})
    law = law_of(planned.start, ended, planned.options.optimizer)
    steps = float(stop.total_steps or 0)
    if budget_s is not None:
        steps = law.length_in(budget_s).steps
    return Prediction(law, steps, fixed, float(ended["elapsed_s"]))


def short_run_s(asked: float | None, budget_s: float | None) -> float:
    """Returns the seconds of the short run; UsageError if it is too short, or no shorter than the
    whole run of `budget_s` (None: of any length)."""
    default_s = 0.0 if budget_s is None else _DEFAULT_SHARE * budget_s
    seconds = asked or min(max(default_s, MIN_MEASURED_S), _MAX_DEFAULT_S)
    if seconds < MIN_MEASURED_S:
        raise UsageError(f"--measure is {seconds:g} s, expected at least {MIN_MEASURED_S:g} s")
    if budget_s is not None and seconds >= budget_s:
        raise UsageError(
            f"the run takes {clock(budget_s)} and --measure {clock(seconds)}: train it, or give a"
            " longer --budget"
        )
    return seconds


def short_steps(asked: int | None, total: int | None, fewest: int) -> int:
    """Returns the steps of the short run; UsageError if it is no shorter than the whole run of
    `total` steps (None: of any length)."""
    steps = asked or max(fewest, int(_DEFAULT_SHARE * (total or 0)))
    if total is not None and steps >= total:
        smaller = "" if asked is None else ", or give a smaller --measure-steps"
        raise UsageError(
            f"the run takes {counted(total, 'step')} and the short run {counted(steps, 'step')}:"
            f" train it{smaller}"
        )
    return steps


def _step_s(trainer: Trainer) -> float:
    task, options = trainer.task, trainer.plan.options
    assert isinstance(task, TextTask)
    assert isinstance(options, TrainConfig)
    sizes = {n: getattr(task.model.config, n) for n in ("rnn_size", "num_layers", "embed_size")}
    data, slowdowns = (task.loader.ids, task.tokenizer, task.device), list[float]()
    step_s = step_seconds(replace(options, **sizes), *data, slowdowns)
    return float(step_s * min(slowdowns, default=1.0))


def law_of(start: Event, end: Event, optimizer: str) -> QualityPrediction:
    """Returns the law for the model of a complete run; `start` may be the first event of another
    run with the same options."""
    setup_s = float(end["spent_s"]["setup"])
    return QualityPrediction(
        rnn_size=int(start["model"]["rnn_size"]),
        num_layers=int(start["model"]["num_layers"]),
        optimizer=optimizer,
        train_tokens=int(start["num_units"]["train"]),
        measured=Length(float(end["units"]), float(end["step"])),
        measured_bits=float(end["best_bits_per_char"]),
        tokens_per_s=end["units"] / (end["elapsed_s"] - setup_s),
        setup_s=setup_s,
    )


@dataclass(frozen=True)
class PredictedLoss:
    """The predicted validation loss of a run, with the limits for 90 % of such runs."""

    loss: float
    low: float
    high: float


def loss_after(steps: float, measured_steps: float, half: float, measured: float) -> PredictedLoss:
    """Returns the predicted loss of a complete run, from the losses of a run of half as many and of
    one of `measured_steps` steps."""
    doublings = math.log2(steps / measured_steps)
    gained = max(0.0, half - measured)
    later = KEPT_GAIN * (1.0 - KEPT_GAIN**doublings) / (1.0 - KEPT_GAIN)
    loss = measured - gained * later
    root = math.sqrt(abs(doublings))
    below, above = (abs(loss) * (near + each * root) for near, each in (_BELOW, _ABOVE))
    return PredictedLoss(loss, loss - below, loss + above)


@dataclass(frozen=True)
class MeasuredRuns:
    """A complete short run, the `half_loss` of one of half as many steps, the `seconds` of both."""

    steps: int
    loss: float
    half_loss: float
    seconds: float
    step_s: float
    setup_s: float


@dataclass(frozen=True)
class TablePrediction(RunPrediction):
    """The predicted result of a run of a forecaster; calibration, test and report of the run take
    `closing_s`."""

    measured: MeasuredRuns
    closing_s: float

    def after(self, steps: float) -> PredictedLoss:
        measured = self.measured
        return loss_after(steps, measured.steps, measured.half_loss, measured.loss)

    def seconds_for(self, steps: float) -> float:
        training_s = steps * self.measured.step_s / (1.0 - SPREAD_SHARE)
        return training_s + self.measured.setup_s + self.closing_s


def predict_forecaster(
    source: Any, config: ForecastConfig, given: Collection[str] = (),
    measure_s: float | None = None,
) -> TablePrediction:  # fmt: skip
    """Trains two short complete runs and predicts the result of the whole run, as `predict_run`;
    `measure_s` is for both short runs together."""
    job, tasks = TableJob(), list[ForecastTask]()
    budget_s = StopCriterion.of(config, 1).budget_s
    if budget_s is not None:
        measure_s = short_run_s(measure_s, budget_s)

    def look(trainer: Trainer) -> None:
        assert isinstance(trainer.task, ForecastTask)
        tasks.append(trainer.task)

    planned = plan_run(source, config, given, look, job.train)
    fixed = chosen_sizes(config, planned.options)
    total = StopCriterion.of(config, planned.steps_per_epoch).total_steps
    short = _short(replace(config, **fixed), total, measure_s)
    names = {*given, "hidden_size"}
    ended_by = "steps" if short.budget is None else "budget"
    end = end_of_run(source, short, {*names, ended_by}, job.train)
    half = replace(short, steps=max(1, end["step"] // 2), budget=None)
    half_end = end_of_run(source, half, {*names, "steps"}, job.train)
    measured = MeasuredRuns(
        end["step"], end["best_loss"], half_end["best_loss"],
        end["elapsed_s"] + half_end["elapsed_s"], end["train_s"] / end["step"],
        end["spent_s"]["setup"],
    )  # fmt: skip
    window_s = end["train_s"] / max(end["units"], 1) / 3.0  # a forecast has no backward pass
    closing_s = ForecastTask.finish_s(tasks[0], window_s)
    steps = float(total or 0)
    if budget_s is not None:
        training_s = budget_s - measured.setup_s - closing_s
        steps = max(measured.steps, (1.0 - SPREAD_SHARE) * training_s / measured.step_s)
    return TablePrediction(measured, steps, fixed, closing_s)


def _short(config: ForecastConfig, total: int | None, measure_s: float | None) -> ForecastConfig:
    """Returns the options of the longer short run; the whole run has `total` steps, or a budget."""
    if total is None or measure_s is not None:
        return replace(config, steps=None, epochs=None, budget=f"{_LONGER * (measure_s or 0.0):g}s")
    steps = short_steps(None, total, FEWEST_TABLE_STEPS)
    return replace(config, steps=steps, epochs=None, budget=None)
