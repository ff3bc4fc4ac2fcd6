"""Steps that are timed after a pause wait for their batches as those of a run do."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from torch import Tensor

from fastlstm.system.prefetch import Prefetcher
from fastlstm.training import step_time
from fastlstm.training.step_time import settled, use_up_batches
from fastlstm.tuning.step_server import _timed_steps
from fastlstm.tuning.variants import EXACT, Variant, steps_of
from linear_task import LinearTask, RowLoader, trainer_of

BATCH_S = 0.05
"""Far more than a step of the linear task takes, even on a busy machine."""


class SlowRows:
    """Makes a batch in 50 ms."""

    def __init__(self) -> None:
        self._rows = RowLoader()

    def __next__(self) -> Tensor:
        time.sleep(BATCH_S)
        return self._rows.next()

    def state_dict(self) -> dict[str, int]:
        return self._rows.state_dict()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """All five batches are taken, however busy the machine is."""
    monkeypatch.setattr(step_time, "_WAITED_S", math.inf)


def slow_task() -> Any:
    """A task whose loader is a prefetcher with batches made ahead."""
    task: Any = LinearTask()
    task.loader = Prefetcher(SlowRows())
    task.loader.steps_per_epoch = 5
    time.sleep(8 * BATCH_S)  # as while another worker has its turn
    return task


def test_steps_after_a_pause_find_no_batches_made_ahead() -> None:
    task = slow_task()
    trainer = trainer_of(task)
    with task.loader:
        assert min(_timed_steps(trainer, 3)["seconds"]) > BATCH_S / 2


def test_a_turn_of_a_variant_waits_for_the_loader() -> None:
    task = slow_task()
    variant = Variant("", EXACT, {}, trainer_of(task), 1, steps_of(trainer_of(task)), step_s=0.01)
    with task.loader:
        assert variant.turn(0.03) * task.step_units > BATCH_S / 2


def test_a_loader_that_never_waits_gives_a_few_batches() -> None:
    task = LinearTask()
    use_up_batches(task.loader)
    assert task.loader.at == 5


@pytest.mark.parametrize(("steps", "first"), [(1, 0), (2, 0), (3, 1), (8, 2), (20, 5)])
def test_the_first_quarter_of_a_turn_settles(steps, first):
    assert settled(range(steps)) == range(first, steps)
