"""Figures of a backtest, recomputed with NumPy and pandas; the events about the test part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from fastlstm import Forecaster
from fastlstm.forecast import evaluation
from fastlstm.forecast.data.error_measures import StepErrors
from fastlstm.forecast.data.splits import split_table
from fastlstm.forecast.data.timeline import Frequency
from fastlstm.forecast.evaluation import (
    _target_errors,
    coverage_note,
    evaluation_events,
    season_of,
)
from forecast_server import fit_plain, h
from series_frames import long_table

pd = pytest.importorskip("pandas")

HORIZON, INPUT, SEASON = 6, 24, 24
ROWS, TRAIN, VALID = 240, 144, 48
QUICK: dict[str, Any] = {
    "horizon": HORIZON, "input_size": INPUT, "patch": 6, "hidden_size": 16, "steps": 20,
    "dropout": 0.0, "learning_rate": 0.01, "split": (TRAIN, VALID, ROWS - TRAIN - VALID),
}  # fmt: skip


def values(missing: float, num_series: int = 3) -> NDArray[np.float32]:
    """Random walks with a daily wave, shape ``(series, rows)``; a share `missing` is NaN."""
    rng = np.random.default_rng(1)
    walk = rng.normal(size=(num_series, ROWS)).cumsum(1)
    y = walk + 2 * np.sin(np.arange(ROWS) * (2 * np.pi / 24)) + 5 * np.arange(num_series)[:, None]
    y[:, :-1][rng.random(y.shape)[:, :-1] < missing] = np.nan  # rows without targets at the end go
    return y.astype(np.float32)


def table(y: NDArray[np.float32]) -> pa.Table:
    return long_table(y.shape[1], y.shape[0], y=y.reshape(-1), temp=None)


def windows_of(y: NDArray[np.float32]) -> list[tuple[int, int]]:
    """Series and first row of the horizon of every test window."""
    first, last = TRAIN + VALID, ROWS - HORIZON
    return [(s, origin) for s in range(len(y)) for origin in range(first, last + 1)]


def naive_of(y: NDArray[np.float32], origins: list[tuple[int, int]]) -> dict[str, Any]:
    found: dict[str, list[Any]] = {"actual": [], "naive": [], "seasonal_naive": []}
    frames = [pd.Series(row) for row in y.astype(np.float64)]
    filled = [frame.ffill() for frame in frames]
    by_season = [frame.groupby(np.arange(ROWS) % SEASON).ffill() for frame in frames]
    for s, origin in origins:
        last = filled[s][origin - 1]
        again = by_season[s][origin - SEASON + np.arange(HORIZON) % SEASON].to_numpy()
        found["actual"].append(y[s, origin : origin + HORIZON])
        found["naive"].append(np.full(HORIZON, last))
        found["seasonal_naive"].append(np.where(np.isnan(again), last, again))
    return {name: np.array(rows, dtype=np.float64) for name, rows in found.items()}


def errors_of(
    found: NDArray[np.float64], about: dict[str, Any], scale: NDArray[np.float64]
) -> dict[str, float]:
    actual, naive = about["actual"], about["naive"]
    is_there = ~np.isnan(actual)
    f, a, n = found[is_there], actual[is_there], naive[is_there]
    q = np.broadcast_to(scale[:, None], actual.shape)[is_there]
    error = np.abs(f - a)
    unit = about.get("unit", np.ones_like(actual))[is_there]
    return {
        "num_values": len(a),
        "mse": np.mean(error**2),
        "mae": np.mean(error),
        "rmse": np.mean(error**2) ** 0.5,
        "smape": np.mean(2 * error / np.maximum(np.abs(f) + np.abs(a), 1e-9)),
        "rel_mae": (error / unit).mean() / (np.abs(n - a) / unit).mean(),
        "mase": np.mean(error / q),
    }


def scales_of(model: Forecaster, rows: NDArray[np.int64]) -> list[NDArray[np.float64]]:
    """Mean and deviation of the series of every window, shape ``(windows, 1)``."""
    segments = model.dataset_.table.segments.of_rows(rows)
    return [
        np.broadcast_to(scale[:, :1], (len(rows), 1)) for scale in model._inputs.scales(segments)
    ]


def quantiles_of(model: Forecaster, rows: NDArray[np.int64], levels: list[float]) -> Any:
    """Quantiles of every window in units of the table, shape ``(windows, h, levels)``."""
    return model.stored_.forecast(model._inputs, rows, levels)[0][:, :, 0]


def test_without_training_windows_there_is_no_ridge() -> None:
    y = values(0.0)
    options = {**QUICK, "split": "70/10/20"}
    model = Forecaster(**options, output="point", linear=False).fit(table(y))
    assert "ridge" not in model.backtest(frame=table(y[:, :40]))  # 28 rows of 30


@pytest.mark.parametrize("missing", [0.0, 0.5])
@pytest.mark.parametrize("output", ["point", "quantiles", "student_t", "negative_binomial"])
def test_every_figure_follows_its_definition(missing: float, output: Any) -> None:
    y = values(missing)
    if output == "negative_binomial":
        y = np.abs(2 * y).round()
    model = Forecaster(**QUICK, output=output).fit(table(y))
    report = model.backtest(season=SEASON, quantiles=(0.1, 0.5))
    origins = windows_of(y)
    about = naive_of(y, origins)
    rows = model._windows(model.dataset_, "test", 1)[1].rows()
    assert rows.tolist() == [s * ROWS + origin - INPUT for s, origin in origins]
    in_sample = [pd.Series(row[:TRAIN].astype(np.float64)).diff(SEASON).abs().mean() for row in y]
    scale = np.array([in_sample[s] for s, _ in origins])
    _, std = scales_of(model, rows)
    about["unit"] = np.broadcast_to(std, about["actual"].shape)
    about["forecaster"] = model.stored_.forecast(model._inputs, rows)[0][:, :, 0, 0]
    for name in ("forecaster", "naive", "seasonal_naive"):
        want = errors_of(about[name], about, scale)
        found = {key: report[name][key] for key in want}
        assert found == pytest.approx(want, rel=1e-4), name
    assert set(report["naive"]) == set(want)

    actual, figures = about["actual"], report["forecaster"]
    percentiles = [k / 100 for k in range(1, 100)]
    q = quantiles_of(model, rows, percentiles)
    finite = np.where(np.isfinite(q), q, np.nan)  # of few values the outermost are infinite
    q = np.clip(q, np.nanmin(finite, -1, keepdims=True), np.nanmax(finite, -1, keepdims=True))
    error = actual[..., None] - q
    losses = np.maximum(error * percentiles, error * (np.array(percentiles) - 1))
    pinball = np.nanmean(losses, (0, 1))
    assert figures["crps"] == pytest.approx(2 * pinball.sum() / 100, rel=1e-4)
    assert figures["pinball_0.1"] == pytest.approx(pinball[9], rel=1e-4)
    assert figures["pinball_0.5"] == pytest.approx(pinball[49], rel=1e-4)
    for interval in (0.8, 0.95):
        ends = quantiles_of(model, rows, [(1 - interval) / 2, (1 + interval) / 2])
        inside = (ends[..., 0] <= actual) & (actual <= ends[..., 1])
        share = inside.sum() / figures["num_values"]
        assert figures[f"coverage_{100 * interval:g}"] == pytest.approx(share, abs=2e-3)


@pytest.mark.parametrize(
    ("unit", "step", "season"),
    [
        ("us", 3_600_000_000, 24), ("us", 900_000_000, 96), ("us", 86_400_000_000, 7),
        ("us", 7 * 86_400_000_000, 1), ("us", 7_000_000, 1), ("business_days", 1, 5),
        ("months", 1, 12), ("months", 3, 4), ("months", 12, 1), ("months", 24, 1), ("rows", 1, 1),
    ],
)  # fmt: skip
def test_the_season_of_a_frequency(unit: Any, step: int, season: int) -> None:
    assert season_of(SimpleNamespace(frequency=Frequency(step, unit))) == season  # type: ignore[arg-type]


def test_several_targets_are_scored_in_their_deviations() -> None:
    y = values(0.3, 2).T * np.array([1.0, 50.0], dtype=np.float32)
    model = Forecaster(**QUICK).fit(y)
    report, plain = (model.backtest(season=SEASON, scaled=scaled) for scaled in (True, False))
    scaler = model._inputs.scaler
    rows = model._windows(model.dataset_, "test", 1)[1].rows()
    center = model.stored_.forecast(model._inputs, rows)[0][..., 0]
    figures: dict[str, Any] = {"actual": [], "naive": [], "seasonal_naive": [], "forecaster": []}
    scales = []
    origins = windows_of(y[None, :, 0])
    for c in range(2):
        scaled = ((y[:, c] - scaler.mean[c]) / scaler.std[c]).astype(np.float32)
        for name, found in naive_of(scaled[None], origins).items():
            figures[name].append(found)
        figures["forecaster"].append((center[:, :, c] - scaler.mean[c]) / scaler.std[c])
        in_sample = pd.Series(scaled[:TRAIN].astype(np.float64)).diff(SEASON).abs().mean()
        scales.append(np.full(len(origins), in_sample))
    about = {name: np.concatenate(found) for name, found in figures.items()}
    for name in ("forecaster", "naive", "seasonal_naive"):
        want = errors_of(about[name], about, np.concatenate(scales))
        halves = [errors_of(*half) for half in by_target(about, name)]
        want["rel_mae"] = np.mean([half["rel_mae"] for half in halves])
        want["smape"] = plain[name]["smape"]  # has a meaning in units of the table alone
        found = {key: report[name][key] for key in want}
        assert found == pytest.approx(want, rel=1e-4), name


def by_target(about: dict[str, Any], name: str) -> list[tuple[Any, dict[str, Any], Any]]:
    """The arguments of `errors_of` for each of two targets, whose windows follow each other."""
    halves = [{key: np.array_split(values, 2)[c] for key, values in about.items()} for c in (0, 1)]
    return [(half[name], half, np.ones(len(half[name]))) for half in halves]


def test_a_window_without_a_last_value_is_scored() -> None:
    """All present targets are scored, even if the values before them are missing."""
    y = values(0.5)
    y[:, TRAIN + VALID - 1 : -1 : 2] = np.nan  # the last input value of every other window
    model = Forecaster(**{**QUICK, "steps": 1}).fit(table(y))
    report = model.backtest()
    want = int(np.sum([~np.isnan(y[s, o : o + HORIZON]) for s, o in windows_of(y)]))
    assert {found["num_values"] for found in report.values()} == {want}


def test_values_without_a_past_are_scored_by_the_training_mean() -> None:
    y = values(0.0)
    y[0, : TRAIN + VALID + 8] = np.nan  # the first series begins late in the test rows
    model = Forecaster(**{**QUICK, "steps": 1}).fit(table(y))
    found = model.backtest()
    want = [o for s, o in windows_of(y) if s == 0 and o <= TRAIN + VALID + 8]
    num = int(sum((~np.isnan(y[0, o : o + HORIZON])).sum() for o in want))
    assert {f["num_without_past"] for f in found.values()} == {num}
    mean = float(model._inputs.scaler.mean[0])
    about = naive_of(y, windows_of(y))
    naive = np.where(np.isnan(about["naive"]), mean, about["naive"])
    mse = np.nanmean((naive - about["actual"]) ** 2)
    assert found["naive"]["mse"] == pytest.approx(mse, rel=1e-4)
    first = [s == 0 for s, _ in windows_of(y)]  # its training rows hold nothing to divide by
    num = (~np.isnan(about["actual"][first])).sum()
    assert found["naive"]["num_without_scale"] == num
    in_sample = np.array([pd.Series(row[:TRAIN]).diff(SEASON).abs().mean() for row in y[1:]])
    scale = np.array([in_sample[s - 1] for s, _ in windows_of(y) if s > 0])[:, None]
    error = np.abs(naive - about["actual"])[~np.array(first)]
    assert found["naive"]["mase"] == pytest.approx((error / scale).mean(), rel=1e-4)


def test_mase_is_undefined_for_periodic_training_rows() -> None:
    y = values(0.0)
    y[:, :TRAIN] = np.sin(np.arange(TRAIN) * (2 * np.pi / 24)).round(3)  # the same every day
    model = Forecaster(**{**QUICK, "steps": 1}).fit(table(y))
    found = model.backtest(season=SEASON)["forecaster"]
    assert "mase" not in found
    assert found["rel_mae"] > 0
    daily = model.backtest(season=1)["forecaster"]
    assert daily["mase"] > 0


@pytest.fixture(scope="module")
def model() -> Forecaster:
    return fit_plain()


def events_of(model: Forecaster, continues: Any = lambda *_: True) -> list[dict[str, Any]]:
    dataset = model.dataset_
    split = split_table(dataset.table, dataset.frequency, model.split)
    return evaluation_events(model.stored_, dataset, split, model._inputs, continues)


@pytest.mark.parametrize(
    ("horizon", "quarters"),
    [
        (8, [(1, 2), (3, 4), (5, 6), (7, 8)]),
        (6, [(1, 1), (2, 3), (4, 4), (5, 6)]),
        (2, [(1, 1), (2, 2)]),
        (1, [(1, 1)]),
    ],
)
def test_a_horizon_has_up_to_four_quarters(horizon: int, quarters: list[tuple[int, int]]) -> None:
    errors = dict.fromkeys(("forecaster", "naive", "seasonal_naive"), StepErrors(horizon, 1))
    (target,) = _target_errors(["y"], errors, horizon)
    assert [(part["first"], part["last"]) for part in target["by_step"]] == quarters


def test_the_test_event_has_the_scores_of_backtest(model: Forecaster) -> None:
    test, calibration, *examples = events_of(model)
    scores = model.backtest()
    assert scores["seasonal_naive"].pop("season") == test["season"]
    assert test["scores"] == {name: pytest.approx(scores[name]) for name in scores}
    assert (test["windows"], test["of_windows"], test["season"]) == (57, 57, 24)
    (target,) = test["targets"]
    assert (target["target"], target["num_values"]) == ("y", 57 * h)
    assert target["mae"] == pytest.approx(scores["forecaster"]["mae"])
    assert target["naive_mae"] == pytest.approx(scores["naive"]["mae"])
    assert target["seasonal_naive_mae"] == pytest.approx(scores["seasonal_naive"]["mae"])
    counts = [part["last"] - part["first"] + 1 for part in target["by_step"]]
    mae = np.average([part["mae"] for part in target["by_step"]], weights=counts)
    assert mae == pytest.approx(target["mae"])  # every value is present
    figures = model.backtest()["forecaster"]
    observed = dict(zip(calibration["levels"], calibration["observed"], strict=True))
    assert (observed[0.8], observed[0.95]) == (figures["coverage_80"], figures["coverage_95"])
    assert [event["series"] for event in examples] == ["s0", "s0", "s1", "s1", "s2", "s2"]
    assert len({event["times"][0] for event in examples}) == 6, "each at another time"


def test_more_windows_than_a_batch_are_shown(model: Forecaster) -> None:
    rows = np.resize(model._windows(model.dataset_, "test", 1)[1].rows(), 257)
    about = model.stored_, model.dataset_, model._inputs
    *_, last = evaluation.examples(*about, rows)
    (alone,) = evaluation.examples(*about, rows[-1:])
    assert last["times"] == alone["times"]
    assert last["center"] == pytest.approx(alone["center"], rel=1e-5)


def test_an_evaluation_prints_a_line_for_each_series(model: Forecaster) -> None:
    lines = repr(model.evaluation()).splitlines()
    assert lines[0] == "TableEvaluation, season 24"
    assert sorted(line.split(":")[0] for line in lines[1:]) == ["s0 y", "s1 y", "s2 y"]


@pytest.mark.parametrize(("coverage", "is_told"), [(0.56, True), (0.58, False), (0.9, False)])
def test_a_coverage_that_chance_explains_is_not_told(
    model: Forecaster, coverage: float, is_told: bool
) -> None:
    """The 19 windows of each of three series begin at 4 rows that are a horizon apart."""
    rows = model._windows(model.dataset_, "test", 1)[1].rows()
    note = coverage_note(model.stored_, model._inputs, rows, {"coverage_80": coverage})
    assert (note is not None) == is_told
    found = "cover 56 % of the values; with 12 independent windows, chance explains 57 to 100 %:"
    assert note is None or found in note


def test_windows_beyond_the_time_limit_are_skipped(
    model: Forecaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "spread_out", lambda rows: rows)
    calls: list[tuple[int, int]] = []

    def continues(done: int, total: int) -> bool:
        calls.append((done, total))
        return False

    assert events_of(model, continues)[0]["windows"] == 57
    assert calls == [(57, 57)]
    monkeypatch.setattr(evaluation, "MAX_WINDOWS", 9)
    test = events_of(model, continues)[0]
    assert (test["windows"], test["of_windows"]) == (9, 57)
