"""`fastlstm predict` of a table: what a run of a forecaster ends at, from two short ones.

A doubling of a complete run gains a share of what the doubling before it gained. Two complete runs,
one twice as long as the other, say how much that was; where the longer one is no better, a longer
one still will not be: a forecaster of a small table has learned what there is within a hundred
steps. The share and the errors were measured on complete runs of 30 to 960 steps
(`benchmarks/forecast_sizes.py --steps`, `benchmarks/fit_loss_law.py`; benchmarks/log).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastlstm.forecast.task import ForecastTask
from fastlstm.training.evaluations import SPREAD_SHARE
from fastlstm.training.schedule import StopCriterion
from fastlstm.tuning.planned_run import chosen_sizes, end_of_run, plan_run
from fastlstm.tuning.predict import RunPrediction, short_run_s, short_steps
from fastlstm.tuning.table_job import TableJob

if TYPE_CHECKING:
    from fastlstm.forecast.config import ForecastConfig
    from fastlstm.runs.events import Observer
    from fastlstm.training.trainer import Trainer

KEPT_GAIN = 0.6
"""Share of the gain of a doubling that the next one gains."""
_BELOW, _ABOVE = (0.025, 0.01), (0.045, 0.02)
"""Shares of the loss from the prediction to the limits of 90 % of runs, below and above: at the
length measured, and what is added per root of doublings. A longer run is more often worse than
predicted than better: it learns the rows of a small table by heart."""
FEWEST_STEPS = 60
"""Of the longer short run: the law was measured from 60 steps and half as many on."""
_LONGER = 0.65
"""Share of the time of both short runs that the longer one takes."""


@dataclass(frozen=True)
class PredictedLoss:
    """Validation loss that a run is expected to end at, with the limits of 90 % of such runs."""

    loss: float
    low: float
    high: float


def loss_after(steps: float, measured_steps: float, half: float, measured: float) -> PredictedLoss:
    """Returns what a complete run ends at, from the losses of one of `measured_steps` and of one of
    half as many, of the same model and table."""
    doublings = math.log2(steps / measured_steps)
    gained = max(0.0, half - measured)
    later = KEPT_GAIN * (1.0 - KEPT_GAIN**doublings) / (1.0 - KEPT_GAIN)
    loss = measured - gained * later
    root = math.sqrt(abs(doublings))
    below, above = (abs(loss) * (near + each * root) for near, each in (_BELOW, _ABOVE))
    return PredictedLoss(loss, loss - below, loss + above)


@dataclass(frozen=True)
class MeasuredRuns:
    """A complete short run with its validation loss, and `half_loss` of one of half as many steps;
    `seconds` of both."""

    steps: int
    loss: float
    half_loss: float
    seconds: float
    step_s: float
    setup_s: float


@dataclass(frozen=True)
class TablePrediction(RunPrediction):
    """What a run of a forecaster is expected to end at; of a budget, calibration, the test part and
    the report take `closing_s`."""

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
    measure_s: float | None = None, observers: Sequence[Observer] = (),
) -> TablePrediction:  # fmt: skip
    """Trains two short complete runs and predicts what the whole run would end at.

    Arguments are as of `predict_run`; `measure_s` is of both short runs.

    Raises:
        UsageError: the whole run is no longer than the short one.
    """
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
    end = end_of_run(source, short, {*names, ended_by}, observers, job.train)
    half = replace(short, steps=max(1, end["step"] // 2), budget=None)
    half_end = end_of_run(source, half, {*names, "steps"}, observers, job.train)
    measured = MeasuredRuns(
        end["step"], end["best_loss"], half_end["best_loss"],
        end["elapsed_s"] + half_end["elapsed_s"], end["train_s"] / end["step"],
        end["spent_s"]["setup"],
    )  # fmt: skip
    window_s = end["train_s"] / max(end["units"], 1) / 3.0  # of a forecast: forward only
    closing_s = ForecastTask.finish_s(tasks[0], window_s)
    steps = float(total or 0)
    if budget_s is not None:
        training_s = budget_s - measured.setup_s - closing_s
        steps = max(measured.steps, (1.0 - SPREAD_SHARE) * training_s / measured.step_s)
    return TablePrediction(measured, steps, fixed, closing_s)


def _short(config: ForecastConfig, total: int | None, measure_s: float | None) -> ForecastConfig:
    """Returns the options of the longer short run of one that takes `total` steps, or a budget."""
    if total is None or measure_s is not None:
        return replace(config, steps=None, epochs=None, budget=f"{_LONGER * (measure_s or 0.0):g}s")
    steps = short_steps(None, total, FEWEST_STEPS)
    return replace(config, steps=steps, epochs=None, budget=None)
