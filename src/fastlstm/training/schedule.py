"""When a run evaluates and ends, and the learning rate on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fastlstm.errors import BudgetError, counted
from fastlstm.system.fields import parse_duration
from fastlstm.training.options import TrainingOptions

if TYPE_CHECKING:
    from fastlstm.training.state import Progress
    from fastlstm.training.task import Task

_FIRST = 0.5
"""Share of a budget before the first evaluation, which measures the time to reserve for the last
one. Before it, that time is a guess from steps, often twice too much on a busy machine."""
EVALUATION_SHARE, SPREAD_SHARE, _SHARE_OF_ONE = 0.05, 0.03, 0.1
"""Largest shares of the time: for all evaluations that come every so many steps; for all that are
spread over the run, except the last (benchmarks/log); for a single one that comes every so many
steps, as a share of a budget."""
_MOST = 16
"""Default number of evaluations that are spread over a run."""


@dataclass(frozen=True)
class StopCriterion:
    """How long a run lasts, in steps or in seconds of wall clock: the option `kind` decides.

    Attributes:
        total_steps: optimizer steps, or None. With both limits the steps decide, because an earlier
            start has used up the budget.
        text: text for people, such as "budget 2m".
        over_at: step at which a budget ended an earlier start; this start must take more steps.
    """

    kind: Literal["steps", "epochs", "budget"]
    total_steps: int | None
    budget_s: float | None
    text: str
    over_at: int = 0

    @staticmethod
    def of(options: TrainingOptions, steps_per_epoch: int) -> StopCriterion:
        """Returns the criterion of the options, or of the default budget."""
        if options.steps is not None:
            return StopCriterion("steps", options.steps, None, counted(options.steps, "step"))
        if options.epochs is not None:
            steps = max(1, math.ceil(options.epochs * steps_per_epoch))
            text = f"{counted(options.epochs, 'epoch')} = {counted(steps, 'step')}"
            return StopCriterion("epochs", steps, None, text)
        budget, default = options.budget, options.default_budget
        text = f"budget {default} (default)" if budget is None else f"budget {budget}"
        return StopCriterion("budget", None, parse_duration(budget or default), text)

    def progress(
        self, step: int, elapsed_s: float, setup_s: float = 0.0, reserve_s: float = 0.0
    ) -> float:
        """Returns the share of the training that is done, 0..1.

        For budgets `elapsed_s` counts, the wall clock over all starts, with `setup_s` before the
        first step of each. `reserve_s` is kept for the end: at most 3/4 of the time after set-up.
        """
        if self.total_steps is not None:
            return min(1.0, step / self.total_steps)
        assert self.budget_s is not None
        left_s = self.budget_s - setup_s
        if left_s <= 0:
            return 1.0
        return min(1.0, (elapsed_s - setup_s) / max(left_s - reserve_s, 0.25 * left_s))

    def require_steps(self, step: int, setup_s: float) -> None:
        """Raises BudgetError if the budget was over before the first step of the run or start."""
        if step == 0:
            raise BudgetError(
                f"trained 0 steps: the budget was too small for set-up, which took {setup_s:.1f} s"
                f" ({self.text}); give a larger budget"
            )
        if step == self.over_at:
            raise BudgetError(
                f"trained 0 further steps: the run has used its {self.text}; give a larger `budget`"
            )


def learning_rate_factor(progress: float, warmup: float, cooldown: float) -> float:
    """Returns the share of the peak learning rate: linear up, flat, linear down to zero; all
    arguments are shares of the run, 0..1."""
    if progress < warmup:
        return max(progress / warmup, 0.01)
    if progress > 1.0 - cooldown:
        return max((1.0 - progress) / cooldown, 0.0)
    return 1.0


def default_evaluations(task: Task, stop_criterion: StopCriterion, patience: int) -> int:
    """Returns how many evaluations to spread over a run: as many as its steps leave time for.

    With patience, which counts evaluations, or a budget, which times them, the number is the
    maximum.
    """
    if stop_criterion.total_steps is None or patience:
        return _MOST
    least = max(1, min(task.min_scored, task.num_valid))
    return max(1, min(_MOST, int(_fitting_units(task, stop_criterion.total_steps) / least)))


def _fitting_units(task: Task, total_steps: int) -> float:
    """Returns the validation units that all evaluations of a run may score."""
    return SPREAD_SHARE * total_steps * task.step_units / task.forward_share


@dataclass(frozen=True)
class EvaluationSchedule:
    """When a run evaluates: every so many steps, or `count` times, evenly over the run."""

    every: int | None
    count: int
    stop_criterion: StopCriterion

    def slot(self, done: float) -> int:
        """Returns how many of `count` evaluations are due at a share of the run."""
        return 0 if self.every is not None else int(done * self.count)

    def is_due(self, progress: Progress, done: float, elapsed_s: float) -> bool:
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
        """Returns whether the last evaluation, or the one at the end of the run, is at most a tenth
        of the interval away."""
        assert self.every is not None
        step, near = progress.step, self.every / 10
        is_after = progress.evaluated_step >= 0 and 0 < step - progress.evaluated_step <= near
        return is_after or (0.0 < done < 1.0 and 0 < round(step / done) - step <= near)

    def left(self, progress: Progress) -> int:
        if self.every is None:
            return self.count - progress.slot
        return ((self.stop_criterion.total_steps or 0) - progress.step) // self.every

    def limit(self, task: Task, progress: Progress, unit_s: float) -> int:
        """Returns the validation units that an evaluation scores; `unit_s` is 0 if unknown."""
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
