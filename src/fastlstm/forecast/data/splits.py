"""Training, validation and test parts by time: at one time for all series, or at the end of each;
scaling."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import DataError, counted
from fastlstm.forecast.config import split_of
from fastlstm.forecast.data.padding import own_rows
from fastlstm.forecast.data.table import Statistics, Table, row_blocks
from fastlstm.forecast.data.timeline import Frequency
from fastlstm.forecast.data.window_index import WindowIndex, index_windows


@dataclass(frozen=True)
class Split:
    """The ends (exclusive) of each part in every segment; rows of the table, ``(S,)``, int64."""

    train_ends: NDArray[np.int64]
    valid_ends: NDArray[np.int64]
    test_ends: NDArray[np.int64]

    def windows(
        self, table: Table, part: str, input_size: int, horizon: int, stride: int = 1
    ) -> WindowIndex:
        """Returns the windows whose horizon lies in the part train, valid or test.

        The input of validation and test windows may reach back into the part before; training
        windows lie within the training rows. Raises DataError: the part is too short for a window.
        """
        ends = {"train": self.train_ends, "valid": self.valid_ends, "test": self.test_ends}
        before = {"train": None, "valid": self.train_ends, "test": self.valid_ends}[part]
        begins = None if before is None else before - input_size
        try:
            return index_windows(table, input_size + horizon, stride, begins, ends[part])
        except DataError as error:
            if before is None:
                raise DataError(f"{part} part: ", *error.args) from error
            rows = int((ends[part] - before).max(initial=0))
            longest = f"its longest segment without gaps has {counted(rows, 'row')}"
            reason, smaller = f"{longest}, the horizon needs {horizon}", "horizon"
            if rows >= horizon:
                reason = f"no segment has {input_size} rows of input and {horizon} to forecast"
                smaller = "input_size"
            raise DataError(
                f"{part} part: {reason}; give more rows, a smaller `{smaller}` or another `split`"
            ) from error


def split_table(
    table: Table, frequency: Frequency, split: str | Sequence[int] = "70/10/20"
) -> Split:
    """Splits a table by time, by shares of the rows in percent or counts of steps, as `split_of`
    reads them. Raises ConfigError: an invalid split."""
    segments, starts = table.segments, frequency.ticks(table.segments.start_times)
    cuts = _cuts(table, frequency, split)
    return Split(*(segments.first_rows + (cut - starts).clip(0, segments.num_rows) for cut in cuts))


def validation_steps(table: Table, frequency: Frequency, split: str) -> int:
    """Returns the number of steps from the first of the validation part to its end."""
    cuts = _cuts(table, frequency, split)
    return int(np.max(cuts[1] - cuts[0]))


def _cuts(
    table: Table, frequency: Frequency, split: str | Sequence[int]
) -> Sequence[int | NDArray[np.int64]]:
    """Returns the ticks at which the training, validation and test part end, of each segment or of
    all: of shares, the first ticks with at least these shares of all rows before them."""
    parts = split_of(split if isinstance(split, str) else ",".join(map(str, split)))
    starts, rows = own_rows(table, frequency)
    ends = starts + rows
    first, last = int(starts.min()), int(ends.max())
    if isinstance(parts[0], float):
        wanted = np.cumsum(parts)[:2] * int(rows.sum())

        def rows_before(tick: int) -> int:
            return int(np.clip(tick - starts, 0, rows).sum())

        ticks = range(first, last)
        return [*(first + bisect_left(ticks, num, key=rows_before) for num in wanted), last]
    counts = [int(count) for count in parts]
    if counts[0] == 0:
        series = table.segments.series
        of_series = np.searchsorted(series, series, side="right") - 1
        return [ends[of_series] - after for after in (sum(counts), counts[2], 0)]
    train, valid, *test = (first + int(count) for count in np.cumsum(counts))
    return train, valid, test[0] if test else last


@dataclass(frozen=True)
class Scaler:
    """Mean and standard deviation of each column over the training rows, ``(C,)``, float64.

    Attributes:
        mean: in the table's units; 0 for categories.
        std: 1 for constant columns and categories.
    """

    mean: NDArray[np.float64]
    std: NDArray[np.float64]


def fit_scaler(table: Table, ends: NDArray[np.int64], categorical: Sequence[int] = ()) -> Scaler:
    """Computes mean and standard deviation of every column over the training rows of each segment,
    which end (exclusive) at `ends`; the columns at the positions `categorical` are not scaled.
    Raises DataError: no training rows."""
    if (ends <= table.segments.first_rows).all():
        raise DataError("the training part has no rows; give more, or another `split`")
    one, num = np.zeros(len(table.segments), np.int64), len(table.columns)
    found = table.statistics("columns", ends, lambda: moments(table, one, 1, num, ends))
    mean, variance = (np.nan_to_num(values[0]) for values in found)
    std = np.where(variance > 0, np.sqrt(variance), 1.0)
    mean[list(categorical)], std[list(categorical)] = 0.0, 1.0
    return Scaler(mean, std)


def moments(
    table: Table,
    groups: NDArray[np.int64],
    num_groups: int,
    num_columns: int,
    ends: NDArray[np.int64],
) -> Statistics:
    """Returns mean and variance of the leading columns over the rows up to `ends` of the segments
    of each group, ``(num_groups, num_columns)``; NaN without any.

    `groups` has the group of each segment, in increasing order: one for all, or its series. Sums
    are of the distances from one value of the group, so a large offset costs no digits.
    """
    shape, series = (num_groups, num_columns), table.segments.series
    count, total, squares = (np.zeros(shape) for _ in range(3))
    center, origin = np.full(shape, np.nan), table.origins(np.arange(num_groups))[:, :num_columns]
    for begin, end in row_blocks(0, table.num_rows, len(table.columns)):
        of = table.segments.of_rows(np.arange(begin, end))
        is_used = np.arange(begin, end) < ends[of]
        of = of[is_used]
        if not len(of):
            continue
        rows = table.rows(begin, end)[is_used, :num_columns].astype(np.float64)
        if len(table.origin) > num_groups:  # a group of series that are stored minus their own
            rows += table.origins(series[of])[:, :num_columns] - origin[groups[of]]
        starts = np.flatnonzero(np.diff(groups[of], prepend=-1))
        own = groups[of][starts]
        if (is_new := np.isnan(center[own])).any():
            center[own] = np.where(is_new, np.fmin.reduceat(rows, starts), center[own])
        rows -= center[groups[of]]
        is_missing = np.isnan(rows)
        rows[is_missing] = 0.0
        count[own] += np.add.reduceat(~is_missing, starts, dtype=np.int64)
        total[own] += np.add.reduceat(rows, starts)
        squares[own] += np.add.reduceat(np.square(rows, out=rows), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = total / count
        return mean + center + origin, np.maximum(squares / count - mean**2, 0)
