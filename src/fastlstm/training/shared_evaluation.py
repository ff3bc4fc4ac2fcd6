"""An evaluation whose blocks the processes of a run share."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastlstm.distributed.world import DEADLINE_S, Order
from fastlstm.errors import Stopped
from fastlstm.training.task import Score, Task, Watch

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
        Stopped: `stop` returned True, or another process has got a signal.
    """
    task, world, started = trainer.task, trainer.world, time.perf_counter()
    num, is_shared = task.num_blocks(limit), task.pipeline is None and trainer.world.size > 1
    if not is_shared:
        sums = _sums(task, limit, range(num), stop, watch)
        return task.score(limit, sums, time.perf_counter() - started)
    world.order(Order.EVALUATE, limit)
    others = [_message(task, num, rank, world.size) for rank in range(1, world.size)]
    collect = world.expect(others)
    failure, own = None, torch.empty(0)
    of_all = None if watch is None else lambda done, own: watch(done * limit // own, limit)
    try:
        own = _sums(task, limit, _blocks(num, 0, world.size), stop, of_all)
    except Exception as error:  # the others wait until their results are taken
        failure = error
    # After a stop, as long as an evaluation takes: not all may have got the signal.
    seconds = max(time.perf_counter() - started, limit * trainer.meter.unit_s)
    collect(DEADLINE_S + _PATIENCE * seconds)
    world.heard([0.0, *(float(part[-1, 0]) for part in others)])
    if failure is not None:
        raise failure
    if world.stopped_by:
        raise Stopped("stopped while evaluating")
    sums = torch.cat([own, *(part[:-1] for part in others)])
    return task.score(limit, sums, time.perf_counter() - started)


def evaluate_own(trainer: Trainer, limit: int) -> None:
    """Scores the blocks of this process, with averaged weights where there are any; a signal ends
    that, and rank 0 hears of it."""
    task, world = trainer.task, trainer.world
    num = task.num_blocks(limit)
    told = _message(task, num, world.rank, world.size)
    if blocks := _blocks(num, world.rank, world.size):
        with weights_to_evaluate(trainer), suppress(Stopped):
            told[:-1] = _sums(task, limit, blocks, lambda: world.signal > 0, None)
    told[-1] = world.signal
    world.give(told)


def _sums(
    task: Task,
    limit: int,
    blocks: range,
    stop: Callable[[], bool] | None,
    watch: Watch | None,
) -> Tensor:
    """Returns `Task.evaluate_blocks`, in halves where a GPU has too little memory for all at once:
    each block has the same bits whichever others are computed with it."""
    try:
        return task.evaluate_blocks(limit, blocks, stop, watch)
    except torch.cuda.OutOfMemoryError:
        if len(blocks) < 2:
            raise
    torch.cuda.empty_cache()
    middle = len(blocks) // 2
    halves = blocks[:middle], blocks[middle:]
    return torch.cat([_sums(task, limit, half, stop, None) for half in halves])


def _message(task: Task, num: int, rank: int, size: int) -> Tensor:
    """Returns a tensor for the sums of the blocks of a rank; its last row is for the number of the
    signal that the rank has got, 0 without one."""
    return torch.zeros(len(_blocks(num, rank, size)) + 1, task.num_sums, dtype=torch.float64)


def weights_to_evaluate(trainer: Trainer) -> AbstractContextManager[None]:
    """Has the model hold the moving averages of its weights, where there are any, in the block."""
    average = trainer.state.average
    return average.applied() if average is not None else nullcontext()


def _blocks(num: int, rank: int, size: int) -> range:
    """Returns the blocks of a rank; of fewer blocks than ranks the first have one each."""
    first, end = (-(-num * n // size) for n in (rank, rank + 1))
    return range(first, end)
