"""What is known of the steps to be forecast: rows of another table, found by series and time."""

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
    ahead: SeriesDataset, past: SeriesDataset, schema: TableSchema, series: NDArray[np.int64],
    times: NDArray[np.int64],
) -> NDArray[np.float64]:  # fmt: skip
    """Returns what is known of the steps of every forecast, shape ``(N, h, F)``, in its units.

    Args:
        ahead: the table of what is known; its columns are the future ones in order.
        past: the table whose series are forecast.
        schema: numbers of the names in categorical columns.
        series: number in `past` of the series of each forecast, shape ``(N,)``.
        times: of its steps, shape ``(N, h)``, int64.

    Raises:
        DataError: a step that nothing is known of; series and time are named.
    """
    rows_of = _rows_by_series(ahead)
    if past.roles.time is None:  # rows are counted: those ahead from the first step to forecast on
        times = times - times[:, :1]
    places = np.empty_like(times)
    for n, number in enumerate(series.tolist()):
        name = canonical(past.series[number])
        rows, known = rows_of.get(name, (times[n, :0], times[n, :0]))
        found = np.searchsorted(known, times[n])
        is_there = found < len(known)
        is_there[is_there] = known[found[is_there]] == times[n, is_there]
        if not is_there.all():
            missing = int(times[n, np.argmin(is_there)])
            when = show_time(missing) if past.has_clock else f"step {missing}"
            who = f"series '{name}'" if len(past.series) > 1 else "the table"
            raise DataError(
                f"nothing is known ahead of {who} at {when}; the table given as future must hold"
                f" {counted(times.shape[1], 'row')} after the end of every series"
            )
        places[n] = rows[found]
    read = read_windows(ahead.table, places.reshape(-1), 1).numpy() + ahead.table.origin
    values: NDArray[np.float64] = read.reshape(*times.shape, -1)
    if not schema.may_miss and np.isnan(values).any():
        place = int(np.flatnonzero(np.isnan(values).any((0, 1)))[0])
        raise DataError(
            f"'{ahead.table.columns[place]}' is missing for a step to be forecast, and nothing was"
            " at fit: fill it in"
        )
    for place, column in enumerate(ahead.table.columns):
        if column in ahead.categories:
            numbers = numbers_at_fit(column, ahead, schema)
            codes = values[..., place]
            known_codes = numbers[np.nan_to_num(codes).astype(np.int64)]
            values[..., place] = np.where(np.isnan(codes), codes, known_codes)
    return values


def _rows_by_series(
    ahead: SeriesDataset,
) -> dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Returns rows and times of every series, by its name, in order of time."""
    segments = ahead.table.segments
    found: dict[str, list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = {}
    for number, first, start, count in zip(
        segments.series.tolist(), segments.first_rows.tolist(), segments.start_times.tolist(),
        segments.num_rows.tolist(), strict=True,
    ):  # fmt: skip
        stretch = np.arange(first, first + count), ahead.frequency.after(start, count)
        found.setdefault(canonical(ahead.series[number]), []).append(stretch)
    return {
        name: (np.concatenate([r for r, _ in parts]), np.concatenate([t for _, t in parts]))
        for name, parts in found.items()
    }
