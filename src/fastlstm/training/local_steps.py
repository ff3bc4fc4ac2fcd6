"""Local steps: every process trains on its own rows, and now and then all average their weights."""

from __future__ import annotations

import math
import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fastlstm.distributed.step_report import StepReport
from fastlstm.distributed.world import DEADLINE_S, Order
from fastlstm.errors import FastLSTMError
from fastlstm.training.guard import SKIPS_BEFORE_ROLLBACK
from fastlstm.training.recovery import handle_bad_round
from fastlstm.training.schedule import learning_rate_factor

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer

_PATIENCE = 4.0
"""Times the seconds of its own round, that a process waits for the others beside the deadline."""


class Round(NamedTuple):
    """What rank 0 plans before a round.

    Attributes:
        steps: until the weights are averaged.
        done: share of the run that is done before, 0..1.
        each: share of the run that a step is.
        lr_scale: of roll-backs.
    """

    steps: float
    done: float
    each: float
    lr_scale: float


@dataclass
class _Sums:
    """Sums over the steps of a round that a process has taken.

    Attributes:
        in_a_row: the most skipped steps in a row, with those of the round before.
    """

    loss: float = 0.0
    norm: float = 0.0
    targets: int = 0
    skipped: int = 0
    in_a_row: int = 0


class LocalSteps:
    """Takes the steps of several processes in rounds, within which no message travels.

    In a round each process takes `sync_every` optimizer steps on its own rows of every batch; a
    gradient is the mean over its own targets. Then all move to the mean of their weights, in which
    a process counts as much as the targets it has trained on::

        weights = before + sum(targets[r] * (weights[r] - before)) / sum(targets[r])

    Changes travel, so that `wire` of bf16 rounds only those. The optimizers, and the moving average
    of the weights, are each process's own until the state is saved: then they are averaged, too, in
    the run that goes on as in the checkpoint.

    Rank 0 decides at the end of a round only. A step whose loss or gradient is not finite is
    skipped by its process alone; the others learn of it at the end of the round.

    Args:
        trainer: whose plan has the processes; of one process, or where every step is summed, this
            does nothing.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._world = trainer, trainer.world
        self._in_a_row, self._is_settled = 0, True
        if not trainer.plan.is_local:
            return
        self._parameters = [p for p in trainer.model.parameters() if p.requires_grad]
        size = sum(p.numel() for p in self._parameters)
        self._flat = torch.zeros(size, device=trainer.plan.device)
        self._before = torch.zeros_like(self._flat)
        wire = torch.bfloat16 if trainer.plan.options.wire == "bf16" else torch.float32
        self._reduce = self._world.reduction(self._flat, wire)

    # a round ------------------------------------------------------------------------------------

    def take_round(self) -> None:
        """Has all processes take the steps of a round; in rank 0."""
        trainer, started = self._trainer, time.perf_counter()
        plan, before_s = self._planned(), trainer.progress.train_s
        first, units = trainer.progress.step, trainer.progress.tokens
        self._world.order(Order.ROUND, *plan)
        norm, report = self.run(plan)
        progress, seconds = trainer.progress, time.perf_counter() - started
        progress.train_s, progress.elapsed_s = before_s + seconds, trainer.elapsed_s()
        taken, loss = progress.step - first, report.loss / max(report.num_targets, 1.0)
        if report.num_targets:
            for _ in range(taken):
                each = (progress.tokens - units) // taken
                trainer.meter.add_step(loss, norm, each, seconds / taken)
            trainer.tell_of_steps(self._factor(plan, taken - 1), taken)
        handle_bad_round(trainer, report)

    def _planned(self) -> Round:
        """Returns a round that ends where the next evaluation, checkpoint or the end is due."""
        trainer, plan, step = self._trainer, self._trainer.plan, self._trainer.progress.step
        options, steps = plan.options, plan.options.sync_every
        done = trainer.done()
        each = trainer.done(later=1) - done
        for every in (plan.eval_every, options.checkpoint_every):
            if every is not None:
                steps = min(steps, every - step % every)
        if each > 0.0:
            steps = min(steps, max(1, math.ceil((1.0 - done) / each - 1e-6)))
        if plan.stop_criterion.budget_s is not None and not trainer.meter.seconds_per_step:
            steps = 1  # nobody knows yet how long one takes
        return Round(steps, done, each, trainer.progress.lr_scale)

    def _factor(self, plan: Round, number: int) -> float:
        """Returns the share of the peak learning rate of a step of a round."""
        options, done = self._trainer.plan.options, min(plan.done + number * plan.each, 1.0)
        return plan.lr_scale * learning_rate_factor(done, options.warmup, options.cooldown)

    def run(self, plan: Round) -> tuple[float, StepReport]:
        """Takes the steps of a round, and averages the weights of all processes.

        Returns:
            The mean gradient norm of this process, and what all have told.
        """
        started = time.perf_counter()
        self._note_weights(self._before)
        report = self._world.report(self._world.size)
        own, failure = _Sums(), None
        try:
            for number in range(int(plan.steps)):
                self._step(self._factor(plan, number), own)
        except FastLSTMError as error:  # rank 0 can tell the others only after the round
            failure = error
        seconds = time.perf_counter() - started
        if not self._take_changes(own.targets):
            own = _Sums(skipped=max(own.skipped, 1), in_a_row=SKIPS_BEFORE_ROLLBACK)
        rank, check = report.rank, zlib.crc32(self._before.cpu().numpy().tobytes())
        report.set_own(own.targets, seconds / plan.steps, check)
        report.losses[rank], report.skipped[rank] = own.loss, own.skipped
        report.in_a_row[rank] = own.in_a_row
        self._reduce(report.numbers, DEADLINE_S + _PATIENCE * seconds)
        self._world.received(report)
        self._set_weights(report.num_targets)
        self._is_settled = False
        if report.in_a_row.max() >= SKIPS_BEFORE_ROLLBACK:
            self._in_a_row = 0  # all go back
        if failure is not None:
            raise failure
        return own.norm / plan.steps, report

    def _step(self, factor: float, sums: _Sums) -> None:
        """Takes a step on the own rows; one that is not finite is skipped, and the state reset."""
        trainer, began = self._trainer, time.perf_counter()
        batch = trainer.task.loader.next()
        loss, norm = trainer.step(batch, factor)
        if math.isfinite(loss) and math.isfinite(norm):
            targets = trainer.task.num_targets(batch)
            sums.targets, sums.loss = sums.targets + targets, sums.loss + loss * targets
            sums.norm, self._in_a_row = sums.norm + norm, 0
        else:
            trainer.optimizers.zero_grad()
            trainer.reset_carried()
            sums.skipped, self._in_a_row = sums.skipped + 1, self._in_a_row + 1
            sums.in_a_row = max(sums.in_a_row, self._in_a_row)
        trainer.count_step(batch, time.perf_counter() - began)

    # weights ------------------------------------------------------------------------------------

    def _views(self, flat: Tensor) -> list[Tensor]:
        pieces = flat.split([p.numel() for p in self._parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, self._parameters, strict=True)]

    def _note_weights(self, flat: Tensor) -> None:
        torch._foreach_copy_(self._views(flat), [p.detach() for p in self._parameters])

    def _take_changes(self, targets: int) -> bool:
        """Takes the changes of the round, times the targets; returns False where one is not finite,
        and then takes none."""
        self._note_weights(self._flat)
        self._flat.sub_(self._before)
        is_finite = bool(self._flat.isfinite().all())
        if is_finite:
            self._flat.mul_(targets)
        else:
            self._flat.zero_()
        return is_finite

    @torch.no_grad()
    def _set_weights(self, num_targets: float) -> None:
        """Moves to the mean, of the changes that all have added."""
        self._flat.div_(max(num_targets, 1.0)).add_(self._before)
        for parameter, view in zip(self._parameters, self._views(self._flat), strict=True):
            parameter.copy_(view)

    # the rest of the state ----------------------------------------------------------------------

    def settle(self) -> None:
        """Has all processes average what else differs since the last round; in rank 0."""
        if not self._is_settled:
            self._world.order(Order.SETTLE)
            self.average_state()

    def average_state(self) -> None:
        """Averages the states of the optimizers and the moving averages of all processes."""
        state, device = self._trainer.state, self._flat.device
        own = {f"optimizer {name}": t for name, t in state.optimizers.tensors().items()}
        shapes = {f"optimizer {name}": s for name, s in state.optimizers.shapes().items()}
        updates = 0
        if state.average is not None:
            moving, updates = state.average.tensors(), state.average.updates
            own |= {f"average {name}": tensor for name, tensor in moving.items()}
            shapes |= {f"average {name}": tensor.shape for name, tensor in moving.items()}
        # A process that has skipped its first steps has no state of the optimizer yet.
        pieces = [own[n] if n in own else torch.zeros(s) for n, s in shapes.items()]
        flat = torch.cat([piece.detach().flatten().float().to(device) for piece in pieces])
        numbers = [float(name in own) for name in shapes]
        about = torch.tensor([*numbers, updates / self._world.size], dtype=torch.float64)
        self._world.reduction(flat)(about)
        *holders, updates = about.tolist()
        found = dict[str, dict[str, Tensor]]({"optimizer": {}, "average": {}})
        parts = flat.split([shape.numel() for shape in shapes.values()])
        for (name, shape), part, num in zip(shapes.items(), parts, holders, strict=True):
            if num:
                kind, _, key = name.partition(" ")
                found[kind][key] = (part / num).view(shape)
        state.optimizers.load(found["optimizer"])
        if state.average is not None:
            state.average.load(found["average"], round(updates))
        self._is_settled = True
