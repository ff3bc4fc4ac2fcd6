"""When a run evaluates, saves and ends, and the learning rate on the way."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fastlstm.errors import BudgetError, counted
from fastlstm.system.fields import parse_duration
from fastlstm.training.options import TrainingOptions

if TYPE_CHECKING:
    from fastlstm.training.state import Progress
    from fastlstm.training.task import Task

_FIRST_SAVE_S, _SAVE_S = 15.0, 60.0
_FIRST = 0.5
"""Of a budget, at most, before the first evaluation: what it takes is kept for the last one. Until
then that is a guess from steps, often twice too much on a busy machine."""
EVALUATION_SHARE, SPREAD_SHARE, _SHARE_OF_ONE = 0.05, 0.03, 0.1
"""Of the time, at most: all evaluations that come every so many steps; all that are spread evenly
over the run, but for the last (benchmarks/log); of a budget, one that comes every so many steps."""
_MOST = 16
"""Evaluations that are spread over a run where no number is asked for."""


@dataclass(frozen=True)
class StopCriterion:
    """How long a run lasts, counted in steps or in seconds of wall clock.

    Attributes:
        kind: what the user asked for.
        total_steps: number of optimizer steps (steps and epochs), or None.
        budget_s: seconds of wall clock (budget), or None. With both the steps decide: the budget
            was used up in an earlier start.
        text: the sentence shown to people, such as ``"budget 2m"``.
        over_at: the step that the run came to its end at before, of a budget; steps after it are
            expected now.
    """

    kind: Literal["steps", "epochs", "budget"]
    total_steps: int | None
    budget_s: float | None
    text: str
    over_at: int = 0

    @staticmethod
    def of(options: TrainingOptions, steps_per_epoch: int) -> StopCriterion:
        """Reads the end from the options; without one the default budget is the end."""
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
        """Returns how much of the training is done, 0..1.

        Args:
            step: optimizer steps done.
            elapsed_s: wall clock of the run so far, over all its starts (budget only, as below).
            setup_s: the part of it before the first step of each start.
            reserve_s: seconds to keep for what follows training; at most 3/4 of what set-up left.
        """
        if self.total_steps is not None:
            return min(1.0, step / self.total_steps)
        assert self.budget_s is not None
        left_s = self.budget_s - setup_s
        if left_s <= 0:
            return 1.0
        return min(1.0, (elapsed_s - setup_s) / max(left_s - reserve_s, 0.25 * left_s))

    def require_steps(self, step: int, setup_s: float) -> None:
        """Raises BudgetError if the budget was over before the first step, or the first new one."""
        if step == 0:
            raise BudgetError(
                f"trained 0 steps: the budget was too small for set-up, which took {setup_s:.1f} s"
                f" ({self.text}); give a larger budget"
            )
        if step == self.over_at:
            raise BudgetError(
                f"trained 0 further steps: the run has used its {self.text}; give a larger `budget`"
            )


class SaveTimes:
    """When the next checkpoint is due: by steps, or after 15 s and then once a minute."""

    def __init__(self, every: int | None) -> None:
        self._every, self._interval_s, self._last_s = every, _FIRST_SAVE_S, time.perf_counter()
        self._tried = -1

    def is_due(self, step: int) -> bool:
        """Returns whether a checkpoint is to be written after so many steps."""
        if self._every is not None:
            return step % self._every == 0 and step != self._tried
        return time.perf_counter() - self._last_s > self._interval_s

    def tried(self, step: int) -> None:
        """Notes that a checkpoint was written after so many steps, or could not be."""
        self._interval_s = _SAVE_S if step else _FIRST_SAVE_S
        self._last_s, self._tried = time.perf_counter(), step

    def rolled_back(self) -> None:
        """Notes that the run went back: steps that were tried may be due again."""
        self._tried = -1


def learning_rate_factor(progress: float, warmup: float, cooldown: float) -> float:
    """Returns the share of the peak learning rate: linear up, flat, linear down to zero.

    All three arguments are shares of the run, 0..1.
    """
    if progress < warmup:
        return max(progress / warmup, 0.01)
    if progress > 1.0 - cooldown:
        return max((1.0 - progress) / cooldown, 0.0)
    return 1.0


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
