"""The plan of a run, and its result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fastlstm.distributed.world import Share, World
from fastlstm.training.options import TrainingOptions
from fastlstm.training.schedule import StopCriterion
from fastlstm.training.task import Score


@dataclass(frozen=True)
class TrainingPlan:
    """How a run trains, with every choice made.

    Attributes:
        options: resolved options; the learning rate is not None.
        eval_every: steps between evaluations; None spreads `evaluations` over the run.
        ceiling_gflops: measured GEMM rate of the device in this precision, or 0.
        started: `time.perf_counter()` at the start of the wall clock; default is the trainer's.
        is_trained: whether the run starts with trained weights, which are scored first and may stay
            the best.
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
    is_trained: bool = False

    @property
    def is_local(self) -> bool:
        """Whether processes take their own steps, and average weights every `sync_every` steps."""
        return self.world.size > 1 and self.options.sync_every > 1

    @property
    def share(self) -> Share:
        return self.world.share if self.options.divides_batch else Share()

    def round_steps(self, step: int, done: float, each: float) -> int:
        """Returns the local steps until weights are averaged, at the latest at an evaluation, a
        checkpoint and the end; `done` is the share of the run that is done, `each` the share of a
        step."""
        every = [self.options.sync_every, self.eval_every, self.options.checkpoint_every]
        steps = min(number - step % number for number in every if number is not None)
        if each > 0.0:
            steps = min(steps, max(1, math.ceil((1.0 - done) / each - 1e-6)))
        return steps


@dataclass(frozen=True)
class TrainingResult:
    """Result of training; `best_loss` and `last` are of validation, see `Progress`.

    Attributes:
        epochs: passes over the training part.
        best_step: step of the best evaluation, -1 if callbacks accepted none.
        reason: why training ended.
        units: tokens, windows or sequences trained on.
        seconds: wall clock.
        train_s, spent: seconds in steps, and of other parts.
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
