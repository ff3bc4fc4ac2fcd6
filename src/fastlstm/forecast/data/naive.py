"""Naive and seasonal naive forecasts, and their error on the training rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fastlstm.forecast.data.table import Table

_FIRST_ROWS, _BLOCK_ROWS = 256, 1 << 18


def naive_forecast(
    table: Table, num_targets: int, season: int, origins: NDArray[np.int64], horizon: int
) -> NDArray[np.float32]:
    """Returns forecasts from `origins`, the rows of the first steps to forecast, of which none is
    the first of a segment: the last value of the same season, shape ``(N, horizon, C)``.

    A missing value is replaced by the one a season earlier within the same segment, else by the
    last value of the series; if there is none, the forecast is NaN. The leading `num_targets`
    columns are forecast; `season` is in rows, 1 for the last value.

    Cost: reads the season before each origin, and earlier ones only for missing values.
    """
    begins = table.segments.first_rows[table.segments.of_rows(origins - 1)][:, None]
    sources = origins[:, None] - season + np.arange(min(horizon, season))
    found = np.full((*sources.shape, num_targets), np.nan, dtype=np.float32)
    while (is_open := np.isnan(found).any(-1) & (sources >= begins)).any():
        values = table.rows_at(sources[is_open])[:, :num_targets]
        found[is_open] = np.where(np.isnan(found[is_open]), values, found[is_open])
        if season == 1:  # `last_present` reads the rows before by the block
            break
        sources -= season
    for window in np.flatnonzero(np.isnan(found).any((1, 2))).tolist():
        last = last_present(table, int(origins[window]), num_targets)
        found[window] = np.where(np.isnan(found[window]), last, found[window])
    return found[:, np.arange(horizon) % season]


def last_present(table: Table, row: int, num_targets: int) -> NDArray[np.float32]:
    """Returns the last present values of the leading columns of a series before a row, as stored,
    ``(num_targets,)``; NaN without any.
    """
    series, firsts = table.segments.series, table.segments.first_rows
    number = series[table.segments.of_rows(np.array([row]))[0]]
    begin, end, size = int(firsts[np.searchsorted(series, number)]), row, _FIRST_ROWS
    found = np.full(num_targets, np.nan, dtype=np.float32)
    while end > begin and np.isnan(found).any():
        block = table.rows(max(begin, end - size), end)[::-1, :num_targets]
        first = (~np.isnan(block)).argmax(0)
        found = np.where(np.isnan(found), block[first, np.arange(num_targets)], found)
        end, size = end - size, min(8 * size, _BLOCK_ROWS)
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
