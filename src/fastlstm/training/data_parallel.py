"""Steps of several processes, each on its own rows: DistributedDataParallel or averaged weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastlstm.training.task import even_parts

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer


class _Passes(nn.Module):
    """Calls what computes a loss of `model`; DistributedDataParallel wraps a `forward`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # DDP warns where it looks for unused parameters and finds none.
        self.unused = nn.Parameter(next(model.parameters()).detach().new_zeros(1))

    def forward(self, loss: Callable[[], Tensor]) -> Tensor:
        return loss()


class DataParallel:
    """Runs the passes of a batch of which each process has its own rows.

    The gradient is of the *sum* of the losses, which is divided by the targets of all
    processes: missing values and small batches have their weight. Random numbers follow from the
    seed, the step and the rank.

    With local steps nothing is sent in a step: a gradient is the mean over the own targets.
    """

    def __init__(self, trainer: Trainer) -> None:
        plan = trainer.plan
        self._trainer = trainer
        self._task, self._state, self._world = trainer.task, trainer.state, plan.world
        self._is_local = plan.is_local
        self._parameters = [p for p in trainer.model.parameters() if p.requires_grad]
        # Sums are divided by about the rows at once, so that fp16 does not overflow.
        rows = plan.options.batch_size * plan.options.accumulate
        self._scale = 2.0 ** rows.bit_length()
        self._passes: Any = _Passes(trainer.model)
        if not self._is_local:
            # Where unused parameters are looked for, buckets stay as they are: the sums of a run
            # that continues have the same order.
            self._passes = nn.parallel.DistributedDataParallel(
                self._passes, find_unused_parameters=True, gradient_as_bucket_view=True,
                init_sync=False,
            )  # fmt: skip
            if plan.options.wire == "bf16":
                from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
                    bf16_compress_hook,
                )

                # DDP refuses the hook by its name without NCCL; gloo sums bf16 too.
                self._passes.register_comm_hook(
                    None, lambda state, bucket: bf16_compress_hook(state, bucket)
                )

    def passes(self, batch: Any, num_parts: int) -> float:
        """Leaves the gradient of the mean loss in the parameters; returns the mean loss."""
        started, task, scaler = time.perf_counter(), self._task, self._state.scaler
        draw_anew(self._trainer)
        parts = even_parts(task.num_rows(batch), num_parts)
        losses = task.losses(batch, parts, self._scale)
        sum_, num = torch.zeros((), dtype=torch.float64), max(len(parts), 1)
        for number in range(num):  # a process that has no rows takes part too
            is_last = number == num - 1
            with nullcontext() if is_last or self._is_local else self._passes.no_sync():
                loss = self._passes(lambda: next(losses) if parts else self._no_loss())
                with self._world.naming():
                    (loss if scaler is None else scaler.scale(loss)).backward()
            sum_ += loss.detach().double().cpu()
        next(losses, None)  # the carried state moves on
        seconds, world = time.perf_counter() - started, self._world
        told = torch.zeros(2 + world.size, dtype=torch.float64)
        told[0], told[1] = sum_, task.num_targets(batch)
        told[2 + world.rank] = seconds
        if not self._is_local:
            world.summed(told)
            world.heard(told[2:])
        of_processes = 1 if self._is_local else world.size  # whose mean the gradient is
        targets = max(float(told[1]), 1.0)
        torch._foreach_mul_(
            [p.grad for p in self._parameters if p.grad is not None],
            self._scale * of_processes / targets,
        )
        return self._scale * float(told[0]) / targets

    def _no_loss(self) -> Tensor:
        return sum((p.sum() * 0.0 for p in self._parameters), torch.zeros(()))


def draw_anew(trainer: Trainer) -> None:
    """Has the random numbers of a step follow from the seed, the step and the rank."""
    words = [trainer.plan.options.seed, trainer.progress.step, trainer.world.rank]
    drawn = np.random.SeedSequence(words).generate_state(1, np.uint64)[0]
    seed = int(drawn >> np.uint64(1))
    torch.default_generator.manual_seed(seed)
    if trainer.plan.device.type == "cuda":
        torch.cuda.manual_seed(seed)


def broadcast(trainer: Trainer) -> None:
    """Gives all processes the weights of rank 0."""
    if trainer.world.size > 1:
        with trainer.world.naming():
            for tensor in (*trainer.model.parameters(), *trainer.model.buffers()):
                dist.broadcast(tensor.detach(), 0)


def average_optimizers(trainer: Trainer) -> None:
    """Moves what the optimizers keep to its mean: a checkpoint has no rank in it."""
    named = trainer.optimizers.tensors()
    own = [named[name] for name in sorted(named) if named[name].dim() > 0]  # others are counters
    num = trainer.world.summed(torch.tensor([float(len(own))]))
    if own and float(num) == len(own) * trainer.world.size:  # else one has taken no step yet
        _average(trainer, own)


def finish_round(trainer: Trainer) -> None:
    """Ends a round of local steps: averages the weights, or goes back in all processes."""
    world, average = trainer.world, trainer.state.average
    told = torch.zeros(1 + world.size, dtype=torch.float64)
    told[0] = trainer.culprit is not None
    told[1 + world.rank] = trainer.meter.seconds_per_step
    world.heard(world.summed(told)[1:])
    if told[0]:
        culprit, trainer.culprit = trainer.culprit or "a tensor of another process", None
        trainer.roll_back(culprit)
        return
    weights = [p for p in trainer.model.parameters() if p.requires_grad]
    _average(trainer, [*weights, *(() if average is None else average.tensors().values())])


def _average(trainer: Trainer, tensors: Sequence[Tensor]) -> None:
    from torch.distributed.algorithms.model_averaging.utils import average_parameters

    with trainer.world.naming():
        average_parameters(iter(tensors), None)  # type: ignore[arg-type]


def round_steps(trainer: Trainer, done: float, each: float) -> int:
    """Returns the local steps until the weights are averaged: at the latest before an evaluation, a
    checkpoint and the end. `done` of the run is done, 0..1; a step is `each` of it."""
    plan, step = trainer.plan, trainer.progress.step
    every = [plan.options.sync_every, plan.eval_every, plan.options.checkpoint_every]
    steps = min(number - step % number for number in every if number is not None)
    if each > 0.0:
        steps = min(steps, max(1, math.ceil((1.0 - done) / each - 1e-6)))
    return steps
