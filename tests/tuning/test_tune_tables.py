import itertools
import json
import re
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastlstm.cli.main import main
from fastlstm.errors import NonFiniteError
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.model.network import ForecasterConfig
from fastlstm.tuning import job, table_job, tune
from fastlstm.tuning.job import Space
from fastlstm.tuning.planned_run import plan_run
from fastlstm.tuning.size_limits import ModelCost, SizeLimits
from fastlstm.tuning.table_job import TableJob, forecast_cost, values_around
from fastlstm.tuning.tune import Search

BASE: dict[str, Any] = {
    "hidden_size": 128, "batch_size": 32, "learning_rate": 2e-3, "dropout": 0.5, "input_size": 96,
    "patch": 24, "normalize": "last", "threads": 1, "precision": "fp32",
}  # fmt: skip
SIZES = ["--target", "y", "--horizon", "4", "--input-size", "16", "--patch", "4"]


def test_options_of_changes():
    job = TableJob()
    assert job.options_of(BASE, {}) == BASE
    changed = job.options_of(BASE, {"size": 64, "lr": 0.5, "normalize": "none", "threads": 2})
    assert (changed["hidden_size"], changed["normalize"], changed["threads"]) == (64, "none", 2)
    assert changed["learning_rate"] == pytest.approx(1e-3)
    assert job.label_of({"size": 64, "dropout": 0.2}) == "64 units, dropout 0.2"
    assert job.label_of({}) == "default"


def test_the_input_is_a_multiple_of_the_patch():
    changed = TableJob().options_of(BASE, {"input": 120, "patch": 48})
    assert (changed["input_size"], changed["patch"]) == (96, 48)


def test_given_options_are_not_tuned():
    assert TableJob().open_axes(("size", "patch", "lr"), {"hidden_size", "tbptt"}) == ["lr"]


def test_values_fit_the_table():
    config = ForecastConfig(horizon=24, input_size=96, patch=24, learning_rate=2e-3)
    values = values_around(config, 8 * 32, 100)
    assert values["batch"] == [32, 16]
    assert values["input"] == [96, 48]
    assert values["patch"] == [24, 12]
    assert values["dropout"] == [0.1, 0.0, 0.2]
    assert values["normalize"] == ["last", "standard", "none"]
    assert values_around(config, 16 * 32, 191)["batch"] == [32, 64, 16]
    assert values_around(config, 15 * 32, 192)["batch"] == [32, 16], "an epoch has eight steps"
    assert values_around(config, 15 * 32, 191)["input"] == [96, 48]
    assert values_around(config, 15 * 32, 192)["input"] == [96, 48, 192]
    assert values_around(replace(config, horizon=48), 256, 100)["patch"] == [24, 12, 48]
    counts = ForecastConfig(horizon=24, input_size=96, patch=24, output="negative_binomial")
    assert values_around(counts, 256, 100)["normalize"] == ["last"]


def test_limits_count_one_forecast():
    small = ForecasterConfig(input_size=16, horizon=4, patch=4, hidden_size=32, embed_size=32)
    cost = forecast_cost(small, SizeLimits())
    assert 2 < cost.num_bytes / forecast_cost(small, SizeLimits(weights="int8")).num_bytes < 4.1
    refusal = SizeLimits(max_latency_s=0.5 * cost.latency_s).refusal(cost, "forecast")
    assert "us per forecast" in str(refusal)


def prepared(table, search, **changes):
    """Returns what is tuned of a table of which 504 rows are trained on."""
    values: dict[str, Any] = {
        "horizon": 4, "target": ("y",), "input_size": 16, "patch": 4, "hidden_size": 64,
        "steps": 10, "threads": 1,
    }  # fmt: skip
    found = list[Space]()

    def look(trainer):
        found.append(TableJob().prepare(trainer, search, lambda *_: None))

    plan_run(str(table), ForecastConfig(**{**values, **changes}), {"horizon"}, look,
             TableJob().train)  # fmt: skip
    return found[0]


def test_the_longest_input_leaves_room_for_the_horizon(table):
    search = Search(None, None, {"horizon"}, Path("unused"), axes=("input",))
    for length, tried in ((248, [124, 496]), (252, [124])):
        space = prepared(table, search, input_size=length, threads=None)
        assert "threads" not in space.options, "a command has no --threads None"
        assert space.values == {"input": [length, *tried]}
        assert space.first == [{"input": n} for n in tried]


def test_threads_and_precision_are_axes_if_named(table, monkeypatch):
    monkeypatch.setattr(job.hardware, "cores", lambda: 4)
    monkeypatch.setattr(job.hardware, "may_gain_by_bf16", lambda: True)
    search = Search(None, None, {"horizon"}, Path("unused"), axes=("threads", "precision"))
    space = prepared(table, search, precision="fp32")
    assert space.values == {"threads": [1, 4, 2], "precision": ["fp32", "bf16"]}


def test_limits_lead_to_smaller_sizes(table, monkeypatch):
    monkeypatch.setattr(
        table_job, "forecast_cost",
        lambda config, limits: ModelCost(1.0, 1000 * config.hidden_size, 0.9, 1.1),
    )  # fmt: skip
    limits = SizeLimits(max_bytes=100_000)
    search = Search(None, None, {"horizon"}, Path("unused"), axes=("size",), limits=limits)
    space = prepared(table, search, hidden_size=512)
    assert space.options["hidden_size"] == 64
    assert space.values == {"size": [64, 32]}
    assert [size["refusal"] is None for size in space.sizes][-2:] == [True, True]


def test_latency_is_the_mean_of_repeated_forecasts(monkeypatch):
    small = ForecasterConfig(input_size=16, horizon=4, patch=4, hidden_size=32, embed_size=32)
    ticks = itertools.count(0.0, 0.03)
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(table_job, "_LATENCY_S", 0.1)
    # 30 ms pass from each look at the clock to the next: three forecasts take 0.12 s.
    assert forecast_cost(small, SizeLimits()).latency_s == pytest.approx(0.04)


@pytest.mark.usefixtures("ended_after_two_steps")
def test_the_command_finds_settings_and_can_be_continued(
    table, tmp_path, ended_after_trials, monkeypatch,
    capsys,
):  # fmt: skip
    def short_run(*args):
        options, out = args[-4], args[-1]
        out.mkdir(parents=True)
        if options["learning_rate"] > 3e-3:
            raise NonFiniteError("the loss is NaN")
        loss = 0.5 - 0.01 * (options["hidden_size"] == 64) - 0.02 * (options["dropout"] == 0.2)
        return loss, loss

    monkeypatch.setattr(tune, "_train", short_run)
    ended_after_trials(12)
    monkeypatch.chdir(tmp_path)
    words = ["tune", str(table), *SIZES, "--out", "search", "--budget", "10s", "--tune-time",
             "100s", "--precision", "fp32", "--threads", "1", "--hidden-size", "64",
             "--axes", "batch,lr,dropout,input,patch,normalize"]  # fmt: skip
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert re.search("^best .*dropout 0.2: 0.4700 validation loss of its longest", shown, re.M)
    assert "learning rate x 2: failed: the loss is NaN" in shown
    assert main([*words, "--resume", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {trial["options"]["hidden_size"] for trial in facts["trials"]} == {64}
    options = [trial["options"] for trial in facts["trials"]]
    assert {each["input_size"] % each["patch"] for each in options} == {0}
    command = shlex.split(facts["command"])
    assert command[:3] == ["fastlstm", "train", str(table)]
    assert "--dropout 0.2" in facts["command"]
    assert main([*command[1:], "--eval-every", "5"]) == 0


def test_trials_are_compared_on_the_same_windows_without_the_test_part(table, tmp_path):
    config = ForecastConfig(
        horizon=4, target=("y",), input_size=16, patch=4, hidden_size=16, steps=10, threads=1
    )
    events: list[dict[str, Any]] = []
    TableJob().train(str(table), config, given={"horizon"}, out=tmp_path / "t",
                     observers=[events.append])  # fmt: skip
    kinds = {event["event"] for event in events}
    assert "eval" in kinds
    assert not kinds & {"test", "calibration", "forecast"}
    assert (tmp_path / "t" / "model.safetensors").exists()
    start, end = events[0], events[-1]
    found = TableJob().result(start, end, {}, Space({}, {}, [], []), 10.0, 60.0)
    assert found == (end["best_loss"],) * 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--target", "y"], "--horizon"),
        ([*SIZES, "--axes", "seq-length"], "some of size,batch,lr,dropout,input,patch,normalize,t"),
        ([*SIZES, "--budget", "60s", "--max-bytes", "1k"], "no size keeps the limits"),
    ],
)
def test_bad_input_is_refused(table, tmp_path, words, said, capsys):
    assert main(["tune", str(table), "--out", str(tmp_path / "search"), *words]) == 2
    assert said in capsys.readouterr().err
