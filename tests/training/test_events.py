"""What the `start`, `step` and `end` events hold."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastlstm.distributed.world import World
from fastlstm.errors import CorruptFileError
from fastlstm.training.checkpoint import Checkpoint
from fastlstm.training.events import ThroughputMeter, end_event, start_event, step_event
from linear_task import ROWS, STEPS_PER_EPOCH, LinearTask, of_kind, trainer_of


def test_the_start_of_a_run_and_of_a_resumed_one():
    trainer = trainer_of(LinearTask(), seed=3, accumulate=2)
    event = start_event(trainer.task, trainer.plan, "run", None)
    assert {key: event[key] for key in ("task", "unit", "run", "device", "end", "seed")} == {
        **{"task": "linear", "unit": "rows", "run": "run", "device": "cpu"},
        **{"end": "10 steps", "seed": 3},
    }
    assert (event["num_parameters"], event["accumulate"], event["learning_rate"]) == (4, 2, 0.05)
    assert (event["resumed_from"], event["resumed_s"]) == (None, None)
    checkpoint = Checkpoint(Path("c"), 7, {}, {"progress": {"elapsed_s": 2.5}}, {}, True)
    again = start_event(trainer.task, trainer.plan, None, checkpoint)
    assert (again["resumed_from"], again["resumed_s"]) == (7, 2.5)
    bad = Checkpoint(Path("c"), 7, {}, {"progress": {"elapsed_s": "x"}}, {}, True)
    with pytest.raises(CorruptFileError, match=r"^c: "):
        start_event(trainer.task, trainer.plan, None, bad)


def test_the_start_event_describes_several_processes():
    trainer = trainer_of(LinearTask())
    assert "processes" not in start_event(trainer.task, trainer.plan, None, None)
    world = World(0, 4)
    world.num_machines = 2
    plan = replace(trainer.plan, world=world)
    about = start_event(trainer.task, plan, None, None)["processes"]
    assert (about["num"], about["machines"], about["backend"]) == (4, 2, "gloo")
    assert (about["sync_every"], about["wire"]) == (1, "fp32")
    assert about["threads"] is None  # each process has those of its own machine


def test_a_step_counts_units_epochs_and_the_time_that_is_left():
    trainer = trainer_of(LinearTask())
    trainer.progress.step, trainer.progress.tokens = 5, 40
    trainer.meter.add_step(loss=2.0, norm=1.0, units=ROWS, seconds=0.5)
    trainer.meter.add_evaluation(3.0, 3.0 / 16)
    event = step_event(trainer, 0.02, 2)
    assert (event["step"], event["units"], event["epoch"]) == (5, 40, 5 / STEPS_PER_EPOCH)
    assert (event["lr"], event["loss"], event["progress"]) == (0.02, 2.0, 0.5)
    assert event["units_per_s"] == pytest.approx(ROWS / 0.5)
    assert event["eta_s"] == pytest.approx(0.5 * 5 + 3.0 * 2)


def test_the_time_left_of_a_budget_is_never_negative():
    started = time.perf_counter()
    for age_s, left_s in ((10.0, 50.0), (100.0, 0.0)):
        trainer = trainer_of(LinearTask(), budget="1m", started=started - age_s)
        assert step_event(trainer, 0.0, 1)["eta_s"] == pytest.approx(left_s, abs=1.0)


def test_the_end_has_the_totals_and_its_best_evaluation():
    events: list[Any] = []
    trainer = trainer_of(LinearTask(), events)
    trainer.fit()
    (stored,) = of_kind(events, "end")
    event = end_event(trainer, "why")
    same = ("task", "step", "units", "best_step", "best_loss", "train_s")
    assert [event[key] for key in same] == [stored[key] for key in same]
    assert (event["reason"], event["run"]) == ("why", None)
    assert event["spent_s"].keys() == {"setup", "evaluations", "saving"}
    assert event["peak_memory_bytes"] > 1 << 20


def test_the_seconds_of_a_unit_come_from_steps_until_an_evaluation_is_timed():
    task: Any = SimpleNamespace(forward_share=1 / 3, step_units=2, flop_per_unit=0)
    meter = ThroughputMeter(task, 0.0)
    assert meter.unit_s == 0.0
    for _ in range(10):
        meter.add_step(loss=1.0, norm=1.0, units=2, seconds=1.5)
    assert meter.unit_s == pytest.approx(1.5 / 3 / 2)
    meter.add_evaluation(seconds=4.0, unit_s=0.04)
    assert meter.unit_s == pytest.approx(0.04)


def meter_of(gflops):
    task: Any = SimpleNamespace(forward_share=0.5, step_units=2, flop_per_unit=1e9)
    return ThroughputMeter(task, gflops)


def test_a_ceiling_below_the_speed_of_steps_is_ignored():
    meter = meter_of(100.0)
    found = list[float | None]()
    for seconds in (2.0, 0.98, 0.5, 2.0):  # 50, 102, 200 and 50 GFLOP/s
        meter.add_step(loss=1.0, norm=1.0, units=100, seconds=seconds)
        found.append(meter.take(0.0)["ceiling_share"])
    assert found == [0.5, 1.0, None, None]
    assert meter.is_ceiling_wrong


def test_the_wait_of_skipped_steps_is_no_more_than_all():
    meter = meter_of(0.0)
    meter.add_step(loss=1.0, norm=1.0, units=2, seconds=0.1)
    assert meter.take(wait_s=3.0)["input_wait_share"] == 1.0
    assert not meter.is_ceiling_wrong
