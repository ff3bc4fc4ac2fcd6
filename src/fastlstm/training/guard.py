"""NaN and Inf: found by name, and counted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

SKIPS_BEFORE_ROLLBACK = 5
ROLLBACKS_BEFORE_STOP = 3


def first_non_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Returns the name of the first tensor that holds NaN or Inf, or None."""
    for name, tensor in tensors:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return name
    return None


def bad_weight(model: nn.Module) -> str | None:
    """Returns the name of the first weight that holds NaN or Inf, or None."""
    return first_non_finite((name, p.detach()) for name, p in model.named_parameters())


def bad_gradient(model: nn.Module) -> str | None:
    """Returns the name of the first gradient that holds NaN or Inf, or None."""
    return first_non_finite(
        (name, p.grad) for name, p in model.named_parameters() if p.grad is not None
    )


@dataclass
class NonFiniteGuard:
    """Counts trouble: five skipped steps in a row ask for a roll-back, three roll-backs for a stop.

    Attributes:
        skipped: steps skipped in all.
        in_a_row: steps skipped since the last good one.
        rollbacks: roll-backs so far.
        culprits: name of each bad tensor with its step, oldest first.
    """

    skipped: int = 0
    in_a_row: int = 0
    rollbacks: int = 0
    culprits: list[str] = field(default_factory=list)

    def good_step(self) -> None:
        self.in_a_row = 0

    def bad_step(self, step: int, culprit: str) -> bool:
        """Records a skipped step; True when it is time to roll back."""
        self.skipped += 1
        self.in_a_row += 1
        self.culprits.append(f"step {step}: {culprit}")
        return self.in_a_row >= SKIPS_BEFORE_ROLLBACK

    def roll_back(self) -> bool:
        """Records a roll-back; True when there were too many and the run must stop."""
        self.rollbacks += 1
        self.in_a_row = 0
        return self.rollbacks > ROLLBACKS_BEFORE_STOP
