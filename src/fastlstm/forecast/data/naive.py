"""Naive forecasts from the values before an origin, and their error on the training rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fastlstm.forecast.data.table import Table

_STRETCH = 1 << 18


class SeasonalNaive:
    """Repeats the last present value of the same season; with a season of 1 the last value.

    A missing value is replaced by the value one season earlier, as far back as the rows of the
    series reach without a gap in time. Where that season has no present value, the last present
    value of the series is taken; where the series has none, the forecast is NaN.

    Args:
        table: the rows.
        num_targets: the first so many columns are forecast.
        season: in rows.

    Memory: the rows between the first and the last origin of a call.
    Cost: the rows between the origins; with missing values all rows of a series before its last
    origin, once where origins come in order.
    """

    def __init__(self, table: Table, num_targets: int, season: int) -> None:
        self._season = season
        self._of_season = _Carried(table, num_targets, season)
        self._last = _Carried(table, num_targets, 1)
        self._segments = table.segments
        self._series_begins = table.segments.first_rows[
            np.searchsorted(table.segments.series, table.segments.series)
        ]

    def forecast(self, origins: NDArray[np.int64], horizon: int) -> NDArray[np.float32]:
        """Returns forecasts, shape ``(N, horizon, C)``, NaN where the series has no value before.

        Args:
            origins: the row of each first step to be forecast; not the first row of a segment.
            horizon: steps.
        """
        segments = self._segments.of_rows(origins - 1)
        found = [
            self._of_segment(int(segment), origins[segments == segment], horizon)
            for segment in np.unique(segments)
        ]
        order = np.argsort(segments, kind="stable")
        forecast = np.empty_like(np.concatenate(found))
        forecast[order] = np.concatenate(found)
        return forecast

    def _of_segment(
        self, segment: int, origins: NDArray[np.int64], horizon: int
    ) -> NDArray[np.float32]:
        first, last = int(origins.min()), int(origins.max())
        asked = origins[:, None] - self._season + np.arange(horizon) % self._season
        begin = int(self._segments.first_rows[segment])
        low = max(begin, first - self._season)
        filled = self._of_season.rows(begin, low, last)
        forecast = filled[np.maximum(asked - low, 0)]
        forecast[asked < low] = np.nan
        before = self._last.rows(int(self._series_begins[segment]), first - 1, last)
        return np.where(np.isnan(forecast), before[origins - first][:, None], forecast)


class _Carried:
    """Rows whose missing values are those of the same season before; see `SeasonalNaive`."""

    def __init__(self, table: Table, num_targets: int, season: int) -> None:
        self._table = table
        self._before = np.full((season, num_targets), np.nan, dtype=np.float32)
        self._begin = self._end = -1

    def rows(self, begin: int, first: int, last: int) -> NDArray[np.float32]:
        """Returns rows ``first .. last - 1``, filled from row `begin` on."""
        if begin != self._begin or first < self._end:
            self._before = np.full_like(self._before, np.nan)
            self._begin = self._end = begin
        season, num = self._before.shape
        before = self._table.rows(max(begin, first - season), first)[:, :num]
        if len(before) == season and not np.isnan(before).any():  # nothing to look back for
            self._before, self._end = before, first
        while self._end < first:
            stop = min(first, self._end + _STRETCH)
            self._before = self._filled(stop)[1]
            self._end = stop
        return self._filled(last)[0]

    def _filled(self, stop: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Returns the rows up to `stop`, and what the season that follows is filled from."""
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


def seasonal_error(
    table: Table, ends: NDArray[np.int64], num_targets: int, season: int
) -> NDArray[np.float64]:
    """Returns the mean of ``|y[t] - y[t - season]|`` over the training rows of every series.

    It is what MASE divides by (Hyndman & Koehler 2006). Pairs with a missing value, or with a gap
    in time between them, do not count.

    Args:
        table: the rows.
        ends: the row behind the training rows of each segment.
        num_targets: C, the first so many columns.
        season: in rows.

    Returns:
        Shape ``(num_series, C)``; NaN where a series has no such pair.

    Cost: one pass over the table.
    """
    segments = table.segments
    num_series = int(segments.series.max()) + 1
    total, count = (np.zeros((num_series, num_targets)) for _ in range(2))
    stretch = max(_STRETCH, season)
    for begin in range(0, table.num_rows, stretch):
        first = max(begin - season, 0)
        rows = table.rows(first, begin + stretch)[:, :num_targets].astype(np.float64)
        numbers = np.arange(first, first + len(rows))
        of = segments.of_rows(numbers)
        is_pair = (of[season:] == of[:-season]) & (numbers[season:] < ends[of[season:]])
        error = np.abs(rows[season:] - rows[:-season])[is_pair]
        series = segments.series[of[season:][is_pair]]
        for column in range(num_targets):
            is_there = ~np.isnan(error[:, column])
            which = series[is_there]
            total[:, column] += np.bincount(which, error[is_there, column], num_series)
            count[:, column] += np.bincount(which, minlength=num_series)
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
