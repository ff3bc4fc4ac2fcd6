from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from fastlstm.cli.main import main
from fastlstm.errors import ConfigError, MissingExtraError, RunDirectoryError, StorageError
from fastlstm.monitor import publish as module
from fastlstm.monitor.destination import PublishedRun, State, flat, tracker_library
from fastlstm.monitor.publish import publish
from fastlstm.monitor.published_rows import PublishedRow
from fastlstm.runs.run_directory import RunDirectory

Event = dict[str, Any]

START: Event = {
    **{"event": "start", "task": "text", "unit": "tokens", "num_units": {}, "resumed_from": None},
    **{"time": 1_000_000.0, "seed": 3},
}
EVENTS: list[Event] = [
    START,
    {"event": "step", "step": 5, "loss": 0.1 + 0.2, "lr": 1e-300},
    {"event": "eval", "step": 5, "split": "valid", "loss": 2.5, "is_best": True},
    {"event": "sample", "step": 5, "text": 'He said "no", and\nwent.'},
    {"event": "step", "step": 10, "loss": 9.0},
    {**START, "resumed_from": 5},
    {"event": "step", "step": 8, "loss": None, "grad_norm": 3},
]
END: Event = {"event": "end", "step": 8, "reason": "8 steps"}


def lines(events: Sequence[Event]) -> str:
    return "".join(json.dumps(e) + "\n" for e in events)


def make_run(path: Path, events: Sequence[Event]) -> Path:
    path.mkdir()
    config = {"format": "fastlstm-run", "format_version": 2, "train": {"seed": 3}}
    (path / "config.json").write_text(json.dumps(config))
    (path / "metrics.jsonl").write_text(lines(events) + '{"ev')
    return path


def add(run: Path, events: Sequence[Event]) -> None:
    """Adds lines; the last one of `make_run` is half a line until then."""
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write("\n" + lines(events))


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, strict=True))


class Recorder:
    """A tracker that keeps what it got in a store that outlives it."""

    is_append_only = True
    where, next_command, note = "recorder", "", ""

    def __init__(self, store: dict[str, dict[str, Any]]) -> None:
        self._store = store
        self.opened: PublishedRun | None = None

    def open(self, run: PublishedRun) -> int | None:
        self.opened = run
        self._mine = self._store.setdefault(run.identity, {"rows": {}, "config": None})
        return max(self._mine["rows"], default=None)

    def describe(self, config: Mapping[str, Any]) -> None:
        self._mine["config"] = dict(config)

    def send(self, rows: Sequence[PublishedRow]) -> None:
        for row in rows:
            assert row.step not in self._mine["rows"]
            assert row.step > max(self._mine["rows"], default=-1)
            self._mine["rows"][row.step] = row

    def close(self, state: State) -> None:
        self._mine["state"] = state


Store = dict[str, dict[str, Any]]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Store:
    """Returns what a tracker in place of W&B has: identity -> rows, config, state."""
    runs: Store = {}
    monkeypatch.setattr(module, "destination", lambda to, out: Recorder(runs))
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path / "cache"))
    return runs


def only(store: Store) -> dict[str, Any]:
    (run,) = store.values()
    return run


def test_every_value_reads_back_and_repeated_steps_are_the_newer_ones(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "book", EVENTS), tmp_path / "book.csv"
    assert main(["publish", str(run)]) == 0
    first, second = read(out)
    assert list(first) == [
        "run", "step", "train/loss", "train/lr", "valid/loss", "train/grad_norm", "sample",
    ]  # fmt: skip
    assert (first["run"], first["step"]) == ("book", "5")
    assert (float(first["train/loss"]), float(first["train/lr"])) == (0.1 + 0.2, 1e-300)
    assert first["valid/loss"] == "2.5"
    assert first["sample"] == 'He said "no", and\nwent.'
    assert (second["step"], second["train/loss"], second["train/grad_norm"]) == ("8", "", "3.0")


def test_publishing_again_repeats_nothing(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "book", EVENTS), tmp_path / "t.csv"
    publish(run, out=out)
    before = out.read_bytes()
    report = publish(run, out=out)
    assert out.read_bytes() == before
    assert (report.rows, report.last_step) == (2, 8)


def test_a_tracker_gets_each_step_once_with_the_configuration(tmp_path: Path, store: Store) -> None:
    run = make_run(tmp_path / "book", EVENTS)
    report = publish(run, to="wandb")
    assert (report.rows, report.last_step, report.state) == (2, 8, "dead")
    rows = only(store)["rows"]
    assert rows[5].values == {"train/loss": 0.1 + 0.2, "train/lr": 1e-300, "valid/loss": 2.5}
    assert (rows[5].sample, rows[8].values) == ('He said "no", and\nwent.', {"train/grad_norm": 3})
    config = only(store)["config"]
    assert (config["train"], config["start"]["seed"]) == ({"seed": 3}, 3)
    assert "format" not in config
    assert publish(run, to="wandb").rows == 0
    add(run, [{"event": "step", "step": 12, "loss": 1.0}, END])
    report = publish(run, to="wandb")
    assert (report.rows, report.last_step, report.state) == (1, 12, "ended")


def test_the_newest_step_of_a_run_that_trains_waits_for_its_evaluation(
    tmp_path: Path, store: Store
) -> None:
    run = make_run(tmp_path / "book", EVENTS)
    with RunDirectory(run).lock():
        assert publish(run, to="wandb").last_step == 5
    add(run, [{"event": "eval", "step": 8, "loss": 2.0}])
    publish(run, to="wandb")
    assert only(store)["rows"][8].values == {"train/grad_norm": 3.0, "valid/loss": 2.0}


def test_another_run_in_the_same_directory_is_another_run(tmp_path: Path, store: Store) -> None:
    run = make_run(tmp_path / "book", EVENTS)
    publish(run, to="wandb")
    (run / "metrics.jsonl").write_text(lines([{**START, "time": 2e6}, *EVENTS[1:]]))
    publish(run, to="wandb")
    assert len(store) == 2
    moved = run.rename(tmp_path / "moved")
    publish(moved, to="wandb")
    assert len(store) == 2
    publish(moved, to="wandb", name="another")
    assert len(store) == 3


def test_rows_have_the_time_they_were_recorded_at(tmp_path: Path, store: Store) -> None:
    events = [
        START,
        {"event": "step", "step": 1, "loss": 1.0, "elapsed_s": 2.0},
        {"event": "machine", "step": 1, "elapsed_s": 10.0, "time": 500_010.0},
        {"event": "step", "step": 2, "loss": 1.0, "elapsed_s": 11.0},
        {**START, "resumed_from": 2},  # an hour later
        {"event": "step", "step": 3, "loss": 1.0, "elapsed_s": 12.0},
        {"event": "machine", "step": 3, "elapsed_s": 20.0, "time": 503_620.0},
    ]
    publish(make_run(tmp_path / "long", events), to="wandb")
    assert [r.time for r in only(store)["rows"].values()] == [500_002.0, 500_011.0, 503_612.0]
    store.clear()
    run = make_run(tmp_path / "short", events[:2])
    os.utime(run / "metrics.jsonl", (900.0, 900.0))
    publish(run, to="wandb")
    assert only(store)["rows"][1].time == 900.0


def follow(
    run: Path, stop: Callable[[], bool] = lambda: False
) -> tuple[threading.Thread, list[Any]]:
    """Follows a run in a thread; returns it and a list that gets the report or the error."""
    results: list[Any] = []

    def body() -> None:
        try:
            results.append(publish(run, to="wandb", live=True, stop=stop))
        except RunDirectoryError as error:
            results.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, results


def wait_for(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_step(store: Store, step: int) -> Callable[[], bool]:
    return lambda: any(step in run["rows"] for run in list(store.values()))


def test_a_live_run_is_followed_through_a_resume_to_its_end(tmp_path: Path, store: Store) -> None:
    run = tmp_path / "book"
    run.mkdir()
    metrics = run / "metrics.jsonl"
    metrics.write_text("")
    with RunDirectory(run).lock():  # no start event, no checkpoint yet
        thread, results = follow(run)
        kept = lines([START, *({"event": "step", "step": s, "loss": 1.0} for s in (1, 2, 3))])
        metrics.write_text(
            kept + lines([{"event": "step", "step": s, "loss": 2.0} for s in (4, 5)])
        )
        wait_for(has_step(store, 4))
        assert not has_step(store, 5)()
        again = {**START, "time": 1_000_900.0, "resumed_from": 3}
        metrics.write_text(kept)  # cut to the checkpoint
        add(run, [again, *({"event": "step", "step": s, "loss": 3.0} for s in (4, 5, 6))])
        wait_for(has_step(store, 5))
        add(run, [END])
        thread.join(60)
    (report,) = results
    assert [row.values["train/loss"] for row in only(store)["rows"].values()] == [1, 1, 1, 2, 3, 3]
    assert (report.state, report.rows, only(store)["state"]) == ("ended", 6, "ended")
    assert report.notes == (
        "training went back to step 3: steps to 4 keep what was sent before",
    )  # fmt: skip


def test_a_live_run_that_dies_is_left_with_all_its_rows(tmp_path: Path, store: Store) -> None:
    run = make_run(tmp_path / "book", EVENTS)
    with RunDirectory(run).lock():
        thread, results = follow(run)
        wait_for(has_step(store, 5))
    thread.join(60)
    assert results[0].state == only(store)["state"] == "dead"
    assert list(only(store)["rows"]) == [5, 8]


def test_a_stop_ends_with_what_is_sent(tmp_path: Path, store: Store) -> None:
    run, stop = make_run(tmp_path / "book", EVENTS), threading.Event()
    with RunDirectory(run).lock():
        thread, results = follow(run, stop.is_set)
        wait_for(has_step(store, 5))
        stop.set()
        thread.join(60)
    assert (results[0].state, results[0].rows) == ("running", 1)
    assert only(store)["state"] == "running"


def test_a_new_run_in_a_directory_that_is_followed_ends_the_publication(
    tmp_path: Path, store: Store
) -> None:
    run = make_run(tmp_path / "book", EVENTS)
    with RunDirectory(run).lock():
        thread, results = follow(run)
        wait_for(has_step(store, 5))
        (run / "metrics.jsonl").write_text(lines([{**START, "time": 2e6}]))
        thread.join(60)
    assert "another run has begun there" in str(results[0])
    assert list(only(store)["rows"]) == [5]


def test_two_processes_do_not_publish_one_run(tmp_path: Path, store: Store) -> None:
    run, stop = make_run(tmp_path / "book", EVENTS), threading.Event()
    with RunDirectory(run).lock():
        thread, _ = follow(run, stop.is_set)
        wait_for(has_step(store, 5))
        with pytest.raises(RunDirectoryError, match="is being published to wandb by another"):
            publish(run, to="wandb")
        stop.set()
        thread.join(60)


def test_ctrl_c_ends_a_live_publication_cleanly(tmp_path: Path) -> None:
    run = make_run(tmp_path / "book", EVENTS)
    command = [sys.executable, "-m", "fastlstm", "publish", str(run), "--live", "--json"]
    with RunDirectory(run).lock():
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            wait_for((tmp_path / "book.csv").exists)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert json.loads(out)["state"] == "running"
    assert b"Traceback" not in err
    assert [row["step"] for row in read(tmp_path / "book.csv")] == ["5", "8"]


def test_a_failure_of_the_tracker_closes_it(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StorageError("no space")

    run = make_run(tmp_path / "book", EVENTS)
    monkeypatch.setattr(Recorder, "send", refuse)
    with pytest.raises(StorageError, match="no space"):
        publish(run, to="wandb")
    assert only(store)["state"] == "running"


def test_bad_input_is_refused(tmp_path: Path, store: Store) -> None:
    empty = make_run(tmp_path / "empty", [])
    for live in (False, True):
        with pytest.raises(RunDirectoryError, match="no step was recorded"):
            publish(empty, to="wandb", live=live)
    assert store == {}
    with pytest.raises(ConfigError, match="expected one of wandb, mlflow, trackio, csv"):
        publish(empty, to="excel")
    with pytest.raises(ConfigError, match="only csv has a file"):
        publish(empty, to="mlflow", out="x")
    with pytest.raises(ConfigError, match="a csv file has no project"):
        publish(empty, project="x")
    assert main(["publish", str(tmp_path / "none"), "--live"]) == 2
    assert main(["publish", str(tmp_path), "--live"]) == 2
    assert not list(tmp_path.glob("*.csv"))


def test_a_library_that_is_not_installed_is_named_with_its_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"pip install 'fastlstm\[no_such_tracker\]'"):
        tracker_library("no_such_tracker")


def test_a_folder_that_a_tracker_wrote_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_such_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtraError, match="only a folder of that name"):
        tracker_library("no_such_tracker")


def test_what_a_tracker_prints_does_not_come_between_the_json(
    tmp_path: Path,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Recorder, "close", lambda *_: print("View run at https://host"))
    assert (
        main(["publish", str(make_run(tmp_path / "book", EVENTS)), "--to", "mlflow", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["rows"] == 2


def test_settings_are_flattened() -> None:
    assert flat({"a": {"b": 1, "c": {"d": [1, 2]}}, "e": None}) == {
        **{"a.b": 1, "a.c.d": [1, 2], "e": None}
    }


def test_a_file_that_publish_has_not_written_is_never_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data = make_run(tmp_path / "ETTh1", EVENTS), tmp_path / "ETTh1.csv"
    data.write_text("date,OT\n2016-07-01,30.5\n")  # what the run was trained on
    before = (run / "metrics.jsonl").read_bytes()
    link, pipe, empty = tmp_path / "link", tmp_path / "pipe", tmp_path / "empty"
    link.symlink_to(data)
    os.mkfifo(pipe)
    empty.touch()
    assert main(["publish", str(run)]) == 2
    assert f"--out {data} is there and was not written by publish" in capsys.readouterr().err
    for out in (run / "metrics.jsonl", link, pipe, tmp_path, ""):
        assert main(["publish", str(run), "--out", str(out)]) == 2, out
    assert "internal error" not in capsys.readouterr().err
    assert data.read_text().startswith("date,OT")
    assert (run / "metrics.jsonl").read_bytes() == before
    assert link.is_symlink()
    assert pipe.is_fifo()
    assert main(["publish", str(run), "--out", str(empty)]) == 0
    assert main(["publish", str(run), "--out", str(empty)]) == 0


def test_the_directory_above_is_named_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = make_run(tmp_path / "book", EVENTS) / "checkpoint-5"
    inner.mkdir()
    monkeypatch.chdir(inner)
    assert publish("..").where == str(tmp_path / "book.csv")
    assert [row["run"] for row in read(tmp_path / "book.csv")] == ["book", "book"]
    assert not list(inner.iterdir())


def test_a_run_that_began_twice_is_its_newest_beginning(tmp_path: Path, store: Store) -> None:
    first = [START, {"event": "eval", "step": 0, "loss": 9.0}, END]  # no checkpoint was written
    second = {**START, "time": 2e6}
    run = make_run(tmp_path / "book", [*first, second, *EVENTS[1:5]])
    assert publish(run, to="wandb").rows == 2
    assert list(only(store)["rows"]) == [5, 10]


def test_a_table_without_rows_is_not_said_to_be_written(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "book", [*EVENTS[:2], {**START, "resumed_from": 0}]), "t.csv"
    with pytest.raises(RunDirectoryError, match="no step was recorded"):
        publish(run, out=tmp_path / out)
    assert not (tmp_path / out).exists()


def test_times_and_texts_of_damaged_events_are_those_that_trackers_take(
    tmp_path: Path, store: Store
) -> None:
    start = {**START, "time": 1e300, "source": "\ud800"}
    machine = {"event": "machine", "time": 1.7e308, "elapsed_s": -1.7e308}
    run = make_run(tmp_path / "book", [start, EVENTS[1], machine])
    add(run, [{"event": "step", "step": 6, "elapsed_s": 1.7e308}])
    add(run, [])
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'{"event":"start","x":' + b"[" * 900 + b"]" * 900 + b"}\n")
    publish(run, to="wandb")
    for row in only(store)["rows"].values():
        assert datetime.fromtimestamp(row.time, UTC).year <= 9999
    assert only(store)["config"]["start"]["source"] == "?"


def test_a_lock_that_cannot_be_taken_is_not_said_to_be_another_process(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: RunDirectory) -> None:
        raise RunDirectoryError("cannot be locked (No locks available)")

    run = make_run(tmp_path / "book", EVENTS)
    monkeypatch.setattr(RunDirectory, "lock", refuse)
    with pytest.raises(RunDirectoryError, match="No locks available"):
        publish(run, to="wandb")
