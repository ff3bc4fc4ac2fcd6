"""When a run ends, and the learning rate on the way there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fastlstm.config import TrainConfig, parse_duration

DEFAULT_BUDGET_S = 300.0


@dataclass(frozen=True)
class Ending:
    """How long a run lasts, counted in steps or in seconds of wall clock.

    Attributes:
        kind: what the user asked for.
        total_steps: number of optimizer steps (steps and epochs), or None.
        budget_s: seconds of wall clock (budget), or None.
        text: the sentence shown to people, such as ``"budget 2m"``.
    """

    kind: Literal["steps", "epochs", "budget"]
    total_steps: int | None
    budget_s: float | None
    text: str

    @staticmethod
    def of(config: TrainConfig, steps_per_epoch: int) -> Ending:
        """Reads the end from the configuration; without one a run lasts five minutes."""
        if config.steps is not None:
            return Ending("steps", config.steps, None, f"{config.steps} steps")
        if config.epochs is not None:
            steps = max(1, math.ceil(config.epochs * steps_per_epoch))
            return Ending("epochs", steps, None, f"{config.epochs:g} epochs = {steps} steps")
        if config.budget is not None:
            return Ending("budget", None, parse_duration(config.budget), f"budget {config.budget}")
        return Ending("budget", None, DEFAULT_BUDGET_S, "budget 5m (default)")

    def progress(self, step: int, elapsed_s: float, reserve_s: float = 0.0) -> float:
        """Returns how much of the run is done, 0..1.

        Args:
            step: optimizer steps done.
            elapsed_s: wall clock of the run so far, over all its resumed parts.
            reserve_s: seconds to keep for the last evaluation and checkpoint (budget only).
        """
        if self.total_steps is not None:
            return min(1.0, step / self.total_steps)
        assert self.budget_s is not None
        return min(1.0, elapsed_s / max(self.budget_s - reserve_s, 0.5 * self.budget_s))


def learning_rate_factor(progress: float, warmup: float, cooldown: float) -> float:
    """Returns the share of the peak learning rate: linear up, flat, linear down to zero.

    Args:
        progress: how much of the run is done, 0..1.
        warmup: share of the run spent going up.
        cooldown: share of the run, at its end, spent going down.
    """
    if progress < warmup:
        return max(progress / warmup, 0.01)
    if progress > 1.0 - cooldown:
        return max((1.0 - progress) / cooldown, 0.0)
    return 1.0
