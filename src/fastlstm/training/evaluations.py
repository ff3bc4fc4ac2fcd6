"""When a run evaluates, and how much of the validation part each evaluation reads."""

from __future__ import annotations

from dataclasses import dataclass

from fastlstm.training.schedule import StopCriterion
from fastlstm.training.state import Progress
from fastlstm.training.task import Task

_FIRST = 0.5
"""Of a budget, at most, before the first evaluation: what it takes is kept for the last one. Until
then that is a guess from steps, often twice too much on a busy machine."""
EVALUATION_SHARE, _SHARE_OF_ONE = 0.05, 0.1
"""Of a budget, at most, for all evaluations that are spread evenly over the run (docs/log.md); for
one of those that come every so many steps."""
_SCORED_PER_TRAINED = 4
"""Units that all evaluations score, at most, per unit trained on: forward alone is a third."""


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
            return progress.step % self.every == 0 or (is_late and done >= _FIRST)
        if self.slot(done) <= progress.slot:
            return False
        if self.stop_criterion.budget_s is None:
            return True
        spent_s = progress.spent.get("evaluations", 0.0)
        return spent_s <= EVALUATION_SHARE * (elapsed_s - progress.setup_s)

    def left(self, progress: Progress) -> int:
        """Returns how many evaluations are still to come, about."""
        if self.every is None:
            return self.count - progress.slot
        return ((self.stop_criterion.total_steps or 0) - progress.step) // self.every

    def limit(self, task: Task, progress: Progress, unit_s: float) -> int:
        """Returns how many validation units an evaluation scores; `unit_s` is 0 where unknown."""
        if self.stop_criterion.budget_s is not None:
            left_s = max(self.stop_criterion.budget_s - progress.setup_s, 0.0)
            share = EVALUATION_SHARE / self.count if self.every is None else _SHARE_OF_ONE
            fitting = share * left_s / unit_s if unit_s else float(task.num_valid)
        elif self.every is None:
            trained = (self.stop_criterion.total_steps or 0) * task.step_units
            fitting = _SCORED_PER_TRAINED * trained / self.count
        else:
            fitting = float(task.num_valid)
        limit = task.num_valid if task.max_scored is None else min(task.num_valid, task.max_scored)
        return int(min(limit, max(task.min_scored, fitting)))
