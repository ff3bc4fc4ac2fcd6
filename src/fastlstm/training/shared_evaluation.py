"""An evaluation whose blocks the processes of a run share."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from fastlstm.distributed.world import DEADLINE_S, Order
from fastlstm.training.task import Score, Watch

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer

_PATIENCE = 4
"""Rank 0 waits for the others this many times as long as its own blocks took, and the deadline."""


def evaluate(
    trainer: Trainer, limit: int, stop: Callable[[], bool] | None, watch: Watch | None
) -> Score:
    """Scores the validation part; in rank 0. The others compute their blocks (`evaluate_own`).

    A pipeline's processes have not all weights: rank 0 has them all, and evaluates alone.

    Raises:
        Stopped: `stop` returned True.
    """
    task, world, started = trainer.task, trainer.world, time.perf_counter()
    num, is_shared = task.num_blocks(limit), task.pipeline is None and trainer.world.size > 1
    if not is_shared:
        sums = task.evaluate_blocks(limit, range(num), stop, watch)
        return task.score(limit, sums, time.perf_counter() - started)
    world.order(Order.EVALUATE, limit)
    failure, own = None, torch.empty(0)
    of_all = None if watch is None else lambda done, own: watch(done * limit // own, limit)
    try:
        own = task.evaluate_blocks(limit, _blocks(num, 0, world.size), stop, of_all)
    except Exception as error:  # the others wait until their results are taken
        failure = error
    deadline_s = DEADLINE_S + _PATIENCE * (time.perf_counter() - started)
    others = [
        torch.empty(len(_blocks(num, rank, world.size)), task.num_sums, dtype=torch.float64)
        for rank in range(1, world.size)
    ]
    world.collect(others, deadline_s)
    if failure is not None:
        raise failure
    return task.score(limit, torch.cat([own, *others]), time.perf_counter() - started)


def evaluate_own(trainer: Trainer, limit: int) -> None:
    """Scores the blocks of this process, with averaged weights where there are any."""
    task, world = trainer.task, trainer.world
    blocks = _blocks(task.num_blocks(limit), world.rank, world.size)
    own = torch.empty(0, task.num_sums, dtype=torch.float64)
    if blocks:
        with weights_to_evaluate(trainer):
            own = task.evaluate_blocks(limit, blocks, None, None)
    world.give(own)


def weights_to_evaluate(trainer: Trainer) -> AbstractContextManager[None]:
    """Has the model hold the moving averages of its weights, where there are any, in the block."""
    average = trainer.state.average
    return average.applied() if average is not None else nullcontext()


def _blocks(num: int, rank: int, size: int) -> range:
    """Returns the blocks of a rank; of fewer blocks than ranks the first have one each."""
    first, end = (-(-num * n // size) for n in (rank, rank + 1))
    return range(first, end)
