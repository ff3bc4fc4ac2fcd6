import itertools
import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastlstm.cli.main import main
from fastlstm.cli.predict_table import rows
from fastlstm.errors import Stopped, UsageError
from fastlstm.forecast.config import ForecastConfig
from fastlstm.tuning import predict_table
from fastlstm.tuning.loss_law import KEPT_GAIN, loss_after
from fastlstm.tuning.predict_table import MeasuredRuns, TablePrediction, predict_forecaster
from fastlstm.tuning.table_job import TableJob

SIZES = ["--target", "y", "--horizon", "4", "--input-size", "16", "--patch", "4",
         "--hidden-size", "16", "--threads", "1"]  # fmt: skip


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.csv"
    lines = (
        f"2024-01-{1 + n // 24:02d} {n % 24:02d}:00,{math.sin(n / 4) + n % 7 / 20:.4f}"
        for n in range(30 * 24)
    )
    path.write_text("\n".join(["ds,y", *lines]))
    return path


def test_every_doubling_gains_a_share_of_the_one_before():
    losses = [loss_after(50.0 * 2**n, 50, 0.54, 0.5) for n in range(4)]
    gains = [a.loss - b.loss for a, b in itertools.pairwise(losses)]
    assert losses[0].loss == pytest.approx(0.5)
    assert gains[0] == pytest.approx(0.04 * KEPT_GAIN)
    assert gains[2] / gains[1] == pytest.approx(KEPT_GAIN)
    assert all(loss.low < loss.loss < loss.high for loss in losses)
    assert losses[3].high - losses[3].low > losses[1].high - losses[1].low


def test_a_longer_run_that_was_no_better_says_that_all_lengths_are_alike():
    losses = [loss_after(steps, 50, 0.49, 0.5) for steps in (25, 100, 5000)]
    assert [loss.loss for loss in losses] == [0.5, 0.5, 0.5]
    assert losses[2].low < 0.49


def test_a_likelihood_may_be_below_zero():
    found = loss_after(100, 50, -0.4, -0.5)
    assert found.low < found.loss < -0.5 < found.high + 0.1


def test_steps_are_predicted_from_a_tenth_of_them(table: Path):
    config = ForecastConfig(
        horizon=4, target=("y",), input_size=16, patch=4, hidden_size=16, threads=1, steps=400
    )
    found = predict_forecaster(str(table), config, {"horizon", "hidden_size", "steps"})
    assert (found.measured.steps, found.steps, found.fixed) == (60, 400.0, {})
    whole = found.after(found.steps)
    assert whole.low < whole.loss <= found.measured.loss
    assert "give a longer --measure" not in " ".join(text for _, text in rows(found, "train"))


def test_the_command_prints_the_prediction_and_what_trains_it(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def few_steps(config: ForecastConfig, *_: Any) -> ForecastConfig:
        return replace(config, steps=30, budget=None)

    monkeypatch.setattr(predict_table, "_short", few_steps)
    monkeypatch.chdir(tmp_path)
    words = ["predict", str(table), *SIZES, "--budget", "60s"]
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["low"] < facts["loss"] < facts["high"]
    assert facts["measured"]["steps"] == 30
    assert facts["steps"] >= 30
    assert len(facts["lengths"]) == 4
    command = shlex.split(facts["command"])
    assert command[:3] == ["fastlstm", "train", str(table)]
    assert main([*command[1:], "--steps", "5"]) == 2  # of --budget and --steps only one
    capsys.readouterr()
    at = command.index("--budget")
    assert main([*command[1:at], "--budget", "10s", *command[at + 2 :]]) == 0
    assert "finished" in capsys.readouterr().out


def shown(half: float, **changes: Any) -> str:
    measured = MeasuredRuns(100, 0.5, half, seconds=30.0, step_s=0.2, setup_s=3.0)
    values: dict[str, Any] = {"budget_s": 300.0, "closing_s": 40.0, "fixed": {}, "machine": {}}
    found = TablePrediction(measured, 1000.0, **{**values, **changes})
    return "\n".join(f"{label} {text}" for label, text in rows(found, "fastlstm train"))


def test_a_longer_run_that_gains_nothing_is_said():
    assert "a longer run gains less than 1 %" in shown(0.502)
    assert "any length ends alike" in shown(0.499)
    assert "a longer run" not in shown(0.6)
    assert "give a longer --measure" not in shown(0.6)
    assert "--hidden-size 64" in shown(0.6, fixed={"hidden_size": 64})


@pytest.mark.parametrize(
    ("changes", "measure_s", "message"),
    [
        ({"budget": "60s"}, 60.0, "train it, or give a longer --budget"),
        ({"budget": "60s"}, 1.0, "--measure is 1 s, expected at least 5 s"),
        ({"steps": 20}, None, "the run takes 20 steps and the short run 60 steps: train it"),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    table: Path, changes: dict[str, Any], measure_s: float | None, message: str
):
    config = ForecastConfig(
        horizon=4, target=("y",), input_size=16, patch=4, hidden_size=16, threads=1, **changes
    )
    with pytest.raises(UsageError, match=message):
        predict_forecaster(str(table), config, {*changes, "hidden_size"}, measure_s)


def test_a_table_without_a_horizon_says_so(table: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["predict", str(table), "--budget", "60s"]) == 2
    said = capsys.readouterr().err
    assert "give --horizon N" in said
    assert "--as-text" not in said


def test_a_stop_says_nothing_of_a_checkpoint_that_is_gone(
    table: Path, monkeypatch: pytest.MonkeyPatch
):
    train = TableJob.train

    def stopped(job: TableJob, source: Any, config: Any, **more: Any) -> Any:
        if "callbacks" in more:  # the one that only plans
            return train(job, source, config=config, **more)
        raise Stopped("checkpoint-9 is saved, the same command with --resume continues it")

    monkeypatch.setattr(TableJob, "train", stopped)
    config = ForecastConfig(horizon=4, target=("y",), input_size=16, patch=4, hidden_size=16)
    given = {"horizon", "target", "input_size", "patch", "hidden_size", "steps"}
    with pytest.raises(Stopped, match="nothing follows") as caught:
        predict_forecaster(str(table), replace(config, steps=5000), given)
    assert "resume" not in str(caught.value)
