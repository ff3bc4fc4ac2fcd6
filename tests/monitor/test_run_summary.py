from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fastlstm.monitor.run_summary import MAX_POINTS, RunSummary
from fastlstm.runs.lock_holder import lock_holder
from fastlstm.runs.run_directory import RunDirectory


def read(run: Path, stored: Any = None) -> RunSummary:
    summary = RunSummary(run, stored)
    summary.update()
    return summary


def add(run: Path, **event: Any) -> None:
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


def test_a_finished_run(write_run: Any) -> None:
    run = read(write_run("a"))
    assert (run.state, run.best, run.seconds, run.rate) == ("finished", 2.0, 100.0, 200.0)
    assert run.slip == 0.0
    assert run.best_until(55.0, "seconds") == pytest.approx(2.5)
    assert run.best_until(3000.0, "chars") == pytest.approx(2.7)
    assert (run.reach("seconds"), run.reach("chars")) == (100.0, 10_000.0)
    assert not run.update()


def test_running_dead_and_stopped(write_run: Any) -> None:
    path = write_run("a", is_ended=False)
    run = read(path)
    assert run.state == "dead"
    with RunDirectory(path).lock():
        assert run.state == "running"
        assert lock_holder(path / ".lock")[0]
    assert run.state == "dead"
    add(path, event="end", reason="stopped by signal")
    run.update()
    assert run.state == "stopped"


def test_a_later_end_than_predicted_is_a_slip(write_run: Any) -> None:
    path = write_run("a", is_ended=False)
    run = read(path)
    add(path, event="step", step=1001, elapsed_s=110.0, eta_s=40.0)
    run.update()
    assert run.slip == pytest.approx(0.5)


def test_the_steps_that_a_resumed_run_repeats_are_dropped(write_run: Any) -> None:
    path = write_run("a", is_ended=False)
    run = read(path)
    add(path, event="start", resumed_from=300)
    run.update()
    assert [point.step for point in run.validation] == [100, 200, 300]


def test_a_summary_continues_where_it_was_stored(write_run: Any) -> None:
    path = write_run("a", is_ended=False)
    run = read(path)
    stored = json.loads(json.dumps(run.stored()))
    add(path, event="skip", what="loss is NaN")
    again = RunSummary(path, stored)
    assert again.update()
    assert (again.validation, again.training) == (run.validation, run.training)
    assert (again.alerts, again.num_alerts) == (["loss is NaN"], 1)
    for damaged in ({}, {**stored, "training": [[1]]}, {**stored, "validation": None}):
        assert read(path, damaged).validation == run.validation


def test_a_cut_file_is_summarised_anew(write_run: Any) -> None:
    path = write_run("a")
    run = read(path)
    os.truncate(path / "metrics.jsonl", 3000)
    assert run.update()
    assert run.end is None
    assert len(run.validation) < 10


def test_curves_are_short_and_keep_their_best(write_run: Any) -> None:
    path = write_run("a", is_ended=False)
    with open(path / "metrics.jsonl", "a", encoding="utf-8") as file:
        for step in range(1001, 4000):
            bits = 0.5 if step == 1234 else 1.5
            event = {"event": "step", "step": step, "elapsed_s": step, "bits_per_char": bits}
            file.write(json.dumps({**event, "units": step}) + "\n")
    run = read(path)
    assert MAX_POINTS <= len(run.training) <= 2 * MAX_POINTS
    assert min(point.value for point in run.training) == 0.5
    assert run.training[-1].step == 3999


def test_values_of_other_kinds_are_ignored(tmp_path: Path) -> None:
    values: tuple[Any, ...] = ("1", None, [], {}, True, 10**400)
    for value in values:
        add(tmp_path, event="step", step=value, elapsed_s=value, bits_per_char=value, eta_s=value)
        add(tmp_path, event="eval", split="valid", step=1, elapsed_s=value, bits_per_char=value)
        add(tmp_path, event="start", vocab=value, source=value, resumed_from=value, task="text")
        add(tmp_path, event="end", reason=value, units=value, train_s=value, best_loss=value)
    run = read(tmp_path)
    figures = (run.best, run.rate, run.slip, run.units_per_char, run.reach("chars"))
    assert (figures, run.seconds, run.state) == ((None,) * 5, 0.0, "finished")
