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
    ConfigError,
    DataError,
    FormatError,
    RunDirectoryError,
    Stopped,
)
from fastlstm.forecast import evaluation
from fastlstm.forecast import train as forecast_run
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.splits import split_table
from fastlstm.forecast.task import ForecastTask
from fastlstm.forecast.train import train_forecaster
from fastlstm.report.history import read_history
from fastlstm.runs.run_directory import RunDirectory
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


def quick(**changes: Any) -> ForecastConfig:
    return ForecastConfig(**{**QUICK, **changes})


def events_of(source: Any, config: ForecastConfig, **run: Any) -> list[dict[str, Any]]:
    """Trains; returns the events."""
    events: list[dict[str, Any]] = []
    train_forecaster(source, config, observers=[events.append], **run)
    return events


def first(events: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(event for event in events if event["event"] == kind)


def texts(events: list[dict[str, Any]]) -> list[str]:
    return [event["text"] for event in events if event["event"] == "message"]


def num_scored(run: Path) -> int:
    """The validation windows that the evaluations of a run score."""
    found, _ = find_checkpoint(RunDirectory(run))
    assert found is not None
    return int(found.meta["progress"]["scored"])


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
    config = quick(**request.param)
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
    out, longer = tmp_path / "run", quick(steps=60)
    events = events_of(path, quick(), out=out)
    with pytest.raises(RunDirectoryError, match="already contains a run"):
        train_forecaster(path, quick(), out=out)
    events += (again := events_of(path, quick(), out=out, resume=True))
    assert sum(text.startswith("already complete: it ends after") for text in texts(again)) == 1
    assert first(again, "test")
    events += (more := events_of(path, longer, out=out, resume=True, given=["steps"]))
    assert more[-1]["step"] == 60
    assert [e["step"] for e in read_history(out / "metrics.jsonl").evals][-3:] == [36, 48, 60]
    told = [event["precision_why"] for event in events if event["event"] == "start"]
    assert told == ["the default", *["as in the first start"] * 2]
    found = train_forecaster(path, quick(), out=out, resume=True, given=["steps"])
    assert found.fitted.reason == "30 steps", "the first end, asked for again"
    with pytest.raises(ConfigError, match="`horizon=7`: this run was started with 6"):
        train_forecaster(path, quick(horizon=7), out=out, resume=True, given=["horizon"])
    pq.write_table(long_table(130), path)
    with pytest.raises(FormatError, match=rf"was started with {path}; .* or has changed since"):
        train_forecaster(path, longer, out=out, resume=True)
    with pytest.raises(DataError, match="there is no file"):
        train_forecaster(path + "x", longer, out=out)  # not that a run is there already


def test_the_errors_of_each_target_and_the_times_of_forecasts(path: str, tmp_path: Path) -> None:
    events = events_of(path, quick(target=("y", "temp")), out=tmp_path / "run")
    test, picture = first(events, "test"), first(events, "forecast")
    assert [one["target"] for one in test["targets"]] == ["y", "temp"]
    whole = test["scores"]["forecaster"]
    for name in ("mse", "mae"):
        sums = [one[name] * one["num_values"] for one in test["targets"]]
        assert sum(sums) == pytest.approx(whole[name] * whole["num_values"])
    naive = [one["seasonal_naive_mae"] for one in test["targets"]]
    assert sum(naive) / 2 == pytest.approx(test["scores"]["seasonal_naive"]["mae"])
    table = pq.read_table(path)
    rows = zip(*(table[name].to_pylist() for name in ("unique_id", "ds", "y")), strict=True)
    y = {(series, time): value for series, time, value in rows}
    assert picture["time_zone"] is None
    times = [datetime.datetime.fromisoformat(time) for time in picture["times"]]
    values = [y[picture["series"], time] for time in times]
    assert values == pytest.approx([*picture["past"], *picture["actual"]], rel=1e-5)


@pytest.mark.charts
def test_the_events_and_files_of_a_run(path: str, tmp_path: Path) -> None:
    out, started = tmp_path / "run", time.perf_counter()
    events = events_of(path, quick(log_every=10), out=out)
    wall_s = time.perf_counter() - started
    assert {"start", "eval", "checkpoint", "test", "calibration", "forecast"} <= {
        event["event"] for event in events
    }
    start, test, end = first(events, "start"), first(events, "test"), events[-1]
    assert start["kernels"]
    assert start["num_units"]["train"] == 3 * (72 - 30 + 1)
    assert set(test["scores"]) == {"forecaster", "ridge", "naive", "seasonal_naive"}
    assert test["windows"] == test["of_windows"]
    assert not any(text.startswith("evaluated ") for text in texts(events))
    spent = ("setup", "evaluations", "saving", "calibration", "judging", "report")
    parts_s = end["train_s"] + sum(end["spent_s"][name] for name in spent)
    assert parts_s <= end["elapsed_s"] <= wall_s
    assert end["elapsed_s"] == pytest.approx(wall_s, abs=1.0)
    assert end["test_error"]["measure"] == "rel_mae"  # of several series
    assert end["report"] == str(out / "report.html")
    model = Forecaster.load(out)
    assert model.predict(path).equals(Forecaster.load(out).predict(path))
    mse = model.backtest(frame=path)["forecaster"]["mse"]
    assert mse == pytest.approx(test["scores"]["forecaster"]["mse"])
    with pytest.raises(FormatError, match="is a checkpoint of a forecaster, which only `resume=T"):
        Forecaster.load(out / "checkpoint-30")
    assert json.loads((out / "config.json").read_text())["kind"] == "forecaster"
    report = (out / "report.html").read_text()
    for part in ("Test set", "Forecast of y", "Calibration of the intervals", "windows/s"):
        assert part in report
    assert "could not be drawn" not in report


def test_pictures_of_forecasts_are_in_units_of_the_table_however_far_from_0(tmp_path: Path) -> None:
    y = 1e9 + np.random.default_rng(0).permutation(120) / 8  # steps that float32 would lose
    events = events_of(y, quick(steps=2), out=tmp_path / "run")
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
    whole, config = long_table(120), quick(steps=1, **given)
    events = events_of(whole[: 240 + needed - 1], config)
    [warned] = [e["text"] for e in events if e.get("level") == "warning"]
    assert warned.partition("; forecasts of this table will leave series out")[0] == (
        f"1 of 3 series lack {needed} consecutive training rows ('s2' has {needed - 1}):"
        f" not trained on{advice}"
    )
    events = events_of(whole[: 240 + needed], config)
    if advice:  # what is told to be enough is
        events += events_of(whole[: 240 + needed - 1], quick(steps=1, input_size=18))
    assert not [text for text in texts(events) if "not trained on" in text]


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
    out = tmp_path / "run"
    stopped_after("checkpoint", path, quick(steps=None, budget="20s", evaluations=500), out)
    train_forecaster(path, quick(), out=out, resume=True, given=["steps"])
    assert num_scored(out) > 0


def test_a_resumed_run_keeps_its_validation_windows(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(long_table(2400), path)
    config, out = quick(evaluations=30, checkpoint_every=1), tmp_path / "run"
    monkeypatch.setattr(ForecastTask, "max_scored", 100)
    stopped_after("eval", path, config, out)
    monkeypatch.setattr(ForecastTask, "max_scored", 200)
    train_forecaster(path, config, out=out, resume=True)
    assert num_scored(out) == 100


@pytest.mark.usefixtures("rests_between_steps")
def test_a_budget_covers_scoring_the_test_part(path: str, tmp_path: Path, monkeypatch: Any) -> None:
    pq.write_table(long_table(2400), path)
    evaluate, scored = evaluation.evaluate_forecasts, list[Any]()

    def slow(*args: Any, should_continue: Any, **kwargs: Any) -> Any:
        def slowed(done: int) -> bool:
            time.sleep(0.5)
            return bool(should_continue(done))

        scored.append(args[2])
        return evaluate(*args, should_continue=slowed, **kwargs)

    monkeypatch.setattr(evaluation, "evaluate_forecasts", slow)
    monkeypatch.setattr(forecast_run.RunSession, "report_s", lambda _: 0.0)
    events = events_of(path, quick(steps=None, budget="10s"), out=tmp_path / "run")
    test = first(events, "test")
    # All of them, in batches of 64, would take 11 s of the 10.
    assert test["windows"] % 64 == 0
    assert 64 <= test["windows"] < test["of_windows"] == 1425
    (rows,) = scored
    places = np.searchsorted(np.sort(rows), np.sort(rows[:64]))
    assert np.diff([0, *places, len(rows)]).max() <= 3 * len(rows) / 64
    of = f"evaluated {test['windows']:,} of 1,425 windows, evenly spread: all would not fit"
    assert any(of in text for text in texts(events))
    shown = [e["total"] for e in events if e.get("doing") == "evaluating the test part"]
    assert set(shown) == {1425}


def test_a_stop_during_scoring_is_obeyed_and_resumed(path: str, tmp_path: Path) -> None:
    pq.write_table(long_table(2400), path)
    out, events = tmp_path / "run", list[dict[str, Any]]()

    def is_evaluating() -> bool:
        return any("evaluating the forecasts" in text for text in texts(events))

    with pytest.raises(Stopped, match="30 is saved, start the run again with `resume=True`"):
        train_forecaster(path, quick(), out=out, observers=[events.append], stop=is_evaluating)
    assert events[-1]["event"] == "end"
    assert events[-1]["reason"].startswith("stopped by")
    assert Forecaster.load(out).predict(path) is not None
    assert first(events_of(path, quick(), out=out, resume=True), "test")


def test_the_error_of_targets_in_several_units_has_none(tmp_path: Path) -> None:
    table = long_table(240, 1, temp=1e6 * np.sin(np.arange(240) / 4), unique_id=None)
    error = events_of(table, quick(steps=1, target="y,temp"), out=tmp_path / "run")[-1]
    assert (error["test_error"]["measure"], error["test_error"]["naive"]) == ("rel_mae", 1.0)


def test_the_chosen_input_size_fits_most_series() -> None:
    config = quick(steps=1, input_size=None, patch=None, split="80/10/10")
    sizes = []
    for num_short in (2, 1):  # of ten: a fifth decides, a tenth does not
        lengths = [60] * num_short + [400] * (10 - num_short)
        names = np.repeat([f"s{k:02}" for k in range(10)], lengths)
        rows = pa.concat_tables([long_table(n, 1) for n in lengths])
        table = rows.set_column(0, "unique_id", pa.array(names))
        sizes.append(train_forecaster(table, config).stored.config.input_size)
    assert sizes[0] <= 27 < sizes[1]  # type: ignore[operator]


def test_a_late_series_does_not_shorten_the_input_of_the_others() -> None:
    """It has no training rows, and enough of them to be forecast."""
    whole, events = long_table(400, 4), list[dict[str, Any]]()
    config = quick(steps=1, input_size=None, patch=None, split="80/10/10")
    for table in (whole, whole.take(np.r_[0:1200, 1530:1600])):
        events += events_of(table, config)
    sizes = [event["model"]["input_size"] for event in events if event["event"] == "start"]
    assert sizes == [156, 66]
    [told] = [text for text in texts(events) if "nine in ten" in text]
    assert "the input has 66 steps, not 162" in told
    assert "('s3' has 70 rows); `input_size=162`" in told


@pytest.mark.usefixtures("rests_between_steps")
@pytest.mark.parametrize(
    ("given", "num"),
    [
        ({"batch_size": 16}, 256),
        ({"batch_size": 400, "steps": 10}, 360),
        ({"batch_size": 16, "steps": None, "budget": "12s"}, None),
        ({"batch_size": 1000, "steps": 16}, 1425),
    ],
)
def test_an_evaluation_of_a_longer_run_reads_more_windows(
    path: str, tmp_path: Path, given: dict[str, Any], num: int | None
) -> None:
    pq.write_table(long_table(2400), path)
    config = quick(**{"evaluations": 1, "steps": 1, "checkpoint_every": 16, **given})
    events = events_of(path, config, out=tmp_path / "run")
    kept = num_scored(tmp_path / "run")
    assert num is None or kept == num
    told = [text for text in texts(events) if "each evaluation scores" in text]
    assert len(told) == (kept < 1425)
    assert all(f"scores {kept:,} of 1,425 validation windows" in text for text in told)


def test_a_run_without_a_test_part_has_no_scores(path: str, tmp_path: Path) -> None:
    events = events_of(path, quick(split="70/30/0", steps=3), out=tmp_path / "run")
    assert any(text.startswith("no test scores: test part") for text in texts(events))
    assert events[-1]["event"] == "end"


def test_before_the_first_evaluation_there_is_no_forecaster(path: str, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        train_forecaster(path, quick(), out=tmp_path / "run", stop=StopAt(0))
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
    config = quick(**{"steps": None, "eval_every": 2, **changes})
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


def test_a_report_that_cannot_be_written_is_a_warning(path: str, tmp_path: Path) -> None:
    (tmp_path / "run" / "report.html" / "in the way").mkdir(parents=True)
    events = events_of(path, quick(steps=3), out=tmp_path / "run")
    assert any(event.get("level") == "warning" for event in events)


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
    stopped_after("checkpoint", path, quick(), out, 2)
    monkeypatch.setattr(TrainingState, "capture", capture)
    waited = property(lambda _: 5.0, lambda *_: None)
    monkeypatch.setattr(WindowLoader, "wait_s", waited, raising=False)
    events: list[dict[str, Any]] = []
    more: dict[str, Any] = {"given": ["log_every"], "observers": [events.append]}
    found = train_forecaster(path, quick(log_every=1), out=out, resume=True, **more)
    assert first(events, "step")["units_per_s"] > 1.0
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
    config = quick(steps=1)
    trained = train_forecaster(table, config)
    split = split_table(trained.dataset.table, trained.dataset.frequency, config.split)
    events = evaluation.evaluation_events(
        trained.stored, trained.dataset, split, trained.inputs, lambda *_: True
    )
    picture = first(events, "forecast")
    assert picture["time_zone"] == shown
    written = [datetime.datetime.fromisoformat(time) for time in picture["times"]]
    assert {b - a for a, b in itertools.pairwise(written)} == {times[1] - times[0]}
    named = times if shown == zone else column.cast(pa.timestamp("us")).to_pylist()
    assert written[0] in named


@pytest.mark.parametrize("is_file", [True, False])
def test_only_a_table_of_files_is_said_to_be_in_the_cache(is_file, tmp_path):
    table = np.random.default_rng(0).normal(size=(50, 1))
    session = forecast_run._ForecastSession(None, [])
    np.save(tmp_path / "a.npy", table)
    config = ForecastConfig(horizon=2, cache_dir=str(tmp_path / "cache"))
    session._prepared(tmp_path / "a.npy" if is_file else table, config, None, None)
    assert session._cached_parts == ({"the table"} if is_file else set())
