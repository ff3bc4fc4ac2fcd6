"""Naive and seasonal naive forecasts, and their error on the training rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fastlstm.forecast.data.table import Table

_BLOCK_ROWS = 1 << 18


class SeasonalNaive:
    """Repeats the last value of the same season; with a season of 1 the last value.

    A missing value is replaced by the one a season earlier within the same segment, else by the
    last value of the series; if there is none, the forecast is NaN. The leading `num_targets`
    columns are forecast; `season` is in rows.

    Memory: the rows between the first and the last origin of a call.
    Cost: reads these rows; with missing values all rows of a series before its last origin, once
    if origins are increasing.
    """

    def __init__(self, table: Table, num_targets: int, season: int) -> None:
        self._num_targets, self._season = num_targets, season
        self._of_season = _FilledRows(table, num_targets, season)
        self._last = _FilledRows(table, num_targets, 1)
        self._segments = table.segments
        self._series_begins = table.segments.first_rows[
            np.searchsorted(table.segments.series, table.segments.series)
        ]

    def forecast(self, origins: NDArray[np.int64], horizon: int) -> NDArray[np.float32]:
        """Returns forecasts from `origins`, the rows of the first steps to forecast, of which none
        is the first of a segment: shape ``(N, horizon, C)``; NaN for series without earlier values.
        """
        segments = self._segments.of_rows(origins - 1)
        forecast = np.empty((len(origins), horizon, self._num_targets), dtype=np.float32)
        for segment in np.unique(segments).tolist():
            is_here = segments == segment
            own = origins[is_here]
            first, last = int(own.min()), int(own.max())
            begin = int(self._segments.first_rows[segment])
            low = max(begin, first - self._season)
            sources = own[:, None] - self._season + np.arange(horizon) % self._season
            found = self._of_season.rows(begin, low, last)[np.maximum(sources - low, 0)]
            found[sources < low] = np.nan
            before = self._last.rows(int(self._series_begins[segment]), first - 1, last)
            forecast[is_here] = np.where(np.isnan(found), before[own - first][:, None], found)
        return forecast


class _FilledRows:
    """Rows with missing values filled from earlier seasons; see `SeasonalNaive`."""

    def __init__(self, table: Table, num_targets: int, season: int) -> None:
        self._table = table
        self._before = np.full((season, num_targets), np.nan, dtype=np.float32)
        self._begin = self._end = -1

    def rows(self, begin: int, first: int, last: int) -> NDArray[np.float32]:
        """Returns rows ``first .. last - 1``, filled from rows since `begin`."""
        if begin != self._begin or first < self._end:
            self._before = np.full_like(self._before, np.nan)
            self._begin = self._end = begin
        season, num = self._before.shape
        before = self._table.rows(max(begin, first - season), first)[:, :num]
        if len(before) == season and not np.isnan(before).any():  # nothing to fill from earlier
            self._before, self._end = before, first
        while self._end < first:
            stop = min(first, self._end + _BLOCK_ROWS)
            self._before = self._filled(stop)[1]
            self._end = stop
        return self._filled(last)[0]

    def _filled(self, stop: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Returns the filled rows up to `stop`, and the season that fills the next rows."""
        season, num = self._before.shape
        rows = self._table.rows(self._end, stop)[:, :num]
        seasons = -(-len(rows) // season) + 1
        values = np.full((seasons * season, num), np.nan, dtype=np.float32)
        values[:season], values[season : season + len(rows)] = self._before, rows
        by_season = values.reshape(seasons, season, num)
        numbers = np.where(np.isnan(by_season), 0, np.arange(seasons)[:, None, None])
        at = np.maximum.accumulate(numbers, axis=0)
        filled = np.take_along_axis(by_season, at, axis=0).reshape(-1, num)
        return filled[season : season + len(rows)], filled[len(rows) : len(rows) + season]


def last_present(table: Table, row: int, num_targets: int) -> NDArray[np.float32]:
    """Returns the last present values of the leading columns of a series before a row, as stored,
    ``(num_targets,)``; NaN without any.
    """
    series, firsts = table.segments.series, table.segments.first_rows
    number = series[table.segments.of_rows(np.array([row]))[0]]
    begin = int(firsts[np.searchsorted(series, number)])
    found = np.full(num_targets, np.nan, dtype=np.float32)
    for end in range(row, begin, -_BLOCK_ROWS):
        block = table.rows(max(begin, end - _BLOCK_ROWS), end)[::-1, :num_targets]
        first = (~np.isnan(block)).argmax(0)
        found = np.where(np.isnan(found), block[first, np.arange(num_targets)], found)
        if not np.isnan(found).any():
            break
    return found


def seasonal_error(
    table: Table, ends: NDArray[np.int64], num_targets: int, season: int
) -> NDArray[np.float64]:
    """Returns the mean of ``|y[t] - y[t - season]|`` over the training rows of every series.

    The denominator of MASE (Hyndman & Koehler 2006), shape ``(num_series, C)``; NaN for a series
    without pairs. Pairs with a missing value or across a gap are skipped. `ends` (exclusive) are of
    the training rows of each segment.
    """
    segments = table.segments
    num_series = int(segments.series.max()) + 1
    total, count = (np.zeros((num_series, num_targets)) for _ in range(2))
    size = max(_BLOCK_ROWS, season)
    for begin in range(0, table.num_rows, size):
        first = max(begin - season, 0)
        rows = table.rows(first, begin + size)[:, :num_targets].astype(np.float64)
        numbers = np.arange(first, first + len(rows))
        of = segments.of_rows(numbers)
        is_pair = (of[season:] == of[:-season]) & (numbers[season:] < ends[of[season:]])
        error = np.abs(rows[season:] - rows[:-season])[is_pair]
        series = segments.series[of[season:][is_pair]]
        for column, errors in enumerate(error.T):
            is_there = ~np.isnan(errors)
            total[:, column] += np.bincount(series[is_there], errors[is_there], num_series)
            count[:, column] += np.bincount(series[is_there], minlength=num_series)
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
