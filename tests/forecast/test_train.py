"""Runs of forecasters: stopped and resumed bit-equal, budgets, scores, refusals."""

from __future__ import annotations

import datetime
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from pyarrow import parquet as pq

from fastlstm import Forecaster
from fastlstm.cli.main import main
from fastlstm.errors import (
    BudgetError,
    ConfigError,
    DataError,
    FormatError,
    RunDirectoryError,
    Stopped,
    StorageError,
)
from fastlstm.forecast import evaluation
from fastlstm.forecast import train as forecast_run
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.splits import split_table
from fastlstm.forecast.task import ForecastTask
from fastlstm.forecast.train import train_forecaster
from fastlstm.report.history import read_history
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.training import checkpoint as checkpoints
from fastlstm.training.checkpoint import find_checkpoint
from fastlstm.training.schedule import StopCriterion
from fastlstm.training.state import TrainingState
from fastlstm.training.task import Score
from series_frames import QUICK_RUN as QUICK
from series_frames import long_table


class StopAt:
    """A stop flag that is set after a number of polls."""

    name = "SIGTERM"

    def __init__(self, polls: int) -> None:
        self._left = polls

    def __call__(self) -> bool:
        self._left -= 1
        return self._left < 0


def weights(run: Path) -> dict[str, torch.Tensor]:
    found, damage = find_checkpoint(RunDirectory(run))
    assert found is not None
    assert not damage
    tensors = {f"{s} {n}": t for s, group in found.tensors.items() for n, t in group.items()}
    return {"step": torch.tensor(found.step), **tensors}


@pytest.fixture(
    scope="module", params=[{}, {"tbptt": 12, "batch_size": 2}, {"balance": True}], ids=str
)
def unstopped(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ForecastConfig, Path, Any]:
    """A configuration, a folder with its run `whole` and `table.parquet`, and the result."""
    folder = tmp_path_factory.mktemp("unstopped")
    pq.write_table(long_table(120), folder / "table.parquet")
    config = ForecastConfig(**{**QUICK, **request.param})
    trained = train_forecaster(str(folder / "table.parquet"), config, out=folder / "whole")
    return config, folder, trained


@pytest.mark.parametrize("polls", [0, 11, 31])
def test_a_stopped_run_goes_on_bit_equal(
    unstopped: tuple[ForecastConfig, Path, Any], tmp_path: Path, polls: int
) -> None:
    config, folder, whole = unstopped
    path = str(folder / "table.parquet")
    with pytest.raises(Stopped, match=r"is saved, start the run again with `resume=True`"):
        train_forecaster(path, config, out=tmp_path / "run", stop=StopAt(polls))
    again = train_forecaster(path, config, out=tmp_path / "run", resume=True)
    own, other = weights(folder / "whole"), weights(tmp_path / "run")
    assert own.keys() == other.keys()
    for name, tensor in own.items():
        assert torch.equal(tensor, other[name]), name
    assert again.fitted.best_loss == whole.fitted.best_loss
    assert again.fitted.units == whole.fitted.units
    runs = (tmp_path / "run", folder / "whole")
    seen, due = (read_history(run / "metrics.jsonl").evals for run in runs)
    assert [event["step"] for event in seen] == [event["step"] for event in due]
    assert not RunDirectory(tmp_path / "run").verify()


def test_a_resumed_run_may_change_its_end_only(path: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    events: list[dict[str, Any]] = []
    train_forecaster(path, ForecastConfig(**QUICK), out=out, observers=[events.append])
    with pytest.raises(RunDirectoryError, match="already contains a run"):
        train_forecaster(path, ForecastConfig(**QUICK), out=out)
    longer = ForecastConfig(**{**QUICK, "steps": 40})
    more: dict[str, Any] = {"given": ["steps"], "observers": [events.append]}
    found = train_forecaster(path, longer, out=out, resume=True, **more)
    assert found.fitted.steps == 40
    told = [event["precision_why"] for event in events if event["event"] == "start"]
    assert told == ["the default", "as in the first start"]
    other = ForecastConfig(**{**QUICK, "horizon": 7})
    with pytest.raises(ConfigError, match="`horizon=7`: this run was started with 6"):
        train_forecaster(path, other, out=out, resume=True, given=["horizon"])
    pq.write_table(long_table(130), path)
    with pytest.raises(FormatError, match=rf"was started with {path}; .* or has changed since"):
        train_forecaster(path, longer, out=out, resume=True)
    with pytest.raises(DataError, match="there is no file"):
        train_forecaster(path + "x", longer, out=out)  # not that a run is there already


def test_the_errors_of_each_target_and_the_times_of_forecasts(path: str, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    config = ForecastConfig(**{**QUICK, "target": ("y", "temp")})
    train_forecaster(path, config, out=tmp_path / "run", observers=[events.append])
    test = next(event for event in events if event["event"] == "test")
    first = next(event for event in events if event["event"] == "forecast")
    assert [one["target"] for one in test["targets"]] == ["y", "temp"]
    whole = test["scores"]["forecaster"]
    for name in ("mse", "mae"):
        sums = [one[name] * one["num_values"] for one in test["targets"]]
        assert sum(sums) == pytest.approx(whole[name] * whole["num_values"])
    naive = [one["seasonal_naive_mae"] for one in test["targets"]]
    assert sum(naive) / 2 == pytest.approx(test["scores"]["seasonal_naive"]["mae"])
    for one in test["targets"]:
        steps = [(part["first"], part["last"]) for part in one["by_step"]]
        assert steps == [(1, 1), (2, 3), (4, 4), (5, 6)]
        sums = [part["mae"] * (1 + part["last"] - part["first"]) for part in one["by_step"]]
        assert sum(sums) / 6 == pytest.approx(one["mae"])
    table = pq.read_table(path)
    rows = zip(*(table[name].to_pylist() for name in ("unique_id", "ds", "y")), strict=True)
    y = {(series, time): value for series, time, value in rows}
    assert first["time_zone"] is None
    times = [datetime.datetime.fromisoformat(time) for time in first["times"]]
    values = [y[first["series"], time] for time in times]
    assert values == pytest.approx([*first["past"], *first["actual"]], rel=1e-5)


@pytest.mark.charts
def test_the_events_and_files_of_a_run(path: str, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    config = ForecastConfig(**QUICK, log_every=10)
    trained = train_forecaster(path, config, out=tmp_path / "run", observers=[events.append])
    kinds = [event["event"] for event in events]
    assert kinds[-1] == "end"
    assert {"start", "eval", "checkpoint", "test", "calibration", "forecast"} <= set(kinds)
    start = next(event for event in events if event["event"] == "start")
    assert start["kernels"]
    assert start["num_units"]["train"] == 3 * (72 - 30 + 1)
    test = next(event for event in events if event["event"] == "test")
    assert set(test["scores"]) == {"forecaster", "ridge", "naive", "seasonal_naive"}
    model = Forecaster.load(tmp_path / "run")
    assert model.predict(path).equals(Forecaster.load(tmp_path / "run").predict(path))
    assert model.backtest(frame=path)["forecaster"]["mse"] == pytest.approx(
        test["scores"]["forecaster"]["mse"]
    )
    assert json.loads((tmp_path / "run/config.json").read_text())["kind"] == "forecaster"
    assert trained.stored.config.input_size == 24
    report = (tmp_path / "run" / "report.html").read_text()
    for part in ("Test set", "Forecast of y", "Calibration of the intervals", "windows/s"):
        assert part in report
    assert "could not be drawn" not in report


def test_pictures_of_forecasts_are_in_units_of_the_table_however_far_from_0(tmp_path: Path) -> None:
    y = 1e9 + np.random.default_rng(0).permutation(120) / 8  # steps that float32 would lose
    events: list[dict[str, Any]] = []
    config = ForecastConfig(**{**QUICK, "steps": 2})
    train_forecaster(y, config, out=tmp_path / "run", observers=[events.append])
    pictures = [event for event in events if event["event"] == "forecast"]
    assert pictures
    for picture in pictures:
        shown = np.array(picture["past"] + picture["actual"])
        first = int(np.abs(y - shown[0]).argmin())
        np.testing.assert_allclose(shown - 1e9, y[first : first + len(shown)] - 1e9, atol=1e-3)
        for name in ("low", "center", "high"):
            assert np.abs(np.array(picture[name]) - 1e9).max() < 60


@pytest.mark.parametrize(
    ("given", "needed", "advice"),
    [({}, 30, "; `input_size=18` takes all"), ({"tbptt": 12}, 18, "")],
)
def test_series_too_short_to_be_trained_on_are_named(
    given: dict[str, Any], needed: int, advice: str
) -> None:
    events: list[dict[str, Any]] = []
    whole = long_table(120)
    keep = list(range(240 + needed - 1))
    config = ForecastConfig(**{**QUICK, "steps": 1, **given})
    train_forecaster(whole.take(keep), config, observers=[events.append])
    warned = [e["text"] for e in events if e["event"] == "message" and e["level"] == "warning"]
    assert len(warned) == 1
    assert warned[0].partition("; forecasts of this table will leave series out: series 's2' ends")[
        0
    ] == (
        f"1 of 3 series lack {needed} consecutive training rows ('s2' has {needed - 1}):"
        f" not trained on{advice}"
    )
    events.clear()
    if advice:  # what is told to be enough is
        smaller = ForecastConfig(**{**QUICK, "steps": 1, "input_size": 18})
        train_forecaster(whole.take(keep), smaller, observers=[events.append])
    train_forecaster(whole.take([*keep, keep[-1] + 1]), config, observers=[events.append])
    assert not [e for e in events if "not trained on" in e.get("text", "")]


def stopped_after(
    kind: str, path: str, config: ForecastConfig, out: Path, num: int = 1
) -> list[dict[str, Any]]:
    """Runs until `num` events of a kind; returns all events."""
    events: list[dict[str, Any]] = []
    with pytest.raises(Stopped, match=r"is saved, start the run again with `resume=True`"):
        train_forecaster(
            path, config, out=out, observers=[events.append],
            stop=lambda: sum(event["event"] == kind for event in events) >= num,
        )  # fmt: skip
    return events


def test_a_stop_before_the_first_evaluation_is_resumed(path: str, tmp_path: Path) -> None:
    config = ForecastConfig(**{**QUICK, "steps": None, "budget": "20s", "evaluations": 500})
    stopped_after("checkpoint", path, config, tmp_path / "run")
    train_forecaster(
        path, ForecastConfig(**QUICK), out=tmp_path / "run", resume=True, given=["steps"]
    )
    found, _ = find_checkpoint(RunDirectory(tmp_path / "run"))
    assert found is not None
    assert found.meta["progress"]["scored"] > 0


def test_a_resumed_run_keeps_its_validation_windows(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(long_table(2400), path)
    run = RunDirectory(tmp_path / "run")
    config = ForecastConfig(**{**QUICK, "evaluations": 30, "checkpoint_every": 1})
    monkeypatch.setattr(ForecastTask, "max_scored", 100)
    stopped_after("eval", path, config, run.path)
    monkeypatch.setattr(ForecastTask, "max_scored", 200)
    train_forecaster(path, config, out=run.path, resume=True)
    found, _ = find_checkpoint(run)
    assert found is not None
    assert found.meta["progress"]["scored"] == 100


@pytest.mark.usefixtures("rests_between_steps")
def test_a_budget_covers_scoring_the_test_part(path: str, tmp_path: Path, monkeypatch: Any) -> None:
    pq.write_table(long_table(2400), path)
    evaluate = evaluation.evaluate_forecasts

    scored: list[Any] = []

    def slow(*args: Any, **kwargs: Any) -> Any:
        scored.append(args[2])
        should_continue = kwargs.pop("should_continue")

        def slowed(done: int) -> bool:
            time.sleep(0.5)
            return bool(should_continue(done))

        return evaluate(*args, should_continue=slowed, **kwargs)

    monkeypatch.setattr(evaluation, "evaluate_forecasts", slow)
    monkeypatch.setattr(forecast_run.RunSession, "report_s", lambda _: 0.0)
    events: list[dict[str, Any]] = []
    config = ForecastConfig(**{**QUICK, "steps": None, "budget": "10s"})
    train_forecaster(path, config, out=tmp_path / "run", observers=[events.append])
    test = next(event for event in events if event["event"] == "test")
    # All of them, in batches of 64, would take 11 s of the 10.
    assert test["windows"] % 64 == 0
    assert 64 <= test["windows"] < test["of_windows"] == 1425
    (rows,) = scored
    places = np.searchsorted(np.sort(rows), np.sort(rows[:64]))
    assert np.diff([0, *places, len(rows)]).max() <= 3 * len(rows) / 64
    said = [event.get("text", "") for event in events]
    of = f"evaluated {test['windows']:,} of 1,425 windows, evenly spread: all would not fit"
    assert any(of in text for text in said)
    shown = [
        e for e in events if e["event"] == "progress" and e["doing"] == "evaluating the test part"
    ]
    assert [e["total"] for e in shown] == [1425] * len(shown)
    assert shown


def test_a_run_by_steps_scores_every_window(path: str, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    train_forecaster(path, ForecastConfig(**QUICK), out=tmp_path / "run", observers=[events.append])
    test = next(event for event in events if event["event"] == "test")
    assert test["windows"] == test["of_windows"]
    assert not any("evaluated " in event.get("text", "") for event in events)


def test_a_stop_during_scoring_is_obeyed_and_resumed(path: str, tmp_path: Path) -> None:
    pq.write_table(long_table(2400), path)
    out, config = tmp_path / "run", ForecastConfig(**QUICK)
    events: list[dict[str, Any]] = []

    def is_evaluating() -> bool:
        return any("evaluating the forecasts" in event.get("text", "") for event in events)

    with pytest.raises(Stopped, match="30 is saved, start the run again with `resume=True`"):
        train_forecaster(path, config, out=out, observers=[events.append], stop=is_evaluating)
    assert events[-1]["event"] == "end"
    assert events[-1]["reason"].startswith("stopped by")
    assert Forecaster.load(out).predict(path) is not None
    events.clear()
    train_forecaster(path, config, out=out, resume=True, observers=[events.append])
    assert any(event["event"] == "test" for event in events)


@pytest.mark.usefixtures("rests_between_steps")
def test_resuming_a_run_with_a_used_up_budget_is_an_error(path: str, tmp_path: Path) -> None:
    config, out = ForecastConfig(**{**QUICK, "steps": None, "budget": "36s"}), tmp_path / "run"
    train_forecaster(path, config, out=out, began=time.perf_counter() - 30.0)
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    with pytest.raises(BudgetError, match="trained 0 further steps: the run has used its budget"):
        train_forecaster(path, config, out=out, resume=True)
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before


def test_a_resumed_run_without_steps_left_says_so(path: str, tmp_path: Path) -> None:
    config, out = ForecastConfig(**QUICK), tmp_path / "run"
    train_forecaster(path, config, out=out)
    events: list[dict[str, Any]] = []
    train_forecaster(path, config, out=out, resume=True, observers=[events.append])
    said = [event["text"] for event in events if event["event"] == "message"]
    assert sum(text.startswith("already complete: it ends after") for text in said) == 1
    assert any(event["event"] == "test" for event in events)


def test_a_budget_used_up_by_setup_is_an_error(path: str, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    config = ForecastConfig(**{**QUICK, "steps": None, "budget": "5s"})
    out = tmp_path / "run"
    with pytest.raises(BudgetError, match="trained 0 steps: the budget was too small for set-up"):
        train_forecaster(
            path, config, out=out, observers=[events.append], began=time.perf_counter() - 5.0
        )
    assert not any(event["event"] in ("end", "eval", "checkpoint") for event in events)
    assert not RunDirectory(out).has_published()
    assert not (out / "report.html").exists()
    assert "trained 0 steps" in read_history(out / "metrics.jsonl").end["reason"]
    found = train_forecaster(path, ForecastConfig(**QUICK), out=out)
    assert found.fitted.steps == 30  # the place is free for a run with more time
    with pytest.raises(BudgetError):
        train_forecaster(path, config, began=time.perf_counter() - 5.0)


def test_the_parts_of_the_time_add_up(path: str, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    started = time.perf_counter()
    train_forecaster(path, ForecastConfig(**QUICK), out=tmp_path / "run", observers=[events.append])
    wall_s = time.perf_counter() - started
    end = events[-1]
    assert {"setup", "evaluations", "saving", "calibration", "judging", "report"} <= set(
        end["spent_s"]
    )
    parts_s = end["train_s"] + sum(end["spent_s"].values())
    assert parts_s <= end["elapsed_s"] <= wall_s
    assert end["elapsed_s"] == pytest.approx(wall_s, abs=1.0)
    assert end["test_error"]["measure"] == "rel_mae"  # of several series
    assert end["report"] == str(tmp_path / "run" / "report.html")


def test_the_error_of_targets_in_several_units_has_none(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    table = long_table(240, 1, temp=1e6 * np.sin(np.arange(240) / 4), unique_id=None)
    config = ForecastConfig(**{**QUICK, "steps": 1}, target="y,temp")
    train_forecaster(table, config, out=tmp_path / "run", observers=[events.append])
    error = events[-1]["test_error"]
    assert (error["measure"], error["naive"]) == ("rel_mae", 1.0)


def test_the_parts_of_a_resumed_run_add_up(path: str, tmp_path: Path) -> None:
    config, out = ForecastConfig(**QUICK), tmp_path / "run"
    with pytest.raises(Stopped):  # a start whose set-up took 30 s
        train_forecaster(path, config, out=out, stop=StopAt(11), began=time.perf_counter() - 30.0)
    events: list[dict[str, Any]] = []
    train_forecaster(path, config, out=out, resume=True, observers=[events.append])
    end = events[-1]
    parts_s = end["train_s"] + sum(end["spent_s"].values())
    assert 30.0 < end["spent_s"]["setup"] < parts_s <= end["elapsed_s"]


def test_the_chosen_input_size_fits_most_series() -> None:
    quick = {**QUICK, "steps": 1, "input_size": None, "patch": None, "split": "80/10/10"}
    lengths = [60] * 2 + [400] * 8  # a fifth is short: they decide; below a tenth they would not
    tables = [long_table(n, 1, unique_id=[f"s{k:02}"] * n) for k, n in enumerate(lengths)]
    sizes = []
    for some in (tables, tables[1:] + tables[2:] + tables[2:]):
        names = [f"s{k:02}" for k, t in enumerate(some) for _ in range(len(t))]
        table = pa.concat_tables(some).set_column(0, "unique_id", pa.array(names))
        stored = train_forecaster(table, ForecastConfig(**quick)).stored
        sizes.append(stored.config.input_size)
    assert sizes[0] is not None
    assert sizes[1] is not None
    assert sizes[0] <= 27 < sizes[1]


def test_a_late_series_does_not_shorten_the_input_of_the_others() -> None:
    """It has no training rows, and enough of them to be forecast."""
    whole, events = long_table(400, 4), list[dict[str, Any]]()
    late = whole.take(np.r_[0:1200, 1530:1600])
    quick = {**QUICK, "steps": 1, "input_size": None, "patch": None, "split": "80/10/10"}
    sizes = []
    for table in (whole, late):
        trained = train_forecaster(table, ForecastConfig(**quick), observers=[events.append])
        sizes.append(trained.stored.config.input_size)
    assert sizes == [156, 66]
    told = [event["text"] for event in events if "nine in ten" in event.get("text", "")]
    assert len(told) == 1
    assert "the input has 66 steps, not 162" in told[0]
    assert "('s3' has 70 rows); `input_size=162`" in told[0]


@pytest.mark.usefixtures("rests_between_steps")
def test_an_evaluation_of_a_longer_run_reads_more_windows(path: str, tmp_path: Path) -> None:
    pq.write_table(long_table(2400), path)
    quick = {**QUICK, "evaluations": 1, "steps": 1, "checkpoint_every": 16}
    for given, num in (
        ({"batch_size": 16}, 256),
        ({"batch_size": 400, "steps": 10}, 360),
        ({"batch_size": 16, "steps": None, "budget": "6s"}, None),
        ({"batch_size": 1000, "steps": 16}, 1425),
    ):
        out = tmp_path / str(given)
        events: list[dict[str, Any]] = []
        config = ForecastConfig(**{**quick, **given})
        train_forecaster(path, config, out=out, observers=[events.append])
        said = [e["text"] for e in events if "each evaluation scores" in e.get("text", "")]
        found, _ = find_checkpoint(RunDirectory(out))
        assert found is not None
        kept = found.meta["progress"]["scored"]
        assert num is None or kept == num
        assert bool(said) == (kept < 1425)
        assert not said or f"scores {kept:,} of 1,425 validation windows" in said[0]


def test_a_run_without_a_test_part_has_no_scores(path: str, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    config = ForecastConfig(**{**QUICK, "split": "70/30/0", "steps": 3})
    train_forecaster(path, config, out=tmp_path / "run", observers=[events.append])
    assert any(e["event"] == "message" and "no test scores" in e["text"] for e in events)
    assert events[-1]["event"] == "end"


def test_before_the_first_evaluation_there_is_no_forecaster(path: str, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        train_forecaster(path, ForecastConfig(**QUICK), out=tmp_path / "run", stop=StopAt(0))
    with pytest.raises(RunDirectoryError, match="no model yet"):
        Forecaster.load(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="no such run; train one with"):
        Forecaster.load(tmp_path / "nothing")


def loss_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the loss of a run of 40 steps rise from the second evaluation on."""
    losses = iter([1.0, 0.5, *[0.6] * 100])
    monkeypatch.setattr(ForecastTask, "score", lambda *_: Score(next(losses), 1))
    monkeypatch.setattr(StopCriterion, "progress", lambda end, step, *_: min(1.0, step / 40))


@pytest.mark.parametrize(
    ("changes", "is_early"),
    [
        ({"budget": "100s"}, True),
        ({"budget": "100s", "patience": 30}, False),
        ({"budget": "100s", "output": "student_t"}, False),
        ({"steps": 40}, False),
    ],
)
def test_a_rising_loss_ends_a_budget_early(
    path: str, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], is_early: bool
) -> None:
    loss_rises(monkeypatch)
    config = ForecastConfig(**{**QUICK, "steps": None, "eval_every": 2, **changes})
    fitted = train_forecaster(path, config, ends_early=True).fitted
    assert fitted.steps == (14 if is_early else 40)
    assert ("since step 4; a shorter run is enough" in fitted.reason) == is_early


def test_only_fit_and_train_end_a_budget_early(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**QUICK, "steps": None, "eval_every": 2, "budget": "100s"}
    loss_rises(monkeypatch)
    with pytest.warns(UserWarning, match="ended after 14 steps"):
        assert Forecaster(**options).fit(path).fitted_.steps == 14
    loss_rises(monkeypatch)
    assert train_forecaster(path, ForecastConfig(**options)).fitted.steps == 40
    given: dict[str, Any] = {}
    monkeypatch.setattr(forecast_run, "train_forecaster", lambda *_, **own: given.update(own))
    assert main(["train", path, "--horizon", "2", "--out", str(tmp_path / "run")]) == 0
    assert given["ends_early"]


def test_a_resumed_run_with_more_steps_is_evaluated_on_the_way(path: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train_forecaster(path, ForecastConfig(**QUICK), out=out)
    longer = ForecastConfig(**{**QUICK, "steps": 60})
    train_forecaster(path, longer, out=out, resume=True, given=["steps"])
    steps = [event["step"] for event in read_history(out / "metrics.jsonl").evals]
    assert [step for step in steps if step > 30] == [36, 48, 60]
    again = ForecastConfig(**QUICK)  # the first end, asked for again
    found = train_forecaster(path, again, out=out, resume=True, given=["steps"])
    assert found.fitted.reason == "30 steps"


def test_a_checkpoint_is_for_resuming_only(path: str, tmp_path: Path) -> None:
    train_forecaster(path, ForecastConfig(**QUICK), out=tmp_path / "run")
    with pytest.raises(
        FormatError, match="is a checkpoint of a forecaster, which only `resume=True`"
    ):
        Forecaster.load(tmp_path / "run" / "checkpoint-30")


def test_a_report_that_cannot_be_written_is_a_warning(path: str, tmp_path: Path) -> None:
    (tmp_path / "run" / "report.html").mkdir(parents=True)
    (tmp_path / "run" / "report.html" / "in the way").touch()
    events: list[dict[str, Any]] = []
    config = ForecastConfig(**{**QUICK, "steps": 3})
    train_forecaster(path, config, out=tmp_path / "run", observers=[events.append])
    assert any(e["event"] == "message" and e["level"] == "warning" for e in events)


def test_the_time_left_counts_the_evaluations_to_come(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = ForecastTask.evaluate_blocks

    def slow(task: ForecastTask, *given: Any) -> Any:
        time.sleep(0.2)
        return evaluate(task, *given)

    monkeypatch.setattr(ForecastTask, "evaluate_blocks", slow)
    events: list[dict[str, Any]] = []
    train_forecaster(path, ForecastConfig(**QUICK, log_every=1), observers=[events.append])
    first = next(k for k, event in enumerate(events) if event["event"] == "eval")
    left = next(event["eta_s"] for event in events[first:] if event["event"] == "step")
    assert left > 4 * 0.2  # of five evaluations four are to come


def test_a_failed_checkpoint_is_retried_later(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, refused = checkpoints.save_checkpoint, []

    def full(*args: Any, **kwargs: Any) -> Path:
        if 0 < args[1].step < 30:
            refused.append(args[1].step)
            raise StorageError("no space left")
        return save(*args, **kwargs)

    monkeypatch.setattr(checkpoints, "save_checkpoint", full)
    monkeypatch.setattr("fastlstm.training.checkpoint._FIRST_SAVE_S", 0.0)
    config = ForecastConfig(**{**QUICK, "checkpoint_every": None})
    train_forecaster(path, config, out=tmp_path / "run")
    assert refused == [1], "after a minute, and not at every step"


def test_rates_of_a_resumed_run_are_of_its_own_steps(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first seven steps of the run took 1000 s, on a busy machine."""
    from fastlstm.forecast.data.window_loader import WindowLoader

    capture, out = TrainingState.capture, tmp_path / "run"

    def late(state: TrainingState, *given: Any) -> Any:
        state.progress.train_s += 1000.0
        return capture(state, *given)

    monkeypatch.setattr(TrainingState, "capture", late)
    stopped_after("checkpoint", path, ForecastConfig(**QUICK), out, 2)
    monkeypatch.setattr(TrainingState, "capture", capture)
    waited = property(lambda _: 5.0, lambda *_: None)
    monkeypatch.setattr(WindowLoader, "wait_s", waited, raising=False)
    events: list[dict[str, Any]] = []
    found = train_forecaster(
        path,
        ForecastConfig(**QUICK, log_every=1),
        out=out,
        resume=True,
        given=["log_every"],
        observers=[events.append],
    )
    first = next(event for event in events if event["event"] == "step")
    assert first["units_per_s"] > 1.0
    assert found.fitted.input_wait_share > 0.01


@pytest.mark.parametrize(
    ("step_us", "zone", "shown"),
    [(3_600_000_000, None, None), (3_600_000_000, "UTC", "UTC"),
     (3_600_000_000, "Europe/Berlin", "UTC"), (86_400_000_000, "Europe/Berlin", "Europe/Berlin"),
     (500_000, None, None)],
)  # fmt: skip
def test_times_of_forecasts_are_in_the_named_zone(
    step_us: int, zone: str | None, shown: str | None
) -> None:
    start = datetime.datetime(2020, 1, 1)
    times = [start + datetime.timedelta(microseconds=step_us * k) for k in range(120)]
    plain = pa.array(times, pa.timestamp("us"))
    column = plain if zone is None else pc.assume_timezone(plain, zone)
    table = pa.table({"ds": column, "y": np.random.default_rng(0).normal(size=120)})
    config = ForecastConfig(**{**QUICK, "steps": 1})
    trained = train_forecaster(table, config)
    split = split_table(trained.dataset.table, trained.dataset.frequency, config.split)
    events = evaluation.evaluation_events(
        trained.stored, trained.dataset, split, trained.inputs, lambda *_: True
    )
    picture = next(event for event in events if event["event"] == "forecast")
    assert picture["time_zone"] == shown
    written = [datetime.datetime.fromisoformat(time) for time in picture["times"]]
    assert {b - a for a, b in itertools.pairwise(written)} == {times[1] - times[0]}
    named = times if shown == zone else column.cast(pa.timestamp("us")).to_pylist()
    assert written[0] in named
