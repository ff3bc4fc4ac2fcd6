"""How a run goes, and its result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fastlstm.distributed.share import Share
from fastlstm.distributed.world import World
from fastlstm.training.options import TrainingOptions
from fastlstm.training.schedule import StopCriterion
from fastlstm.training.task import Score


@dataclass(frozen=True)
class TrainingPlan:
    """How a run goes, with every open choice made.

    Attributes:
        options: resolved; the learning rate is not None.
        stop_criterion: when the run stops.
        device: where it runs.
        eval_every: steps between evaluations; None spreads `evaluations` evenly over the run.
        evaluations: in the run.
        ceiling_gflops: measured GEMM rate of the device in this precision, 0 if unmeasured.
        ceiling_how: how it was measured, empty if unmeasured.
        started: `time.perf_counter()` when the wall clock of this start began.
        world: the processes that train together.
    """

    options: TrainingOptions
    stop_criterion: StopCriterion
    device: torch.device
    eval_every: int | None = None
    evaluations: int = 16
    ceiling_gflops: float = 0.0
    ceiling_how: str = ""
    started: float | None = None
    world: World = field(default_factory=World)

    @property
    def is_local(self) -> bool:
        """Whether each of several processes steps on its own rows, and weights are averaged."""
        return self.world.size > 1 and self.options.sync_every > 1

    @property
    def share(self) -> Share:
        """The rows of every batch that this process has."""
        return self.world.share if self.options.divides_batch else Share()

    def round_steps(self, step: int, done: float, each: float) -> int:
        """Returns the local steps until weights are averaged: at the latest before an evaluation, a
        checkpoint and the end.

        Args:
            step: optimizer steps taken.
            done: share of the run that is done, 0..1.
            each: share of the run that a step is.
        """
        every = [self.options.sync_every, self.eval_every, self.options.checkpoint_every]
        steps = min(number - step % number for number in every if number is not None)
        if each > 0.0:
            steps = min(steps, max(1, math.ceil((1.0 - done) / each - 1e-6)))
        return steps


@dataclass(frozen=True)
class TrainingResult:
    """Result of training.

    Attributes:
        steps: optimizer steps taken.
        epochs: passes over the training part.
        best_step: step of the best evaluation; -1 where callbacks accepted none.
        best_loss: its validation loss.
        last: the last evaluation.
        reason: why training ended.
        units: tokens, windows or sequences trained on.
        seconds: wall clock in all.
        train_s: the part of it spent in steps.
        spent: seconds of the other parts, see `Progress`.
        input_wait_share: share of the steps' time spent waiting for batches.
    """

    steps: int
    epochs: float
    best_step: int
    best_loss: float
    last: Score
    reason: str
    units: int
    seconds: float
    train_s: float
    spent: Mapping[str, float]
    input_wait_share: float
