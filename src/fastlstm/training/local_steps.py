"""Local steps: every process trains on its own rows, and now and then all move to their mean."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fastlstm.distributed.step_report import StepReport
from fastlstm.distributed.world import DEADLINE_S, Order
from fastlstm.errors import FastLSTMError
from fastlstm.training.guard import SKIPS_BEFORE_ROLLBACK
from fastlstm.training.optimizer_mean import OptimizerMean
from fastlstm.training.options import OVERLAP
from fastlstm.training.recovery import handle_bad_round
from fastlstm.training.schedule import learning_rate_factor
from fastlstm.training.weight_mean import WeightMean

if TYPE_CHECKING:
    from fastlstm.training.plan import TrainingPlan
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
        seconds: that they took.
    """

    loss: float = 0.0
    norm: float = 0.0
    targets: int = 0
    updates: int = 0
    skipped: int = 0
    in_a_row: int = 0
    seconds: float = 0.0


def cut_rounds(plan: TrainingPlan) -> list[str]:
    """Returns a note about evaluations and checkpoints that fall within rounds, if they do."""
    options, rounds = plan.options, plan.options.sync_every
    every = {"eval_every": plan.eval_every, "checkpoint_every": options.checkpoint_every}
    cut = [f"`{name}={n}`" for name, n in every.items() if n is not None and n % rounds]
    if not plan.is_local or not cut:
        return []
    verb = "is no multiple" if len(cut) == 1 else "are no multiples"
    return [
        f"{' and '.join(cut)} {verb} of `sync_every={rounds}`: rounds end early there, which"
        f" changes the weights; give multiples of {rounds} to avoid it"
    ]


class LocalSteps:
    """Takes the steps of several processes in rounds, within which none waits for another.

    In a round each process takes `sync_every` optimizer steps on its own rows of every batch; a
    gradient is the mean over its own targets. Then all move to the mean of their weights
    (`WeightMean`). What optimizers keep is averaged in the background of the next steps
    (`OptimizerMean`), so at the end of a round it is each process's own, as is the carried state
    of its rows; a checkpoint has those of all.

    Rank 0 decides at the end of a round only. A step whose loss or gradient is not finite is
    skipped by its process alone; the others learn of it at the end of the round.

    Args:
        trainer: whose plan has the processes; of one process, or where every step is summed, this
            does nothing.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._world = trainer, trainer.world
        self._in_a_row = 0
        if trainer.plan.is_local:
            self._mean, self._optimizers = WeightMean(trainer), OptimizerMean(trainer)

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
        """Takes the steps of a round, and moves to the mean of all processes.

        Returns:
            The mean gradient norm of this process, and what all have told.
        """
        started = time.perf_counter()
        self._mean.begin()
        report = self._world.report(self._world.size)
        self._optimizers.begin()
        own, failure = _Sums(), None
        due = math.ceil(plan.steps / OVERLAP)
        for number in range(1, int(plan.steps) + 1):
            try:
                if failure is None:
                    self._step(self._factor(plan, number - 1), own)
            except FastLSTMError as error:  # rank 0 can tell the others only after the round
                failure = error
            if number == due:
                self._optimizers.finish(own.updates)
        seconds = own.seconds
        if not self._mean.take(own.targets):
            own = _Sums(skipped=max(own.skipped, 1), in_a_row=SKIPS_BEFORE_ROLLBACK)
        rank = report.rank
        check, signal = self._mean.checksum(), self._world.signal
        report.set_own(own.targets, seconds / plan.steps, check, signal)
        report.losses[rank], report.skipped[rank] = own.loss, own.skipped
        report.in_a_row[rank] = own.in_a_row
        waited_s = time.perf_counter() - started
        self._mean.move(report, DEADLINE_S + _PATIENCE * waited_s)
        self._world.received(report)
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
            sums.updates += 1
        else:
            trainer.optimizers.zero_grad()
            trainer.reset_carried()
            sums.skipped, self._in_a_row = sums.skipped + 1, self._in_a_row + 1
            sums.in_a_row = max(sums.in_a_row, self._in_a_row)
        seconds = time.perf_counter() - began
        sums.seconds += seconds
        trainer.count_step(batch, seconds)
