"""An evaluation whose blocks the processes of a run share."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastlstm.errors import Stopped
from fastlstm.training.task import Score, Task, Watch

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer


def evaluate(
    trainer: Trainer, limit: int, stop: Callable[[], bool] | None, watch: Watch | None
) -> Score:
    """Scores the validation part; each process computes some of the blocks, and has the result.

    Raises:
        Stopped: `stop` returned True, in one of the processes.
    """
    task, world, started = trainer.task, trainer.world, time.perf_counter()
    num = task.num_blocks(limit)
    if world.size == 1:
        sums = _sums(task, limit, range(num), stop, watch)
        return task.score(limit, sums, time.perf_counter() - started)
    own = range(num)[world.share.rows(num)]
    sums = torch.zeros(num + 1, task.num_sums, dtype=torch.float64)
    of_all = None if watch is None else lambda done, part: watch(done * limit // part, limit)
    try:
        if own:
            sums[own.start : own.stop] = _sums(task, limit, own, stop, of_all)
    except Stopped:
        sums[num] = 1.0  # the others hear of it
    if float(world.summed(sums)[num, 0]):
        raise Stopped("stopped while evaluating")
    return task.score(limit, sums[:num], time.perf_counter() - started)


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


def weights_to_evaluate(trainer: Trainer) -> AbstractContextManager[None]:
    """Has the model hold the moving averages of its weights, where there are any, in the block."""
    average = trainer.state.average
    return average.applied() if average is not None else nullcontext()
