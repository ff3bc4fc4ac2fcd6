"""Evaluations whose blocks the processes of a run share, as threads of one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastlstm.distributed.world import DEADLINE_S
from fastlstm.errors import ConfigError, Stopped
from fastlstm.training.callbacks import Callback, CallbackList
from fastlstm.training.shared_evaluation import evaluate, evaluate_own
from linear_task import LinearTask, trainer_of
from thread_world import Hub, ThreadWorld, in_threads

ROWS, UNIT_S = 16, 10.0


class Blocks(LinearTask):
    """Notes which blocks it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = list[int]()

    def evaluate_blocks(self, limit: int, blocks: range, *given: Any) -> torch.Tensor:
        self.asked += blocks
        sums = super().evaluate_blocks(limit, range(4), *given)
        return sums[blocks.start : blocks.stop]


class Failing(Blocks):
    def evaluate_blocks(self, *_: Any) -> torch.Tensor:
        raise Stopped("stopped while evaluating")


class Polling(Blocks):
    """Looks for a stop before every block."""

    def evaluate_blocks(self, limit: int, blocks: range, stop: Any, watch: Any) -> torch.Tensor:
        if stop is not None and stop():
            raise Stopped("stopped while evaluating")
        return super().evaluate_blocks(limit, blocks, stop, watch)


class Waiting(ThreadWorld):
    """Notes how long rank 0 would wait for the others."""

    def expect(self, parts: list[torch.Tensor]) -> Callable[[float], None]:
        collect = super().expect(parts)

        def noted(deadline_s: float) -> None:
            self.waits_s = deadline_s
            collect(deadline_s)

        return noted


def evaluated(
    tasks: list[LinearTask],
    average: Any = None,
    signals: Sequence[int] = (0,) * 6,
    worlds: list[Waiting] | None = None,
) -> float:
    """Returns the loss that rank 0 has when as many ranks as there are tasks evaluate.

    Args:
        tasks: by rank.
        average: of the weights.
        signals: that each rank has got.
        worlds: gets those of the ranks.
    """
    hub, losses = Hub(len(tasks)), list[float]()
    worlds = [] if worlds is None else worlds
    worlds += [Waiting(rank, hub) for rank in range(len(tasks))]
    trainers: list[Any] = [
        SimpleNamespace(
            task=task,
            world=world,
            state=SimpleNamespace(average=average),
            meter=SimpleNamespace(unit_s=UNIT_S),
        )
        for task, world in zip(tasks, worlds, strict=True)
    ]
    for world, number in zip(worlds, signals, strict=False):
        world.signal = number

    def lead() -> None:
        losses.append(evaluate(trainers[0], ROWS, None, None).loss)

    def obey(trainer: Any) -> None:
        trainer.world.next_order()
        evaluate_own(trainer, ROWS)

    in_threads([lead, *(partial(obey, trainer) for trainer in trainers[1:])], hub)
    return losses[0]


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_each_block_is_computed_once_and_the_loss_is_that_of_one_process(size: int) -> None:
    alone, tasks = Blocks(), [Blocks() for _ in range(size)]
    for task in (alone, *tasks):
        task.num_blocks = lambda limit: 4  # type: ignore[method-assign]
    assert evaluated(list(tasks)) == evaluated([alone])
    assert [number for task in tasks for number in task.asked] == [0, 1, 2, 3]


def test_a_stop_in_rank_0_takes_what_the_others_send() -> None:
    other = Blocks()
    with pytest.raises(Stopped):
        evaluated([Failing(), other])
    assert other.asked, "no rank is left waiting"


def test_after_a_stop_in_rank_0_the_others_have_the_time_of_an_evaluation() -> None:
    worlds = list[Waiting]()
    with pytest.raises(Stopped):
        evaluated([Failing(), Blocks()], worlds=worlds)
    assert worlds[0].waits_s >= DEADLINE_S + 4 * ROWS * UNIT_S


def test_a_signal_to_another_rank_ends_its_part_and_stops_the_run() -> None:
    leader, other, worlds = Blocks(), Polling(), list[Waiting]()
    with pytest.raises(Stopped):
        evaluated([leader, other], signals=(0, signal.SIGTERM), worlds=worlds)
    assert not other.asked
    assert worlds[0].stopped_by == "SIGTERM to rank 1 (thread 1)"


def test_every_rank_evaluates_the_averaged_weights() -> None:
    entered = []

    class Average:
        def applied(self) -> Any:
            entered.append(self)
            return torch.no_grad()

    evaluated([Blocks(), Blocks()], Average())
    assert len(entered) == 1, "of rank 0 the trainer does it"


def test_a_callback_with_weights_of_its_own_is_refused_in_several_processes() -> None:
    class Own(Callback):
        def weights_in_use(self, trainer: Any) -> Any:
            return torch.no_grad()

    several: Any = SimpleNamespace(world=ThreadWorld(0, Hub(2)))
    with pytest.raises(ConfigError, match=r"^Own has weights_in_use, .* in one process$"):
        CallbackList(several, [Callback(), Own()])


def test_an_evaluation_without_memory_for_all_blocks_runs_in_halves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    task, whole = LinearTask(), LinearTask()
    want = evaluate(trainer_of(whole), whole.num_valid, None, None)
    all_blocks, asked = task.evaluate_blocks, list[range]()

    def small(limit: int, blocks: range, *rest: Any) -> torch.Tensor:
        asked.append(blocks)
        if len(blocks) > most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return all_blocks(limit, blocks, *rest)

    monkeypatch.setattr(task, "evaluate_blocks", small)
    most = 1
    assert evaluate(trainer_of(task), task.num_valid, None, None).loss == want.loss
    assert max(map(len, asked)) == 4
    assert [n for blocks in asked if len(blocks) == 1 for n in blocks] == [0, 1, 2, 3]
    most = 0
    with pytest.raises(torch.cuda.OutOfMemoryError):
        evaluate(trainer_of(task), task.num_valid, None, None)
