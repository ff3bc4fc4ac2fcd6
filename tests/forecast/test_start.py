"""Training on from the run of a forecaster: `train --start`, `train_forecaster(start=RUN)`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import csv

from fastlstm import Forecaster, compress
from fastlstm.cli.main import main
from fastlstm.errors import FormatError, Stopped
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.train import train_forecaster
from fastlstm.report.history import read_history
from series_frames import QUICK_RUN, long_table

STEPS: dict[str, Any] = {
    "steps": 8, "checkpoint_every": 2, "tensorboard": False, "threads": 1, "batch_size": 16,
    "split": "60/20/20", "evaluations": 2,
}  # fmt: skip
"""Options of training; those of the network come from the run."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a table, and a later table of other values."""
    folder = tmp_path_factory.mktemp("start")
    csv.write_csv(long_table(120), folder / "old.csv")
    values = 5 + np.random.default_rng(1).normal(size=3 * 130).astype(np.float32)
    csv.write_csv(long_table(130, y=values), folder / "new.csv")
    train_forecaster(folder / "old.csv", ForecastConfig(**QUICK_RUN), out=folder / "first")
    return folder


def trained(folder: Path, out: Path, **more: Any) -> Path:
    given = {"given": STEPS, "start": str(folder / "first"), **more}
    train_forecaster(str(folder / "new.csv"), ForecastConfig(**STEPS), out=out, **given)
    return out


def stopped(folder: Path, out: Path, **more: Any) -> Path:
    polls = iter([False] * 7)
    with pytest.raises(Stopped):
        trained(folder, out, stop=lambda: next(polls, True), **more)
    return out


def weights(run: Path) -> dict[str, torch.Tensor]:
    return Forecaster.load(run).network_.state_dict()


def test_columns_scales_and_sizes_come_from_the_run(folder: Path, tmp_path: Path) -> None:
    run = trained(folder, tmp_path / "run")
    first, second = Forecaster.load(folder / "first").stored_, Forecaster.load(run).stored_
    assert second.network.config == first.network.config
    assert second.schema.columns == first.schema.columns
    assert (second.scaler.mean == first.scaler.mean).all()
    assert (second.given.hidden_size, second.given.steps) == (QUICK_RUN["hidden_size"], 8)
    assert read_history(run / "metrics.jsonl").start["start"] == str(folder / "first")
    still = trained(folder, tmp_path / "still", given=["learning_rate"])
    assert not torch.equal(
        weights(still)["lstm.weight_hh_l0"], weights(folder / "first")["lstm.weight_hh_l0"]
    )


@pytest.mark.parametrize("given", [None, "first"])
def test_a_stopped_run_needs_its_start_no_more(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    whole = trained(folder, tmp_path / "whole")
    first = shutil.copytree(folder / "first", tmp_path / "first")
    monkeypatch.chdir(tmp_path)
    run = stopped(folder, tmp_path / "run", start="first")
    shutil.rmtree(first)
    if given is None:
        monkeypatch.chdir("/")
    again = trained(folder, run, resume=True, start=given)
    for name in ("model.safetensors", "scaler.json", "schema.json"):
        assert (again / name).read_bytes() == (whole / name).read_bytes()
    assert read_history(again / "metrics.jsonl").start["start"] == str(first)


def test_a_start_that_moved_is_taken(folder: Path, tmp_path: Path) -> None:
    whole = weights(trained(folder, tmp_path / "whole"))
    run = stopped(folder, tmp_path / "run")
    moved = shutil.copytree(folder / "first", tmp_path / "moved")
    again = weights(trained(folder, run, resume=True, start=str(moved)))
    assert all(torch.equal(value, whole[name]) for name, value in again.items())


def test_another_start_than_the_first_is_refused(folder: Path, tmp_path: Path) -> None:
    run, other = trained(folder, tmp_path / "run"), tmp_path / "other"
    train_forecaster(folder / "new.csv", ForecastConfig(**QUICK_RUN), out=other)
    with pytest.raises(FormatError, match="was started with another `start`, or without one"):
        trained(folder, run, resume=True, start=str(other))
    with pytest.raises(FormatError, match="was started with"):
        trained(folder, other, resume=True, given=())


def test_a_pruned_run_is_refused(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"prune": 0.5, "steps": 1, "data": folder / "old.csv"}
    compress(folder / "first", out=tmp_path / "pruned", observers=(), **options)
    with pytest.raises(FormatError, match="is pruned, and training on would fill its zeros in"):
        trained(folder, tmp_path / "run", start=str(tmp_path / "pruned"))


def test_the_command_line_takes_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["train", str(folder / "new.csv"), "--out", str(tmp_path / "run"), "--steps", "2"]
    argv += ["--no-tensorboard", "--threads", "1"]
    first, gone = str(folder / "first"), str(tmp_path / "gone")
    for more, told in (
        (["--start", gone], "no such run"),
        (["--start", gone, "--horizon", "6"], "no such run"),
        (["--start", first, "--nproc", "2"], "`--nproc 2`: training on from a forecaster runs in"),
        (["--start", first, "--horizon", "7"], "`--horizon` is 7 and was 6 at fit"),
    ):
        assert main([*argv, *more]) == 2
        assert told in capsys.readouterr().err
    assert main([*argv, "--start", first]) == 0
    assert main([*argv, "--resume", "--steps", "4", "--json"]) == 0
    assert '"step": 4' in capsys.readouterr().out
