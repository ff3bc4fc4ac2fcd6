"""Calendar covariates: sines and cosines of the hour, the weekday and the day of the year.

They are future covariates that follow from the time column: harmonics of a period, as in harmonic
regression (Hyndman & Athanasopoulos 2021, "Forecasting: Principles and Practice", section 7.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastlstm.errors import DataError
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.timeline import DAY_US

_HARMONICS = {"hour": 2, "weekday": 3, "year": 2}
"""Sines and cosines of each period; three harmonics are all that seven days have."""
_PERIODS_US = {"hour": DAY_US, "weekday": 7 * DAY_US, "year": round(365.25 * DAY_US)}
_MIN_PERIODS, _STEPS_PER_PERIOD = 2, 4
FEW_YEARS = 1.5
"""Years that may teach a season: their effect is tried beside the calendar without it."""
_MONDAY_US = 4 * DAY_US
"""A Monday: 1970-01-05."""
MAX_ROWS = 1 << 22
"""Of a table whose calendar is chosen: the columns are held in memory."""


def calendar_names(parts: Sequence[str]) -> tuple[str, ...]:
    """Returns the columns of some parts of a calendar, in their order."""
    return tuple(
        f"{part}_{wave}{number}"
        for part in parts
        for number in range(1, _HARMONICS[part] + 1)
        for wave in ("sin", "cos")
    )


def calendar_parts(
    dataset: SeriesDataset, train_ends: NDArray[np.int64], least_years: float | None = None
) -> tuple[tuple[str, ...], list[str]]:
    """Returns the parts that training rows can teach: periods of four steps or more that fit in
    twice, a year `least_years` times if given.

    Also returns the columns of the table that have names of the calendar: their parts are left out.
    """
    if not dataset.has_clock:
        return (), []
    table, step_us = dataset.table, int(dataset.frequency.after(0, 2)[1])
    starts = table.segments.start_times + table.padded_rows * step_us
    rows = train_ends - table.own_first_rows
    used = rows > 0
    starts, rows = starts[used], rows[used]
    span_us = int((starts + rows * step_us).max() - starts.min())
    parts = [
        part
        for part, period_us in _PERIODS_US.items()
        if ((least_years if part == "year" else None) or _MIN_PERIODS) * period_us <= span_us
        and _STEPS_PER_PERIOD * step_us <= period_us
    ]
    taken = [name for name in calendar_names(parts) if name in dataset.table.columns]
    return tuple(part for part in parts if not {*calendar_names((part,))} & {*taken}), taken


def calendar_values(
    dataset: SeriesDataset, times: NDArray[np.int64], parts: Sequence[str]
) -> NDArray[np.float32]:
    """Returns the columns of `calendar_names` at times of a table, ``(*times.shape, F)``.

    Times are as the table stores them; hours are in its time zone.
    """
    if dataset.time_zone is not None and not dataset.is_wall:
        zoned = pa.array(times.reshape(-1)).cast(pa.timestamp("us", dataset.time_zone))
        local = pc.local_timestamp(zoned).cast(pa.int64()).to_numpy()
        times = local.reshape(times.shape)
    values = np.empty((*times.shape, len(calendar_names(parts))), dtype=np.float32)
    place = 0
    for part in parts:
        period_us = _PERIODS_US[part]
        phase = (times - _MONDAY_US) % period_us * (2 * np.pi / period_us)
        for number in range(1, _HARMONICS[part] + 1):
            values[..., place] = np.sin(number * phase)
            values[..., place + 1] = np.cos(number * phase)
            place += 2
    return values


def row_times(dataset: SeriesDataset) -> NDArray[np.int64]:
    """Returns the time of every row."""
    segments, frequency = dataset.table.segments, dataset.frequency
    starts, counts = segments.start_times, segments.num_rows
    if frequency.unit == "us":
        starts = np.repeat(starts - segments.first_rows * frequency.step, counts)
        return np.asarray(starts + np.arange(len(starts)) * frequency.step)
    pairs = zip(starts.tolist(), counts.tolist(), strict=True)
    return np.concatenate([frequency.after(start, count) for start, count in pairs])


def with_calendar(dataset: SeriesDataset, parts: Sequence[str]) -> SeriesDataset:
    """Returns a table with the columns of `calendar_names` as its last future covariates. Raises
    DataError: it has no times, or a column of such a name."""
    if not parts:
        return dataset
    names, table = calendar_names(parts), dataset.table
    if not dataset.has_clock:
        raise DataError(
            f"{dataset.name} has no column of times, which the calendar ({', '.join(parts)}) needs"
        )
    if both := set(names).intersection(table.columns):
        raise DataError(
            f"{dataset.name} has a column '{min(both)}', which is a name of the calendar; rename it"
        )
    of_times = calendar_values(dataset, row_times(dataset), parts)
    values = np.hstack([table.rows(0, table.num_rows), of_times])
    origin = np.pad(table.origin, ((0, 0), (0, len(names))))
    return replace(
        dataset,
        table=replace(table, values=values, columns=(*table.columns, *names), origin=origin),
        roles=replace(dataset.roles, future=(*dataset.roles.future, *names)),
    )
