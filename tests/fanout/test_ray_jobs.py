"""Jobs as tasks of Ray, on a stand-in; tests/campaigns/ray_fanout.py has a real cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastlstm import ray as ray_train
from fastlstm.cli.main import main
from fastlstm.cli.options import FORECAST_OPTIONS, TEXT_OPTIONS
from fastlstm.cli.parser import split_arguments, typed
from fastlstm.errors import ConfigError, MissingExtraError, UsageError
from fastlstm.fanout import ray_jobs
from fastlstm.fanout.job import Job, Outcome
from fastlstm.fanout.ray_jobs import RayJobs


class FakeProcess:
    """A process that ends when it is told to stop, or at the second look."""

    def __init__(self, words: list[str]) -> None:
        self.looks, self.is_stopped = 0, False

    def poll(self) -> Outcome | None:
        self.looks += 1
        if self.is_stopped:
            return Outcome("stopped", 1.0)
        return Outcome("done", 1.0) if self.looks > 2 else None

    def stop(self) -> None:
        self.is_stopped = True


class FakeRay:
    """Runs a task when its result is asked for."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self, cores: int = 4) -> None:
        self.cores, self.options = cores, dict[str, Any]()

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"Alive": True, "Resources": {"CPU": self.cores}},
            {"Alive": False, "Resources": {}},
        ]

    def remote(self, **options: Any) -> Any:
        self.options = options
        return lambda task: SimpleNamespace(remote=lambda *given: (task, given))

    def wait(self, refs: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return refs[:1], refs[1:]

    def get(self, ref: Any) -> Any:
        task, given = ref
        return task(*given)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_jobs, "TrainProcess", FakeProcess)
    monkeypatch.setattr(ray_jobs, "_POLL_S", 0.001)


def a_job(folder: Path) -> Job:
    return Job(folder / "rows", folder / "run", folder / "config.yaml")


def test_a_job_is_handed_in_and_comes_back(tmp_path: Path) -> None:
    ray = FakeRay()
    jobs = RayJobs(ray, tmp_path, 2)
    assert ray.options["num_cpus"] == 2
    assert ray.options["max_retries"] > 1
    assert jobs.slots == 2
    jobs.start(a_job(tmp_path))
    assert jobs.poll() == [(a_job(tmp_path), Outcome("done", 1.0))]
    assert jobs.poll() == []
    jobs.close()
    assert list(tmp_path.iterdir()) == []


def test_a_stop_reaches_jobs_that_run_and_that_wait(tmp_path: Path) -> None:
    jobs = RayJobs(FakeRay(), tmp_path, 1)
    jobs.start(a_job(tmp_path))
    jobs.stop()
    assert jobs.poll()[0][1].state == "stopped"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda word: word.unlink(), "is not the same directory on node"),
        (lambda word: word.write_text("go other 1"), "is not the same directory on node"),
        (None, "has fastlstm"),
    ],
)
def test_a_node_with_other_storage_or_version_is_named(
    change: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = RayJobs(FakeRay(), tmp_path, 1)
    jobs.start(a_job(tmp_path))
    if change is None:
        monkeypatch.setattr(ray_jobs, "version", lambda name: "0.0")
    else:
        change(next(tmp_path.iterdir()))
    with pytest.raises(UsageError, match=message):
        jobs.poll()


def test_more_threads_than_a_node_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--threads is 8, the largest node .* has 4 CPUs"):
        RayJobs(FakeRay(), tmp_path, 8)


def test_a_task_that_is_lost_for_good_is_a_failure(tmp_path: Path) -> None:
    ray = FakeRay()
    jobs = RayJobs(ray, tmp_path, 1)
    jobs.start(a_job(tmp_path))

    def lost(ref: Any) -> Any:
        raise RuntimeError("the node died\nmore")

    ray.get = lost  # type: ignore[method-assign]
    outcome = jobs.poll()[0][1]
    assert (outcome.state, outcome.reason) == ("failed", "Ray: RuntimeError: the node died")


def test_without_ray_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    table = tmp_path / "t.csv"
    table.write_text("store,ds,y\na,1,2\n")
    words = ["--by", "store", "--horizon", "1", "--out", str(tmp_path / "out"), "--ray", "auto"]
    assert main(["fanout", str(table), *words]) == 2
    assert "pip install 'fastlstm[ray]'" in capsys.readouterr().err
    with pytest.raises(MissingExtraError):
        ray_train.train("book.txt", out=tmp_path / "run")


def test_a_cluster_that_does_not_answer_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_jobs, "import_ray", lambda: None)
    monkeypatch.setattr(ray_jobs, "_CONNECT", "raise SystemExit('first\\nnothing there')")
    with pytest.raises(UsageError, match=r"--ray is 'h:1': .* \(nothing there\)"):
        ray_jobs.require_answer("h:1")
    monkeypatch.setattr(ray_jobs, "_ANSWER_S", 0.3)
    monkeypatch.setattr(ray_jobs, "_CONNECT", "import time; time.sleep(60)")
    with pytest.raises(UsageError, match="no answer within"):
        ray_jobs.require_answer("h:1")


@pytest.mark.parametrize(
    ("options", "values"),
    [
        (TEXT_OPTIONS, {"rnn_size": 64, "tie_weights": False, "budget": "1m", "valid": None}),
        (FORECAST_OPTIONS, {"target": ("a", "b"), "missing_value": [-9.0], "tensorboard": True}),
    ],
)
def test_options_become_flags_and_back(options: Any, values: dict[str, Any]) -> None:
    found = split_arguments(options, ray_train._flags(values))
    assert not found.unknown
    read = {option.name: typed(text, option.type) for option, text in found.options}
    expected = {
        name: ",".join(map(str, value)) if isinstance(value, tuple | list) else value
        for name, value in values.items()
        if value is not None
    }
    assert read == expected


@pytest.mark.parametrize("number", [0, (0, 2), (4, 2)])
def test_a_number_of_workers_that_cannot_be_is_refused(
    number: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_train, "import_ray", lambda: None)
    with pytest.raises(ConfigError, match="num_workers is"):
        ray_train.train("book.txt", out=tmp_path, num_workers=number)
