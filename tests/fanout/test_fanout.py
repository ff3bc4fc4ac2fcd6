"""One model per group: what is run, skipped, continued, refused and reported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import csv
from pyarrow import parquet as pq

from fastlstm.cli.main import main
from fastlstm.errors import Stopped, UsageError
from fastlstm.fanout import job as job_module
from fastlstm.fanout import store as store_module
from fastlstm.fanout.fanout import Progress, fan_out
from fastlstm.fanout.groups import Group
from fastlstm.fanout.job import Job, Outcome
from fastlstm.fanout.store import FanoutStore
from fastlstm.report.history import History
from series_frames import long_table

SMALL = [
    *("--horizon", "4", "--input-size", "24", "--patch", "4", "--hidden-size", "8"),
    *("--steps", "4", "--split", "60/20/20", "--no-tensorboard", "--device", "cpu"),
]
ABOUT = {"by": "store", "files": [["/t.csv", 1]], "options": {"horizon": 4, "threads": 1}}


class FakeJobs:
    """Jobs that end when they are polled, as `ends` says by group."""

    def __init__(
        self, slots: int, finished: set[str], ends: dict[str, list[Outcome]] | None = None
    ) -> None:
        self.slots, self.finished, self.ends = slots, finished, ends or {}
        self.running: list[Job] = []
        self.started: list[str] = []
        self.most, self.is_stopped = 0, False

    @property
    def room(self) -> int:
        return self.slots - len(self.running)

    def start(self, job: Job) -> None:
        self.running.append(job)
        self.started.append(job.run.name)
        self.most = max(self.most, len(self.running))

    def poll(self) -> list[tuple[Job, Outcome]]:
        ended, self.running = self.running, []
        if self.is_stopped:
            return [(job, Outcome("stopped", 1.0)) for job in ended]
        self.finished |= {job.run.name for job in ended if job.run.name not in self.ends}
        done = Outcome("done", 2.0)
        return [(job, self.ends.get(job.run.name, [done]).pop(0)) for job in ended]

    def stop(self) -> None:
        self.is_stopped = True


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the runs that count as finished."""
    names = set[str]()

    def finished_run(path: Path) -> History | None:
        return History(end={"best_loss": 0.5}) if path.name in names else None

    monkeypatch.setattr(store_module, "finished_run", finished_run)
    return names


def a_store(path: Path, names: str = "abcde", **about: Any) -> FanoutStore:
    path.mkdir(exist_ok=True)
    return FanoutStore(path, ABOUT | about, lambda tables: divided(tables, names))


def divided(tables: Path, names: str) -> list[Group]:
    tables.mkdir()
    return [Group(name, name, 10) for name in names]


def run(store: FanoutStore, jobs: FakeJobs, stop: Callable[[], bool] = lambda: False) -> Progress:
    shown: list[Progress] = []
    fan_out(store, jobs, 10.0, stop, lambda entry: None, shown.append)
    return shown[-1]


def states(path: Path) -> dict[str, str]:
    content = json.loads((path / "fanout.json").read_text())
    return {group["name"]: group["state"] for group in content["groups"]}


def test_a_failure_is_reported_and_the_others_go_on(tmp_path: Path, finished: set[str]) -> None:
    store = a_store(tmp_path / "out")
    jobs = FakeJobs(
        2, finished, {"b": [Outcome("failed", 1.0, "too few rows")], "d": [Outcome("done")]}
    )
    progress = run(store, jobs)
    assert jobs.started == list("abcde")
    assert jobs.most == 2
    assert (progress.done, progress.failed, progress.running, progress.left) == (3, 2, 0, 0)
    assert [s for s in states(tmp_path / "out").values()] == [
        "done",
        "failed",
        "done",
        "failed",
        "done",
    ]
    assert store.entries[1].reason == "too few rows"
    assert store.entries[3].reason == "the run ended without a model"


def test_a_second_start_skips_what_is_finished(tmp_path: Path, finished: set[str]) -> None:
    store = a_store(tmp_path / "out")
    finished |= {"a", "c"}
    store.entries[3].state = "running"  # the process was killed
    store.write()
    again = a_store(tmp_path / "out", "never divided again")
    assert [entry.name for entry in again.waiting()] == list("bde")
    assert again.entries[0].loss == 0.5
    jobs = FakeJobs(1, finished)
    run(again, jobs)
    assert jobs.started == list("bde")


def test_options_of_several_names_are_the_same_when_read_back(tmp_path: Path) -> None:
    for _ in range(2):
        a_store(tmp_path / "out", options={"target": ("y", "z"), "missing_value": (-9.0,)})


def test_a_stop_ends_all_and_starts_none(tmp_path: Path, finished: set[str]) -> None:
    store, jobs = a_store(tmp_path / "out"), FakeJobs(2, finished)
    with pytest.raises(Stopped, match="the same command continues"):
        run(store, jobs, lambda: len(jobs.started) >= 2)
    assert jobs.started == ["a", "b", "c", "d"] or jobs.started == ["a", "b"]
    assert "running" not in states(tmp_path / "out").values()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"by": "city"}, "started with by='store', not city; give another out"),
        ({"files": [["/t.csv", 2]]}, "another table, or it was changed since"),
        (
            {"options": {"horizon": 8, "threads": 1}},
            "started with horizon=4, not 8; give",
        ),
        ({"options": {"horizon": 4, "threads": 2}}, "started with threads=1, not 2"),
        ({"options": {"threads": 1}}, "started with horizon=4, not without it; give"),
        ({"options": {**ABOUT["options"], "seed": 2}}, "started without seed; leave it out, or"),
    ],
)
def test_a_directory_of_another_fan_out_is_refused(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    a_store(tmp_path / "out")
    with pytest.raises(UsageError, match=message):
        a_store(tmp_path / "out", **changed)


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(UsageError, match="holds something else"):
        a_store(tmp_path)
    (tmp_path / "mine.txt").unlink()

    def fail(tables: Path) -> list[Group]:
        tables.mkdir()
        raise UsageError("no")

    with pytest.raises(UsageError, match="no"):
        FanoutStore(tmp_path, ABOUT, fail)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "fanout.json").write_text('{"groups": 1}')
    with pytest.raises(UsageError, match="was not written by this fastlstm"):
        a_store(tmp_path)


@pytest.mark.parametrize(
    ("code", "text", "reason"),
    [
        (
            2,
            "warning\nfastlstm: error: t: 2 errors:\n  - one\n  - two\n",
            "t: 2 errors: - one - two",
        ),
        (1, "Traceback\nValueError: x\n\n", "ValueError: x"),
        (1, "", "ended with exit code 1"),
        (-9, "whatever", "killed by SIGKILL"),
    ],
)
def test_the_reason_of_a_failure_is_one_line(code: int, text: str, reason: str) -> None:
    assert job_module._reason(code, text) == reason


def is_running(pid: int) -> bool:
    """Returns whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux ends orphans")
def test_a_job_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three " * 2_000)
    script = (
        "import os, sys, time\n"
        "from fastlstm.fanout.job import TrainProcess\n"
        "words = [sys.argv[1], '--out', sys.argv[1] + '-run', '--steps', '1000000']\n"
        "print(TrainProcess(words)._process.pid, flush=True)\n"
        "time.sleep(0.2)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    argv = [sys.executable, "-c", script, str(text)]
    child = int(subprocess.run(argv, capture_output=True, timeout=60).stdout)
    try:
        deadline = time.monotonic() + 20
        while is_running(child) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not is_running(child)
    finally:
        if is_running(child):
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--by", "store", "--jobs", "0"], "--jobs is 0, expected 1 or more"),
        (["--by", "store", "--jobs", "1", "--ray", "auto"], "give one of them"),
        (["--by", "sore"], "no column 'sore'"),
        (["--by", "ds"], "column 'ds' is the time"),
        ([], "--by"),
    ],
)
def test_bad_use_is_one_line_and_leaves_nothing(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "t.parquet", tmp_path / "out"
    pq.write_table(long_table(10, unique_id=None, store=["a", "b"] * 15), path)
    assert main(["fanout", str(path), *arguments, "--out", str(out), *SMALL]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
    assert not out.exists()


def test_too_many_groups_are_refused_with_the_time_they_would_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.parquet"
    rows = 20_000
    pq.write_table(
        pa.table({"id": range(rows), "ds": range(rows), "y": [0.0, 1.0] * (rows // 2)}), path
    )
    words = ["--horizon", "4", "--budget", "1m", "--jobs", "2", "--out", str(tmp_path / "out")]
    assert main(["fanout", str(path), "--by", "id", *words]) == 2
    shown = capsys.readouterr().err
    assert "20,000 values, expected at most 10,000" in shown
    assert "6d22h with 2 jobs at a time" in shown
    assert not (tmp_path / "out").exists()


def test_a_table_is_divided_and_every_group_trained_or_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["a/b"] * 120 + ["short"] * 12
    table = long_table(132, 1, unique_id=None, store=names)
    path, out = tmp_path / "t.csv", tmp_path / "out"
    csv.write_csv(table, path)
    command = ["fanout", str(path), "--by", "store", "--out", str(out), *SMALL]
    assert main([*command, "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    good, short = facts["groups"]
    assert (good["name"], good["rows"], good["state"]) == ("a/b", 120, "done")
    assert good["loss"] > 0
    assert good["naive_mae"] > 0
    assert (short["state"], short["loss"]) == ("failed", None)
    assert "rows" in short["reason"]
    assert "threads: 1\n" in (out / ".tables" / "config.yaml").read_text()
