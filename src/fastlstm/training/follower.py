"""A process that trains along with rank 0: it does what it is told, and decides nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from fastlstm.distributed.world import Order
from fastlstm.training.device import set_up_device
from fastlstm.training.precision import allow_tf32
from fastlstm.training.saver import own_rows

if TYPE_CHECKING:
    from fastlstm.distributed.world import World
    from fastlstm.runs.events import Event
    from fastlstm.training.options import TrainingOptions
    from fastlstm.training.trainer import Trainer


def follow(trainer: Trainer) -> None:
    """Trains until rank 0 ends the training.

    Args:
        trainer: of the same task and plan as rank 0's, with the rows of this process. It has no
            callbacks, shows nothing and writes nothing.
    """
    world, task = trainer.world, trainer.task
    try:
        while True:
            order, factor = world.next_order()
            match order:
                case Order.STEP:
                    _step(trainer, factor)
                case Order.CAPTURE:
                    world.gathered(task.carried())
                case Order.RESTORE:
                    _restore(trainer)
                case Order.RESET:
                    task.reset_state()
                case Order.END:
                    return
    finally:
        task.loader.close()


def set_up(options: TrainingOptions, world: World) -> torch.device:
    """Sets threads and precision as rank 0 has chosen them; returns the device."""
    torch.set_num_threads(options.threads or world.default_threads())
    allow_tf32(options.precision)
    return set_up_device(options)


def silent(event: Event) -> None:
    """Does nothing: rank 0 shows what happens."""


def _step(trainer: Trainer, factor: float) -> None:
    loss, norm = trainer.step(trainer.task.loader.next(), factor)
    if math.isfinite(loss) and math.isfinite(norm):
        trainer.progress.step += 1
    else:
        trainer.optimizers.zero_grad()


def _restore(trainer: Trainer) -> None:
    tensors, meta = trainer.world.shared()
    trainer.task.loader.load_state_dict(trainer.state.restore(tensors, meta))
    trainer.task.restore_carried(own_rows(trainer, tensors.get("carried", {})))
