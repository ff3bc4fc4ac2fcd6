"""Future covariates: rows of a further table for the steps to forecast."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import DataError, counted
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.names import canonical
from fastlstm.forecast.data.table import row_blocks
from fastlstm.forecast.data.timeline import show_time
from fastlstm.forecast.data.window_index import read_windows
from fastlstm.forecast.table_schema import TableSchema, numbers_at_fit


def future_covariates(
    future: SeriesDataset, past: SeriesDataset, schema: TableSchema, series: NDArray[np.int64],
    times: NDArray[np.int64],
) -> NDArray[np.float64]:  # fmt: skip
    """Returns the future covariates of every forecast, shape ``(N, h, F)``, in their units.

    Args:
        future: table of the future columns, in the network's order.
        past: table of the series to forecast.
        schema: schema of the table at fit.
        series: number in `past` of each forecast's series, shape ``(N,)``.
        times: times of each forecast's steps, shape ``(N, h)``, int64.

    Raises:
        DataError: a step without a row, or without a value of a column that the past always has;
            the message names series and time.
    """
    rows_of = _rows_by_series(future)
    if past.roles.time is None:  # row 0 of `future` is the first step to forecast
        times = times - times[:, :1]
    places = np.empty_like(times)

    def who(n: int) -> str:
        return f"series '{past.series[series[n]]}'" if len(past.series) > 1 else "the table"

    def when(n: int, step: int) -> str:
        return show_time(int(times[n, step])) if past.has_clock else f"step {times[n, step]}"

    for n, number in enumerate(series.tolist()):
        name = canonical(past.series[number])
        rows, known = rows_of.get(name, (times[n, :0], times[n, :0]))
        at = np.searchsorted(known, times[n])
        is_there = at < len(known)
        is_there[is_there] = known[at[is_there]] == times[n, is_there]
        if not is_there.all():
            gone = when(n, int(np.argmin(is_there)))
            raise DataError(
                f"the future table has no row for {who(n)} at {gone}; it needs"
                f" {counted(times.shape[1], 'row')} after the end of every series"
            )
        places[n] = rows[at]
    table, rows = future.table, places.reshape(-1)
    origins = table.origins(table.segments.series[table.segments.of_rows(rows)])
    rows_ahead = read_windows(table, rows, 1).numpy() + origins[:, None]
    values: NDArray[np.float64] = rows_ahead.reshape(*times.shape, -1)
    if (is_missing := np.isnan(values)).any():
        is_missing &= ~_missed_before(past, table.columns)
    if is_missing.any():
        n, step, place = np.argwhere(is_missing)[0].tolist()
        raise DataError(
            f"'{table.columns[place]}' is missing for {who(n)} at {when(n, step)}, a step to"
            " forecast; the past has it in every row with a target: fill it in"
        )
    for place, column in enumerate(future.table.columns):
        if column in future.categories:
            numbers = numbers_at_fit(column, future, schema)
            codes = values[..., place]
            at_fit = numbers[np.nan_to_num(codes).astype(np.int64)]
            values[..., place] = np.where(np.isnan(codes), codes, at_fit)
    return values


def _missed_before(past: SeriesDataset, columns: Sequence[str]) -> NDArray[np.bool_]:
    """Returns for each column whether it is missing in a row of the past that has a target."""
    table, C = past.table, len(past.roles.target)
    places, found = [table.columns.index(name) for name in columns], np.zeros(len(columns), bool)
    for begin, end in row_blocks(0, table.num_rows, len(table.columns)):
        is_missing = np.isnan(table.rows(begin, end))
        found |= is_missing[~is_missing[:, :C].all(1)][:, places].any(0)
    return found


def _rows_by_series(
    dataset: SeriesDataset,
) -> dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Returns rows and times of every series, in order of time, by name."""
    segments = dataset.table.segments
    by_series: dict[str, list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = {}
    for number, first, start, count in zip(
        segments.series.tolist(), segments.first_rows.tolist(), segments.start_times.tolist(),
        segments.num_rows.tolist(), strict=True,
    ):  # fmt: skip
        segment = np.arange(first, first + count), dataset.frequency.after(start, count)
        by_series.setdefault(canonical(dataset.series[number]), []).append(segment)
    return {
        name: (np.concatenate([r for r, _ in parts]), np.concatenate([t for _, t in parts]))
        for name, parts in by_series.items()
    }
