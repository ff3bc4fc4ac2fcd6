"""When a run evaluates, and how much of the validation part each evaluation reads."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastlstm.training.schedule import StopCriterion
from fastlstm.training.state import Progress
from fastlstm.training.task import Task

_FIRST = 0.5
"""Of a budget, at most, before the first evaluation: what it takes is kept for the last one. Until
then that is a guess from steps, often twice too much on a busy machine."""
EVALUATION_SHARE, SPREAD_SHARE, _SHARE_OF_ONE = 0.05, 0.03, 0.1
"""Of the time, at most: all evaluations that come every so many steps; all that are spread evenly
over the run, but for the last (benchmarks/log); of a budget, one that comes every so many steps."""
_MOST = 16
"""Evaluations that are spread over a run where no number is asked for."""


def default_evaluations(task: Task, stop_criterion: StopCriterion, patience: int) -> int:
    """Returns how many evaluations to spread over a run: as many as its steps have time for.

    Patience counts evaluations, so with it none is left out. Of a budget the time that they take
    is measured; see `EvaluationSchedule.is_due`.
    """
    if stop_criterion.total_steps is None or patience:
        return _MOST
    least = max(1, min(task.min_scored, task.num_valid))
    return max(1, min(_MOST, int(_fitting_units(task, stop_criterion.total_steps) / least)))


def _fitting_units(task: Task, total_steps: int) -> float:
    """Returns the validation units that all evaluations of so many steps may score."""
    return SPREAD_SHARE * total_steps * task.step_units / task.forward_share


@dataclass(frozen=True)
class EvaluationSchedule:
    """Evaluates every so many steps, or so often, evenly over the run.

    Attributes:
        every: steps between evaluations, or None.
        count: evaluations in the run, where `every` is None.
        stop_criterion: when the run stops.
    """

    every: int | None
    count: int
    stop_criterion: StopCriterion

    def slot(self, done: float) -> int:
        """Returns how many of `count` evaluations are due when so much of the run is done."""
        return 0 if self.every is not None else int(done * self.count)

    def is_due(self, progress: Progress, done: float, elapsed_s: float) -> bool:
        """Returns whether to evaluate now, when a share of the run is done (0..1)."""
        if progress.step == 0 or progress.evaluated_step == progress.step:
            return False
        is_late = progress.evaluations == 0 and self.stop_criterion.budget_s is not None
        if self.every is not None:
            is_periodic = progress.step % self.every == 0
            if is_periodic and not self._is_beside_another(progress, done):
                return True
            return is_late and done >= _FIRST
        if self.slot(done) <= progress.slot:
            return False
        if self.stop_criterion.budget_s is None:
            return True
        spent_s = progress.spent.get("evaluations", 0.0)
        return spent_s <= SPREAD_SHARE * (elapsed_s - progress.setup_s)

    def _is_beside_another(self, progress: Progress, done: float) -> bool:
        """Whether a tenth of the interval or less lies between this step and the last evaluation,
        or the one that ends the run."""
        assert self.every is not None
        if progress.evaluated_step >= 0 and self._is_beside(progress.step, progress.evaluated_step):
            return True
        last = progress.step / done if 0.0 < done < 1.0 else math.inf
        return self._is_beside(round(last) if math.isfinite(last) else last, progress.step)

    def _is_beside(self, later: float, earlier: float) -> bool:
        assert self.every is not None
        return 0 < later - earlier <= self.every / 10

    def left(self, progress: Progress) -> int:
        """Returns how many evaluations are still to come, about."""
        if self.every is None:
            return self.count - progress.slot
        return ((self.stop_criterion.total_steps or 0) - progress.step) // self.every

    def limit(self, task: Task, progress: Progress, unit_s: float) -> int:
        """Returns how many validation units an evaluation scores; `unit_s` is 0 where unknown."""
        if self.stop_criterion.budget_s is not None:
            left_s = max(self.stop_criterion.budget_s - progress.setup_s, 0.0)
            share = SPREAD_SHARE / self.count if self.every is None else _SHARE_OF_ONE
            fitting = share * left_s / unit_s if unit_s else float(task.num_valid)
        elif self.every is None:
            fitting = _fitting_units(task, self.stop_criterion.total_steps or 0) / self.count
        else:
            fitting = float(task.num_valid)
        limit = task.num_valid if task.max_scored is None else min(task.num_valid, task.max_scored)
        return int(min(limit, max(task.min_scored, fitting)))
