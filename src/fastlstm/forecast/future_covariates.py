"""Future covariates: rows of a further table for the steps to forecast."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import DataError, counted
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.names import canonical
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
        DataError: a step without a row or a value; the message names series and time.
    """
    rows_of = _rows_by_series(future)
    if past.roles.time is None:  # row 0 of `future` is the first step to forecast
        times = times - times[:, :1]
    places = np.empty_like(times)
    for n, number in enumerate(series.tolist()):
        name = canonical(past.series[number])
        rows, known = rows_of.get(name, (times[n, :0], times[n, :0]))
        at = np.searchsorted(known, times[n])
        is_there = at < len(known)
        is_there[is_there] = known[at[is_there]] == times[n, is_there]
        if not is_there.all():
            missing = int(times[n, np.argmin(is_there)])
            when = show_time(missing) if past.has_clock else f"step {missing}"
            who = f"series '{name}'" if len(past.series) > 1 else "the table"
            raise DataError(
                f"the future table has no row for {who} at {when}; it needs"
                f" {counted(times.shape[1], 'row')} after the end of every series"
            )
        places[n] = rows[at]
    table, rows = future.table, places.reshape(-1)
    origins = table.origins(table.segments.series[table.segments.of_rows(rows)])
    rows_ahead = read_windows(table, rows, 1).numpy() + origins[:, None]
    values: NDArray[np.float64] = rows_ahead.reshape(*times.shape, -1)
    if not schema.may_miss and np.isnan(values).any():
        place = int(np.flatnonzero(np.isnan(values).any((0, 1)))[0])
        raise DataError(
            f"'{future.table.columns[place]}' is missing for a step to forecast, but the table at"
            " fit had no missing values: fill it in"
        )
    for place, column in enumerate(future.table.columns):
        if column in future.categories:
            numbers = numbers_at_fit(column, future, schema)
            codes = values[..., place]
            at_fit = numbers[np.nan_to_num(codes).astype(np.int64)]
            values[..., place] = np.where(np.isnan(codes), codes, at_fit)
    return values


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
