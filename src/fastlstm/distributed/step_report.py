"""What the processes of a run tell each other with the gradients of every step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class StepReport:
    """What processes tell each other with the gradients of a step, in one vector of float64.

    Attributes:
        numbers: the vector; every place is written by one process and zero in the others.
        losses: of the shards, shape ``(S,)``.
        targets: that each process has, shape ``(W,)``.
        seconds: that its passes took, shape ``(W,)``.
        checks: CRC-32 of the weights of each process, 0 where they are not compared, ``(W,)``.
        skipped: of local steps, those that each process has skipped, shape ``(W,)``.
        in_a_row: the most of them without a good one between, shape ``(W,)``.
        signals: the number of the signal that each process has got, 0 without one, ``(W,)``.
    """

    numbers: Tensor
    losses: Tensor
    targets: Tensor
    seconds: Tensor
    checks: Tensor
    skipped: Tensor
    in_a_row: Tensor
    signals: Tensor
    rank: int

    @classmethod
    def empty(cls, num_shards: int, rank: int, size: int) -> StepReport:
        numbers = torch.zeros(num_shards + 6 * size, dtype=torch.float64)
        losses, *of_ranks = numbers.split([num_shards, *6 * [size]])
        targets, seconds, checks, skipped, in_a_row, signals = of_ranks
        return cls(numbers, losses, targets, seconds, checks, skipped, in_a_row, signals, rank)

    def set_own(self, num_targets: int, seconds: float, check: int, signal: int) -> None:
        self.targets[self.rank], self.seconds[self.rank] = num_targets, seconds
        self.checks[self.rank], self.signals[self.rank] = check, signal

    @property
    def loss(self) -> float:
        """Sum over the shards."""
        return float(self.losses.sum())

    @property
    def num_targets(self) -> float:
        return float(self.targets.sum())
