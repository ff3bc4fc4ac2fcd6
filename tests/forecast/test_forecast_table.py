"""Forecasts as tables and files; rows of future covariates by series and time."""

from __future__ import annotations

import datetime
import io
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pyarrow import csv, ipc
from pyarrow import parquet as pq

from fastlstm import Forecaster
from fastlstm.errors import DataError
from fastlstm.forecast import forecast_table
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.preparation import prepare, prepare_future
from fastlstm.forecast.data.timeline import Frequency
from fastlstm.forecast.forecast_table import (
    Forecasts,
    as_kind,
    future_covariates,
    kind_of,
    write_rows,
)
from forecast_server import L, fit_plain, h, waves
from series_frames import long_table


@pytest.fixture(scope="module")
def model() -> Forecaster:
    return fit_plain()


def long_rows(num_rows: int) -> pa.Table:
    """The first rows of each series that the model was fitted on."""
    return waves().filter(pa.array(np.tile(np.arange(120) < num_rows, 3)))


def test_many_series_are_forecast_in_parts(
    model: Forecaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Forecasts(model.stored_, model.dataset_, model._inputs).table()
    monkeypatch.setattr(forecast_table, "SERIES_AT_ONCE", 2)
    parts = Forecasts(model.stored_, model.dataset_, model._inputs).table()
    np.testing.assert_allclose(whole["y"].to_numpy(), parts["y"].to_numpy(), rtol=1e-5)
    assert whole.drop_columns(["y"]).equals(parts.drop_columns(["y"]))


def test_a_series_that_is_too_short_is_left_out_and_named(model: Forecaster) -> None:
    rows, whole = np.tile(np.arange(120), 3), model.predict()
    table = long_rows(120).filter(pa.array(rows < np.repeat([120, L - 1, 120], 120)))
    with pytest.warns(UserWarning, match="^not forecast: series 's1' ends in 23 rows without gap"):
        found = model.predict(table)
    assert found["unique_id"].to_pylist() == ["s0"] * h + ["s2"] * h
    expected = np.delete(whole["y"].to_numpy().reshape(3, h), 1, 0)
    np.testing.assert_allclose(found["y"].to_numpy().reshape(2, h), expected, rtol=1e-5)
    with pytest.warns(UserWarning, match="not forecast"):
        forecasts = model.forecasts(table)
    assert forecasts.num_rows == 2 * h
    assert {panel["series"] for panel in forecasts.events(None, 9)} == {"s0", "s2"}
    with pytest.raises(DataError, match="too short to forecast; name others"):
        forecasts.plot(["s1"])


def test_short_series_are_counted(model: Forecaster) -> None:
    rows = np.tile(np.arange(120), 3)
    is_short = rows < np.repeat([20, 7, 5], 120)
    text = r"'s0' ends in 20 rows without gaps, 's1' in 7, 's2' in 5 \(3 series are too short\)"
    with pytest.raises(DataError, match=text):
        model.predict(long_rows(120).filter(pa.array(is_short)))


def test_times_of_local_time_stay_local() -> None:
    """Clocks in Berlin go forward after the last row."""
    start = datetime.datetime(2024, 3, 31) - datetime.timedelta(hours=48)
    table = long_table(49, 1, temp=None).drop_columns(["unique_id", "ds"])
    ds = pa.array([start + datetime.timedelta(hours=n) for n in range(49)], pa.timestamp("us"))
    zoned = pa.compute.assume_timezone(ds, "Europe/Berlin")
    model = Forecaster(
        horizon=3, input_size=8, patch=1, hidden_size=4, steps=1, split="60/20/20"
    ).fit(table.append_column("ds", zoned))
    shown = [str(time)[:16] for time in model.predict()["ds"].to_pylist()]
    assert shown == ["2024-03-31 01:00", "2024-03-31 03:00", "2024-03-31 04:00"]


def test_a_forecast_has_the_kind_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"step": [0, 1], "y": [1.0, 2.0], "z": [3.0, 4.0]})
    for frame, kind in (
        (np.zeros(2), np.ndarray),
        (pd.DataFrame(), pd.DataFrame),
        (pl.DataFrame(), pl.DataFrame),
        (table, pa.Table),
        ("a.csv", pd.DataFrame),
        (["a.csv"], pd.DataFrame),
    ):
        found = as_kind(table, kind_of(frame))
        assert type(found) is kind
        if kind is np.ndarray:
            assert found.tolist() == [[1.0, 3.0], [2.0, 4.0]]
        else:
            assert list(found["z"]) == [3.0, 4.0] or found["z"].to_pylist() == [3.0, 4.0]
    monkeypatch.setattr(forecast_table, "find_spec", lambda _: None)
    assert kind_of("a.csv") == "arrow", "without pandas"


ROWS, HORIZON = 12, 3
CONFIG = ForecastConfig(
    horizon=HORIZON, target=("y",), past=(), future=("plan", "kind"), categorical=("kind",)
)


def planned(**columns: Any) -> pa.Table:
    """Two series whose plan is 100 * series + row; kinds are a, b, a, b …"""
    rows = np.tile(np.arange(float(ROWS)), 2)
    plan = rows + np.repeat([0.0, 100.0], ROWS)
    kind = np.array(["a", "b"])[rows.astype(int) % 2]
    return long_table(ROWS, 2, temp=None, **{"plan": plan, "kind": kind, **columns})


def part(whole: pa.Table, first: int, end: int) -> pa.Table:
    row = np.tile(np.arange(ROWS), 2)
    return whole.filter(pa.array((row >= first) & (row < end)))


def read(past: SeriesDataset, future: pa.Table) -> Any:
    times = np.stack([past.frequency.after(0, ROWS)[-HORIZON:]] * 2)
    start = int(past.table.segments.start_times[0])
    ahead = prepare_future(future, CONFIG, past)
    return future_covariates(ahead, past, past.categories, np.array([1, 0]), times + start)


@pytest.fixture(scope="module")
def past() -> SeriesDataset:
    return prepare(part(planned(), 0, ROWS - HORIZON), CONFIG)


def test_each_forecast_has_the_rows_of_its_series_and_times(past: SeriesDataset) -> None:
    values = read(past, part(planned(), ROWS - HORIZON - 2, ROWS))
    assert values.dtype == np.float64
    assert values[..., 0].tolist() == [[109.0, 110.0, 111.0], [9.0, 10.0, 11.0]]


def test_names_have_the_numbers_they_had_at_fit(past: SeriesDataset) -> None:
    """The future table begins with b: there it is number 0, at fit it was 1."""
    assert past.categories["kind"] == ["a", "b"]
    values = read(past, part(planned(), ROWS - HORIZON, ROWS))
    assert values[..., 1].tolist() == [[1.0, 0.0, 1.0]] * 2
    unknown = np.array(["a", "c"])[np.tile(np.arange(ROWS), 2) % 2]
    with pytest.raises(DataError, match="'kind' has the unknown category 'c'"):
        read(past, part(planned(kind=unknown), ROWS - HORIZON, ROWS))


def test_a_missing_row_is_named_by_series_and_time(past: SeriesDataset) -> None:
    row = np.tile(np.arange(ROWS), 2)
    gap = planned().filter(pa.array((row >= ROWS - HORIZON) & (row != ROWS - 2)))
    ahead = part(planned(), ROWS - HORIZON, ROWS)
    for future, hour in ((ahead.slice(0, 2 * HORIZON - 1), 11), (gap, 10), (ahead[:HORIZON], 9)):
        told = f"no row for series 's1' at 2020-01-01 {hour:02}:00.*needs 3 rows"
        with pytest.raises(DataError, match=told):
            read(past, future)


def test_a_missing_value_is_refused_unless_the_past_misses_some(past: SeriesDataset) -> None:
    plan, y = (planned()[name].to_numpy().copy() for name in ("plan", "y"))
    plan[ROWS - 1] = np.nan
    ahead = part(planned(plan=plan), ROWS - HORIZON, ROWS)
    plan[2] = y[2] = np.nan  # a row without any value, as a filled gap has
    filled = prepare(part(planned(plan=plan, y=y), 0, ROWS - HORIZON), CONFIG)
    for before in (past, filled):
        with pytest.raises(DataError, match="'plan' is missing for series 's0' at 2020-01-01 11:0"):
            read(before, ahead)
    holed = prepare(part(planned(plan=plan), 0, ROWS - HORIZON), CONFIG)
    assert np.isnan(read(holed, ahead)[..., 0]).tolist() == [
        [False] * 3, [False, False, True]
    ]  # fmt: skip


def test_rows_without_times_count_from_the_first_step() -> None:
    config = ForecastConfig(horizon=2, target=("y",), past=(), future=("plan",))
    whole = pa.table({"y": np.sin(np.arange(9.0)), "plan": np.arange(9.0)})
    past = prepare(whole.slice(0, 7), config)
    ahead = prepare_future(whole.slice(7).select(["plan"]), config, past)
    values = future_covariates(ahead, past, past.categories, np.array([0]), np.array([[7, 8]]))
    assert values[..., 0].tolist() == [[7.0, 8.0]]


FORECASTS = pa.table(
    {
        "unique_id": [f"s{n // 4}" for n in range(40)],
        "ds": pa.array([n * 3_600_000_000 for n in range(40)], pa.timestamp("us", "Europe/Berlin")),
        "y": [n / 3 for n in range(40)],
    }
)


def written(suffix: str, sizes: list[int]) -> bytes:
    file, tables, begin = io.BytesIO(), [], 0
    for size in sizes:
        tables.append(FORECASTS.slice(begin, size))
        begin += size
    write_rows(file, suffix, FORECASTS.schema, tables)
    return file.getvalue()


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".arrow"])
def test_the_size_of_blocks_changes_no_row(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast_table, "_GROUP_ROWS", 7)
    read = {
        ".parquet": pq.read_table,
        ".csv": csv.read_csv,
        ".arrow": lambda file: ipc.open_file(file).read_all(),
    }[suffix]
    whole = read(io.BytesIO(written(suffix, [40])))
    assert whole["y"].to_pylist() == pytest.approx(FORECASTS["y"].to_pylist())
    for sizes in ([7, 7, 7, 7, 7, 5], [1] * 40, [0, 39, 0, 1], [20, 20]):
        assert read(io.BytesIO(written(suffix, sizes))).equals(whole)


DAY = 86_400_000_000


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
@pytest.mark.parametrize(
    ("start", "step", "plain", "zoned"),
    [
        (0, DAY, pa.date32(), "s"),
        (3_600_000_000, DAY, pa.timestamp("s"), "s"),
        (0, 3_600_000_000, pa.timestamp("s"), "s"),
        (500_000, DAY, pa.timestamp("us"), "us"),
        (0, 500_000, pa.timestamp("us"), "us"),
    ],
)
def test_times_of_a_csv_are_as_short_as_all_allow(
    model: Forecaster, zone: str | None, start: int, step: int, plain: pa.DataType, zoned: str
) -> None:
    own = model.dataset_
    segments = replace(own.table.segments, start_times=np.array([0, start, 0]))
    table, frequency = replace(own.table, segments=segments), Frequency(step)
    dataset = replace(own, table=table, frequency=frequency, time_zone=zone, is_wall=False)
    schema = Forecasts(model.stored_, dataset, model._inputs).csv_schema
    assert schema.field("ds").type == (plain if zone is None else pa.timestamp(zoned, zone))


def test_a_csv_has_the_digits_of_float32(
    model: Forecaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    forecasts = Forecasts(model.stored_, model.dataset_, model._inputs)
    schema = pa.schema([forecasts.csv_schema.field("y")])
    values = [103.14461146791918, -1 / 3, 0.0, 1.0, 12345678.9, 2e-7 / 3, float("inf"), None]
    rows, file = pa.table({"y": pa.array(values, pa.float64())}), io.BytesIO()
    write_rows(file, ".csv", schema, [rows])
    lines = file.getvalue().decode().splitlines()
    assert lines[1:6] == ["103.144615", "-0.33333334", "0", "1", "12345679"]
    assert (float(lines[6]), lines[7:]) == (pytest.approx(2e-7 / 3), ["inf", ""])
    monkeypatch.setattr(forecast_table, "float64_columns", lambda stored: ["y"])
    assert forecasts.csv_schema.field("y").type == pa.float64()
