"""Steps that are timed after a pause wait for their batches as those of a run do."""

import math
import time
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from fastlstm.system.prefetch import Prefetcher
from fastlstm.training import step_time
from fastlstm.training.step_time import fastest_step_s, steps_in_turn_s, use_up_batches
from fastlstm.tuning.variants import EXACT, Variant, steps_of
from linear_task import LinearTask, RowLoader, trainer_of

BATCH_S = 0.05
"""Far more than a step of the linear task takes, even on a busy machine."""


class SlowRows:
    """Makes a batch in 50 ms."""

    def __init__(self):
        self._rows = RowLoader()

    def __next__(self):
        time.sleep(BATCH_S)
        return self._rows.next()

    def state_dict(self):
        return self._rows.state_dict()


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """All five batches are taken, however busy the machine is."""
    monkeypatch.setattr(step_time, "_WAITED_S", math.inf)


def slow_task():
    """A task whose loader is a prefetcher with batches made ahead."""
    task: Any = LinearTask()
    task.loader = Prefetcher(SlowRows())
    task.loader.steps_per_epoch = 5
    time.sleep(8 * BATCH_S)  # as while another worker has its turn
    return task


def test_a_turn_of_a_variant_waits_for_the_loader():
    task = slow_task()
    variant = Variant("", EXACT, {}, trainer_of(task), 1, steps_of(trainer_of(task)))
    with closing(task.loader):
        assert variant.turn(0.03) * task.step_units > BATCH_S / 2


def test_a_loader_that_never_waits_gives_a_few_batches():
    task = LinearTask()
    use_up_batches(task.loader)
    assert task.loader.at == 5


def test_steps_of_a_gpu_are_timed_as_a_run_takes_them(monkeypatch):
    """One is launched while the one before runs; all are waited for within the time."""
    task = LinearTask()
    trainer = trainer_of(task)
    calls, waiting = list[str](), list[int]()

    def launch(batch, factor, after_bad):
        assert factor == after_bad == 0.0
        calls.append("launch")
        waiting.append(1)
        return True

    def result():
        if waiting:
            calls.append("result")
        return waiting.pop() if waiting else None

    monkeypatch.setattr(trainer.stepper, "launch", launch)
    monkeypatch.setattr(trainer.stepper, "result", result)
    assert steps_in_turn_s(trainer, 3) > 0.0
    assert calls == ["launch", "launch", "result", "launch", "result", "result"]


def test_turns_of_a_gpu_give_the_seconds_of_a_step(monkeypatch):
    trainer = trainer_of(LinearTask())
    trainer.plan = replace(trainer.plan, device=torch.device("cuda"))
    monkeypatch.setattr(step_time, "steps_in_turn_s", lambda _, num: 0.002 * num)
    monkeypatch.setattr(trainer, "step", lambda *_: (0.0, 0.0))
    assert fastest_step_s(trainer) == pytest.approx(0.002)
    assert trainer.task.loader.is_closed  # type: ignore[attr-defined]


def test_steps_that_are_no_graph_are_timed_one_by_one():
    task = LinearTask()
    trainer = trainer_of(task)
    before = task.weight.detach().clone()
    assert steps_in_turn_s(trainer, 3) > 0.0
    assert torch.equal(task.weight, before)  # at a learning rate of 0
    assert task.loader.at == 3


def test_other_processes_do_not_lengthen_a_timed_step(monkeypatch):
    """Beside two busy ones a first step took a second, so a budget chose 64 units not 256."""
    trainer = trainer_of(LinearTask())
    steps = iter([(0.985, 0.061), (0.15, 0.02), (0.24, 0.022)])  # wall clock, this thread
    monkeypatch.setattr(step_time, "_seconds", lambda call: (call(), next(steps))[1])
    monkeypatch.setattr(step_time, "TIMED_S", 0.0)
    slowdowns = list[float]()
    assert fastest_step_s(trainer, slowdowns) == 0.02
    assert slowdowns == pytest.approx([0.985 / 0.061, 7.5, 0.24 / 0.022])
    assert trainer.task.loader.at == 4, "the first step, which loads libraries, is not timed"


def test_a_long_step_is_the_last_one_timed(monkeypatch):
    trainer = trainer_of(LinearTask())
    monkeypatch.setattr(step_time, "_seconds", lambda call: (call(), (2.0, 1.9))[1])
    monkeypatch.setattr(step_time, "TIMED_S", 0.0)
    assert fastest_step_s(trainer) == 1.9
    assert trainer.task.loader.at == 2
