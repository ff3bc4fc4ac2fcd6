"""Rows of future covariates are found by series and time, and numbered as at fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fastlstm.errors import DataError
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.preparation import prepare, prepare_future
from fastlstm.forecast.forecast_table import future_covariates
from fastlstm.forecast.table_schema import TableSchema
from series_frames import long_table

ROWS, HORIZON = 12, 3
CONFIG = ForecastConfig(
    horizon=HORIZON, target=("y",), past=(), future=("plan", "kind"), categorical=("kind",)
)


def table(**columns: Any) -> pa.Table:
    """Two series whose plan is 100 * series + row; kinds are a, b, a, b …"""
    rows = np.tile(np.arange(float(ROWS)), 2)
    plan = rows + np.repeat([0.0, 100.0], ROWS)
    kind = np.array(["a", "b"])[rows.astype(int) % 2]
    return long_table(ROWS, 2, temp=None, **{"plan": plan, "kind": kind, **columns})


def part(whole: pa.Table, first: int, end: int) -> pa.Table:
    row = np.tile(np.arange(ROWS), 2)
    return whole.filter(pa.array((row >= first) & (row < end)))


def read(past: SeriesDataset, future: pa.Table, may_miss: bool = False) -> Any:
    schema = TableSchema.of(past, may_miss)
    times = np.stack([past.frequency.after(0, ROWS)[-HORIZON:]] * 2)
    start = int(past.table.segments.start_times[0])
    ahead = prepare_future(future, CONFIG, past)
    return future_covariates(ahead, past, schema, np.array([1, 0]), times + start)


@pytest.fixture(scope="module")
def past() -> SeriesDataset:
    return prepare(part(table(), 0, ROWS - HORIZON), CONFIG)


def test_each_forecast_has_the_rows_of_its_series_and_times(past: SeriesDataset) -> None:
    values = read(past, part(table(), ROWS - HORIZON - 2, ROWS))
    assert values.dtype == np.float64
    assert values[..., 0].tolist() == [[109.0, 110.0, 111.0], [9.0, 10.0, 11.0]]


def test_names_have_the_numbers_they_had_at_fit(past: SeriesDataset) -> None:
    """The future table begins with b: there it is number 0, at fit it was 1."""
    assert past.categories["kind"] == ["a", "b"]
    values = read(past, part(table(), ROWS - HORIZON, ROWS))
    assert values[..., 1].tolist() == [[1.0, 0.0, 1.0]] * 2
    unknown = np.array(["a", "c"])[np.tile(np.arange(ROWS), 2) % 2]
    with pytest.raises(DataError, match="'kind' has the unknown category 'c'"):
        read(past, part(table(kind=unknown), ROWS - HORIZON, ROWS))


def test_a_missing_row_is_named_by_series_and_time(past: SeriesDataset) -> None:
    with pytest.raises(
        DataError, match=r"no row for series 's1' at 2020-01-01 11:00.*needs 3 rows"
    ):
        read(past, part(table(), ROWS - HORIZON, ROWS - 1))
    row = np.tile(np.arange(ROWS), 2)
    gap = table().filter(pa.array((row >= ROWS - HORIZON) & (row != ROWS - 2)))
    with pytest.raises(DataError, match="no row for series 's1' at 2020-01-01 10:00"):
        read(past, gap)
    only_one = part(table(), ROWS - HORIZON, ROWS).slice(0, HORIZON)
    with pytest.raises(DataError, match="no row for series 's1' at 2020-01-01 09:00"):
        read(past, only_one)


def test_a_missing_value_is_refused_unless_the_past_misses_some(past: SeriesDataset) -> None:
    plan, y = (table()[name].to_numpy().copy() for name in ("plan", "y"))
    plan[ROWS - 1] = np.nan
    ahead = part(table(plan=plan), ROWS - HORIZON, ROWS)
    plan[2] = y[2] = np.nan  # a row without any value, as a filled gap has
    filled = prepare(part(table(plan=plan, y=y), 0, ROWS - HORIZON), CONFIG)
    for before in (past, filled):
        with pytest.raises(
            DataError, match="'plan' is missing for series 's0' at 2020-01-01 11:00:00, a step to"
        ):
            read(before, ahead, may_miss=before is filled)
    holed = prepare(part(table(plan=plan), 0, ROWS - HORIZON), CONFIG)
    assert np.isnan(read(holed, ahead, may_miss=True)[..., 0]).tolist() == [
        [False] * 3, [False, False, True]
    ]  # fmt: skip


def test_rows_without_times_count_from_the_first_step() -> None:
    config = ForecastConfig(horizon=2, target=("y",), past=(), future=("plan",))
    whole = pa.table({"y": np.sin(np.arange(9.0)), "plan": np.arange(9.0)})
    past = prepare(whole.slice(0, 7), config)
    ahead = prepare_future(whole.slice(7).select(["plan"]), config, past)
    schema = TableSchema.of(past, False)
    values = future_covariates(ahead, past, schema, np.array([0]), np.array([[7, 8]]))
    assert values[..., 0].tolist() == [[7.0, 8.0]]
