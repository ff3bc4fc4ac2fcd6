"""Evaluations whose blocks the processes of a run share."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastlstm.distributed.world import World
from fastlstm.errors import ConfigError, Stopped
from fastlstm.training.callbacks import Callback, CallbackList
from linear_task import LinearTask, trainer_of

ROWS = 16


class Blocks(LinearTask):
    """Notes which blocks it was asked for; polls for a stop before them."""

    def __init__(self):
        super().__init__()
        self.asked = list[int]()

    def num_blocks(self, limit):
        return 4

    def evaluate_blocks(self, limit, blocks, stop, watch):
        if stop is not None and stop():
            raise Stopped("stopped while evaluating")
        self.asked += blocks
        return super().evaluate_blocks(limit, range(4), stop, watch)[blocks.start : blocks.stop]


class Waiting(World):
    """A rank that is told the sums of the others instead of waiting for them."""

    def __init__(self, rank, size, others=None):
        super().__init__(rank, size)
        self.own, self._others = torch.zeros(0), others

    def summed(self, numbers):
        self.own = numbers.clone()
        return numbers if self._others is None else numbers.add_(self._others)


def evaluated(task, world, stop=None):
    trainer = trainer_of(task)
    trainer.world, trainer.stop = world, stop
    return trainer.score(ROWS).loss


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_each_block_is_computed_once_and_the_loss_is_that_of_one_process(size):
    alone = evaluated(Blocks(), World())
    asked, worlds = list[int](), [Waiting(rank, size) for rank in range(size)]
    for world in worlds:
        task = Blocks()
        evaluated(task, world)
        asked += task.asked
    assert asked == [0, 1, 2, 3]
    others = torch.stack([world.own for world in worlds[1:]]).sum(0)
    assert evaluated(Blocks(), Waiting(0, size, others)) == alone


def test_a_stop_of_one_rank_stops_all():
    stopping = Waiting(1, 2)
    with pytest.raises(Stopped):
        evaluated(Blocks(), stopping, lambda: True)
    with pytest.raises(Stopped):
        evaluated(Blocks(), Waiting(0, 2, stopping.own))


def test_a_callback_with_weights_in_use_is_refused_in_several_processes():
    class Own(Callback):
        def weights_in_use(self, trainer):
            return torch.no_grad()

    several: Any = SimpleNamespace(world=World(0, 2))
    with pytest.raises(ConfigError, match=r"^Own has weights_in_use, .* in one process$"):
        CallbackList(several, [Callback(), Own()])


def test_an_evaluation_without_memory_for_all_blocks_runs_in_halves(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    task, whole = LinearTask(), LinearTask()
    want = trainer_of(whole).score(whole.num_valid)
    all_blocks, asked = task.evaluate_blocks, list[range]()

    def small(limit, blocks, *rest):
        asked.append(blocks)
        if len(blocks) > most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return all_blocks(limit, blocks, *rest)

    monkeypatch.setattr(task, "evaluate_blocks", small)
    most = 1
    assert trainer_of(task).score(task.num_valid).loss == want.loss
    assert max(map(len, asked)) == 4
    assert [n for blocks in asked if len(blocks) == 1 for n in blocks] == [0, 1, 2, 3]
    most = 0
    with pytest.raises(torch.cuda.OutOfMemoryError):
        trainer_of(task).score(task.num_valid)
