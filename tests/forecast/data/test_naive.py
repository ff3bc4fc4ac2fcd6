"""Naive forecasts and their errors, against pandas and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from fastlstm.forecast.data import naive
from fastlstm.forecast.data.naive import last_present, naive_forecast, seasonal_error
from fastlstm.forecast.data.table import Segments, Table, table_from_array

pd = pytest.importorskip("pandas")


def table(rows: NDArray[np.float32], series: list[int], lengths: list[int]) -> Table:
    """Rows ``(N, C)`` cut into segments of such lengths, of such series."""
    num_rows = np.array(lengths)
    first = np.cumsum(num_rows) - num_rows
    segments = Segments(np.array(series), first, num_rows, 100 * np.arange(len(series)))
    plain = table_from_array(rows)
    return Table(rows, plain.columns, segments)


def with_missing(num_rows: int, share: float) -> NDArray[np.float32]:
    rng = np.random.default_rng(5)
    y = rng.normal(size=num_rows).astype(np.float32)
    y[rng.random(num_rows) < share] = np.nan
    return y


def test_gaps_in_time_are_no_pairs_and_no_seasons() -> None:
    """The last value is carried over a gap; a season ends at it."""
    rows = np.arange(20, dtype=np.float32)[:, None] ** 2
    rows[10:12] = np.nan
    source = table(rows, [0, 0], [10, 10])
    origins = np.array([12, 13, 14, 19])
    want = [[81, 81], [144, 144], [169, 169], [324, 324]]
    assert naive_forecast(source, 1, 1, origins, 2)[..., 0].tolist() == want
    # rows 9, 10 of the season before 13, 14 lie behind the gap or are missing
    want = [[81, 81, 81, 81], [144, 144, 144, 144], [169, 169, 144, 169], [225, 256, 289, 324]]
    assert naive_forecast(source, 1, 4, origins, 4)[..., 0].tolist() == want
    error = seasonal_error(source, np.array([10, 16]), 1, 4)
    # of rows 14 and 15 the partner is missing
    assert error.tolist() == [[np.mean([t**2 - (t - 4) ** 2 for t in range(4, 10)])]]


def test_a_season_that_begins_behind_a_gap_is_the_last_value() -> None:
    rows = np.arange(20, dtype=np.float32)[:, None]
    source = table(rows, [0, 0], [10, 10])
    forecast = naive_forecast(source, 1, 4, np.array([12, 14]), 4)
    assert forecast[..., 0].tolist() == [[11, 11, 10, 11], [10, 11, 12, 13]]


def test_forecasts_come_in_parts_and_blocks_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    y = with_missing(240, 0.6)
    source, origins = table_from_array(y), np.arange(40, 200)
    whole = naive_forecast(source, 1, 7, origins, 9)
    newest = naive_forecast(source, 1, 1, origins, 2)
    monkeypatch.setattr(naive, "_FIRST_ROWS", 2)
    monkeypatch.setattr(naive, "_BLOCK_ROWS", 10)
    for part in (origins, *np.array_split(origins[::-1], 13)):
        found = naive_forecast(source, 1, 7, part, 9)
        np.testing.assert_array_equal(found, whole[part - origins[0]])
        found = naive_forecast(source, 1, 1, part, 2)
        np.testing.assert_array_equal(found, newest[part - origins[0]])
    by_season = pd.Series(y).groupby(np.arange(len(y)) % 7).ffill()
    last = pd.Series(y).ffill()
    for n, origin in enumerate(origins):
        want = by_season[origin - 7 + np.arange(9) % 7].fillna(last[origin - 1])
        np.testing.assert_array_equal(whole[n, :, 0], want.to_numpy())
        np.testing.assert_array_equal(newest[n, :, 0], [last[origin - 1]] * 2)
    error = seasonal_error(source, np.array([150]), 1, 7)
    assert error[0, 0] == pytest.approx(pd.Series(y[:150].astype(float)).diff(7).abs().mean())


def test_the_last_present_value_may_be_blocks_and_segments_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(naive, "_FIRST_ROWS", 2)
    monkeypatch.setattr(naive, "_BLOCK_ROWS", 4)
    y = np.full((30, 2), np.nan, dtype=np.float32)
    y[1], y[3, 0], y[12] = (1, 2), 5, (7, 8)
    source = table(y, [0, 0, 1], [5, 7, 18])
    assert last_present(source, 11, 2).tolist() == [5, 2]
    assert last_present(source, 29, 2).tolist() == [7, 8]
    assert np.isnan(last_present(source, 12, 2)).all()  # the first row of the second series
