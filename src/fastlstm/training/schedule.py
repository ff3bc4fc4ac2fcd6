"""When a run ends, and the learning rate on the way there."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Literal

from fastlstm.errors import BudgetError, counted
from fastlstm.system.fields import parse_duration
from fastlstm.training.options import TrainingOptions

_FIRST_SAVE_S, _SAVE_S = 15.0, 60.0


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
