"""The real trackers, each where it is installed; tests/campaigns/publish.py reads all of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fastlstm.errors import ConfigError, StorageError
from fastlstm.monitor.destination import PublishedRun
from fastlstm.monitor.published_rows import PublishedRow

CONFIG = {"train": {"seed": 3, "zoneout": [0.0, 0.1]}, "long": "x" * 7000}
ROWS = [
    PublishedRow(5, 1.0, 1000.5, {"train/loss": 0.1 + 0.2, "own (é)": 1e-300}, 'He "said"\n'),
    PublishedRow(10, 2.0, 1001.5, {"train/loss": 9.0}),
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PublishedRun:
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    return PublishedRun(tmp_path / "book", "0123456789ab", "book", "fastlstm", 999.0)


def publish_twice(target: type[Any], run: PublishedRun) -> list[Any]:
    """Publishes the first row, then in a new publication what is missing."""
    targets, last = [], None
    for rows in (ROWS[:1], ROWS[1:]):
        one = target()
        assert one.open(run) == last
        one.describe(CONFIG)
        one.send(rows)
        one.close("ended")
        last = rows[-1].step
        targets.append(one)
    assert target().open(run) == last
    assert target().open(PublishedRun(run.path, "another", run.name, run.project, 999.0)) is None
    return targets


@pytest.mark.filterwarnings("ignore")
def test_wandb_offline(run: PublishedRun) -> None:
    pytest.importorskip("wandb")
    from fastlstm.monitor.wandb_run import WandbRun

    targets = publish_twice(WandbRun, run)
    for target in targets:
        assert "wandb sync" in target.next_command
        assert list(Path(target.where).glob(f"run-{run.identity}.wandb"))
    assert "no W&B key is configured" in targets[0].note


@pytest.mark.filterwarnings("ignore")
def test_wandb_that_is_switched_off(run: PublishedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    from fastlstm.monitor.wandb_run import WandbRun

    monkeypatch.setenv("WANDB_MODE", "disabled")
    wandb.teardown()
    with pytest.raises(ConfigError, match="expected online or offline"):
        WandbRun().open(run)
    wandb.teardown()


@pytest.mark.filterwarnings("ignore")
def test_mlflow(run: PublishedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    from fastlstm.monitor.mlflow_run import MLflowRun

    publish_twice(MLflowRun, run)
    client = mlflow.MlflowClient()
    found = client.search_runs(["1"], filter_string="tags.`fastlstm.identity` = '0123456789ab'")
    (one,) = found
    history = client.get_metric_history(one.info.run_id, "train/loss")
    assert [(m.step, m.value, m.timestamp) for m in history] == [
        (5, 0.1 + 0.2, 1_000_500), (10, 9.0, 1_001_500),
    ]  # fmt: skip
    assert one.data.metrics["own (é)".replace("(é)", "___")] == 1e-300
    assert one.data.params["train.zoneout"] == "[0.0, 0.1]"
    assert len(one.data.params["long"]) == 500
    info = one.info
    assert (info.status, info.start_time, info.end_time) == ("FINISHED", 999_000, 1_001_500)
    target = MLflowRun()
    target.open(run)
    target.describe({**CONFIG, "train": {"seed": 4}})
    assert "changed since: train.seed" in target.note
    assert client.get_run(one.info.run_id).data.params["train.seed"] == "3"


@pytest.mark.filterwarnings("ignore")
def test_trackio(run: PublishedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    trackio = pytest.importorskip("trackio")
    from fastlstm.monitor.trackio_run import TrackioRun

    publish_twice(TrackioRun, run)
    logs = trackio.SQLiteStorage.get_logs("fastlstm", "book", run_id=run.identity)
    assert [(row["step"], row["train/loss"]) for row in logs] == [(5, 0.1 + 0.2), (10, 9.0)]
    assert logs[0]["sample"] == ROWS[0].sample
    assert math.isclose(logs[0]["own (é)"], 1e-300, rel_tol=0)
    assert logs[0]["timestamp"] == "1970-01-01T00:16:40.500000+00:00"
    again = TrackioRun()
    again.open(run)
    again.send(ROWS)  # refused by the ids of its rows
    assert len(trackio.SQLiteStorage.get_logs("fastlstm", "book", run_id=run.identity)) == 2
    with pytest.raises(StorageError, match="Trackio"):
        TrackioRun().open(PublishedRun(run.path, run.identity, "book", "registry-x", 999.0))
