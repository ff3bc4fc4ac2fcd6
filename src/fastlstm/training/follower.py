"""A process that trains along with rank 0: it does what it is told, and decides nothing."""

from __future__ import annotations

import math
import time
from contextlib import closing
from typing import Any, NamedTuple

import torch

from fastlstm.distributed.shards import Shards
from fastlstm.distributed.world import Order, World
from fastlstm.training.best_weights import COUNTERS
from fastlstm.training.best_weights import STEM as BEST
from fastlstm.training.device import set_up_device
from fastlstm.training.local_steps import Round
from fastlstm.training.options import TrainingOptions
from fastlstm.training.plan import TrainingPlan
from fastlstm.training.precision import allow_tf32
from fastlstm.training.saver import own_rows, restore_own
from fastlstm.training.schedule import StopCriterion
from fastlstm.training.shared_evaluation import evaluate_own
from fastlstm.training.task import Task
from fastlstm.training.trainer import Trainer


def follow(task: Task, options: TrainingOptions, own: Part) -> Any:
    """Trains along until rank 0 ends the run; returns what it shares at the end.

    Args:
        task: as rank 0's, with the rows of this process.
        options: as rank 0 has resolved them.
        own: of `set_up`.
    """
    criterion = StopCriterion.of(options, task.loader.steps_per_epoch)
    plan = TrainingPlan(options, criterion, own.device, world=own.world, shards=own.shards)
    trainer = Trainer(task, plan, lambda event: None)  # rank 0 shows what happens
    with closing(task.loader), trainer.rescue.writing():
        while (order := own.world.next_order())[0] != Order.END:
            _obey(trainer, *order)
    return own.world.shared()


class Part(NamedTuple):
    """What a process has of a run: the device, the world and its shards of every batch."""

    device: torch.device
    world: World
    shards: Shards


def set_up(options: TrainingOptions, world: World) -> Part:
    """Sets threads and precision as rank 0 has chosen them."""
    torch.set_num_threads(options.threads or world.default_threads())
    allow_tf32(options.precision)
    shards = Shards()
    if options.divides_batch:
        shards = Shards(options.shards or 1, world.rank, world.size)
    return Part(set_up_device(options), world, shards)


def _obey(trainer: Trainer, order: Order, numbers: list[float]) -> None:
    match order:
        case Order.STEP:
            _step(trainer, numbers[0])
        case Order.CAPTURE:
            trainer.world.gathered(trainer.saver.own_part())
        case Order.RESTORE:
            _restore(trainer)
        case Order.GATHER:
            trainer.stepper.gather()
        case Order.RESET:
            trainer.reset_carried()
        case Order.NOTE:
            trainer.rescue.take_note()
        case Order.EVALUATE:
            evaluate_own(trainer, int(numbers[0]))
        case Order.ROUND:
            trainer.local.run(Round(*numbers))
        case _:
            raise AssertionError(f"rank 0 says {order.name} while it trains")


def _step(trainer: Trainer, factor: float) -> None:
    started, batch = time.perf_counter(), trainer.task.loader.next()
    loss, norm = trainer.step(batch, factor)
    if math.isfinite(loss) and math.isfinite(norm):
        trainer.count_step(batch, time.perf_counter() - started)
    else:
        trainer.optimizers.zero_grad()


def _restore(trainer: Trainer) -> None:
    tensors, meta, is_roll_back = trainer.world.shared()
    best = {name: getattr(trainer.progress, name) for name in COUNTERS}
    restore_own(trainer, tensors, meta)
    trainer.task.restore_carried(own_rows(trainer, tensors.get("carried", {})))
    if is_roll_back:
        for name, value in best.items():
            setattr(trainer.progress, name, value)
    else:
        trainer.best.restore(tensors.get(BEST, {}), int(meta.get("published_step", -1)))
    trainer.rescue.forget()
