import itertools
import json
import shlex
from dataclasses import replace
from typing import Any

import pytest

from fastlstm.cli.main import main
from fastlstm.cli.predict import table_rows as rows
from fastlstm.errors import UsageError
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.task import ForecastTask
from fastlstm.tuning import predict
from fastlstm.tuning.predict import (
    KEPT_GAIN,
    MeasuredRuns,
    TablePrediction,
    loss_after,
    predict_forecaster,
)

SIZES = ["--target", "y", "--horizon", "4", "--input-size", "16", "--patch", "4",
         "--hidden-size", "16", "--threads", "1"]  # fmt: skip


def of(**changes):
    """The configuration of `SIZES`."""
    sizes: dict[str, Any] = {"input_size": 16, "patch": 4, "hidden_size": 16, "threads": 1}
    return ForecastConfig(**{"horizon": 4, "target": ("y",), **sizes, **changes})


def test_a_doubling_gains_a_share_of_the_previous_gain():
    losses = [loss_after(50.0 * 2**n, 50, 0.54, 0.5) for n in range(4)]
    gains = [a.loss - b.loss for a, b in itertools.pairwise(losses)]
    assert losses[0].loss == pytest.approx(0.5)
    assert gains[0] == pytest.approx(0.04 * KEPT_GAIN)
    assert gains[2] / gains[1] == pytest.approx(KEPT_GAIN)
    assert all(loss.low < loss.loss < loss.high for loss in losses)
    assert losses[3].high - losses[3].low > losses[1].high - losses[1].low


def test_if_the_longer_run_is_no_better_all_lengths_are_alike():
    losses = [loss_after(steps, 50, 0.49, 0.5) for steps in (25, 100, 5000)]
    assert [loss.loss for loss in losses] == [0.5, 0.5, 0.5]
    assert losses[2].low < 0.49


def test_a_likelihood_may_be_below_zero():
    found = loss_after(100, 50, -0.4, -0.5)
    assert found.low < found.loss < -0.5 < found.high + 0.1


def test_steps_are_predicted_from_a_tenth_of_them(table):
    found = predict_forecaster(str(table), of(steps=400), {"horizon", "hidden_size", "steps"})
    assert (found.measured.steps, found.steps, found.fixed) == (60, 400.0, {})
    whole = found.after(found.steps)
    assert whole.low < whole.loss <= found.measured.loss
    assert "give a longer --measure" not in " ".join(text for _, text in rows(found, "train"))


def test_the_command_prints_the_prediction_and_what_trains_it(
    table, tmp_path, monkeypatch,
    capsys, request,
):  # fmt: skip
    def few_steps(config, *_):
        return replace(config, steps=30, budget=None)

    monkeypatch.setattr(predict, "_short", few_steps)
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
    request.getfixturevalue("ended_after_two_steps")
    assert main([*command[1:at], "--budget", "10s", *command[at + 2 :]]) == 0
    assert "finished" in capsys.readouterr().out


def test_two_short_runs_predict_the_number_of_steps(table, monkeypatch):
    runs = []

    def ended(source, config, given, *_):
        runs.append((config.budget, config.steps, "hidden_size" in given))
        steps = config.steps or 100
        return {
            "step": steps, "best_loss": {100: 0.4, 50: 0.5}[steps], "elapsed_s": 0.05 * steps,
            "train_s": 0.02 * steps, "units": 32 * steps, "spent_s": {"setup": 1.0},
        }  # fmt: skip

    monkeypatch.setattr(predict, "end_of_run", ended)
    monkeypatch.setattr(ForecastTask, "finish_s", lambda task, window_s: 1e5 * window_s)
    found = predict_forecaster(str(table), of(budget="100s"), {"horizon", "budget"}, 10.0)
    assert runs == [("6.5s", None, True), (None, 50, True)]
    assert (found.measured.steps, found.measured.seconds) == (100, 7.5)
    assert (found.measured.half_loss, found.measured.loss) == (0.5, 0.4)
    assert found.after(200.0).loss < 0.4
    # A step of 32 windows takes 20 ms; a forecast of one a third of its part of that.
    assert found.closing_s == pytest.approx(1e5 * 0.02 / 32 / 3)
    assert found.seconds_for(found.steps) == pytest.approx(100.0)
    assert found.steps < (100.0 - 1.0 - found.closing_s) / 0.02


def shown(half, **changes):
    measured = MeasuredRuns(100, 0.5, half, seconds=30.0, step_s=0.2, setup_s=3.0)
    found = TablePrediction(measured, 1000.0, **{"closing_s": 40.0, "fixed": {}, **changes})
    return "\n".join(f"{label} {text}" for label, text in rows(found, "fastlstm train"))


def test_a_longer_run_without_gain_is_printed():
    assert "a longer run gains less than 1 %" in shown(0.502)
    assert "any length ends alike" in shown(0.499)
    assert "a longer run" not in shown(0.6)
    assert "give a longer --measure" not in shown(0.6)
    assert "0.5000 validation loss after 100 steps, 0.6000 after 50 steps: 0:30" in shown(0.6)
    assert "10 times the short run" in shown(0.6)
    assert "--hidden-size 64" in shown(0.6, fixed={"hidden_size": 64})


def test_a_run_as_short_as_the_short_run_is_refused(table):
    with pytest.raises(UsageError, match="takes 20 steps and the short run 60 steps: train it"):
        predict_forecaster(str(table), of(steps=20), {"steps", "hidden_size"})


def test_a_table_without_a_horizon_says_so(table, capsys):
    assert main(["predict", str(table), "--budget", "60s"]) == 2
    said = capsys.readouterr().err
    assert "give --horizon N" in said
    assert "--as-text" not in said
