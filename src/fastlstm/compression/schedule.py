"""When weights are pruned, in steps or in shares of a run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastlstm.errors import ConfigError

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class PruningSchedule:
    """How many weights, or blocks, are zero at each time of a run.

    The sparsity is ``final * (1 - (1 - (t - begin) / (end - begin)) ** power)`` from `begin` to
    `end`. Masks are made anew where ``(step - begin) % every == 0``, and once it ends.

    `begin` and `end` are both numbers of steps done (int), or both shares of the run (float). Of a
    run whose number of steps is known, shares become steps when it starts first. Of one that ends
    by a budget t is the share of it that is done, and masks are made anew every `every` steps.

    Source: Zhu and Gupta 2017, "To prune, or not to prune", section 3. In numbers of steps it is
    `PolynomialDecay` of TensorFlow's Model Optimization Toolkit, which makes no mask at `end`
    unless `every` divides ``end - begin``. There a mask is made before the step of its number, here
    after it.
    """

    final: float
    begin: float = 0.02
    end: float = 0.4
    power: float = 3.0
    every: int = 10

    def __post_init__(self) -> None:
        if type(self.begin) is not type(self.end):
            raise ConfigError(
                f"begin is {self.begin!r} and end {self.end!r}, expected two numbers of steps (int)"
                " or two shares of the run (float)"
            )
        if not 0 <= self.begin <= self.end or (isinstance(self.end, float) and self.end > 1):
            raise ConfigError(
                f"begin is {self.begin!r} and end {self.end!r}, expected 0 <= begin <= end, and"
                " shares up to 1.0"
            )
        if not 0 <= self.final < 1:
            raise ConfigError(f"final is {self.final!r}, expected a share in [0, 1)")
        if self.power <= 0 or self.every < 1:
            raise ConfigError(
                f"power is {self.power!r} and every {self.every!r}, expected a positive exponent"
                " and a number of steps"
            )

    def resolved(self, total_steps: int | None) -> PruningSchedule:
        """Returns it in steps where the number of steps of the run is known."""
        begin, end = (in_steps(at, total_steps) for at in (self.begin, self.end))
        return dataclasses.replace(self, begin=begin, end=end)

    def require_end(self, total_steps: int | None) -> None:
        """Raises ConfigError where no evaluation would count: it ends after the last step.

        `total_steps` is None of a run that ends by a budget.
        """
        if total_steps is not None and in_steps(self.end, total_steps) > total_steps:
            raise ConfigError(
                f"`schedule` prunes until step {self.end:,}, and training ends after"
                f" {total_steps:,} steps; only what is measured after END is published: give a"
                " smaller END"
            )
        if total_steps is None and isinstance(self.end, float) and self.end >= 1.0:
            raise ConfigError(
                "`schedule` prunes until 100 % of a budget, after the last step; only what is"
                " measured after END is published: give a smaller END"
            )

    def sparsity(self, at: float) -> float:
        """Returns the sparsity at a number of steps done, or a share of the run."""
        span = self.end - self.begin
        done = min(max((at - self.begin) / span, 0.0), 1.0) if span else float(at >= self.end)
        left: float = (1.0 - done) ** self.power
        return self.final - self.final * left

    def is_due(self, step: int, at: float) -> bool:
        """Returns whether masks are made anew after `step` steps, at `at`."""
        first = self.begin if isinstance(self.begin, int) else 0
        return self.begin <= at <= self.end and (step - first) % self.every == 0

    def __str__(self) -> str:
        """From when to when, in words."""
        if isinstance(self.begin, int):
            return f"from step {self.begin:,} to step {self.end:,}"
        return f"from {100 * self.begin:.0f} % to {100 * self.end:.0f} % of the run"


def in_steps(at: float, total_steps: int | None) -> float:
    """Returns a share of a run (float) as a number of steps (int), where the steps are known."""
    return at if isinstance(at, int) or total_steps is None else round(at * total_steps)


def position(trainer: Trainer, at: float, steps_done: int) -> float:
    """Returns where a run is, to be compared with `at`: steps done (int) or a share (float)."""
    return steps_done if isinstance(at, int) else trainer.done()
