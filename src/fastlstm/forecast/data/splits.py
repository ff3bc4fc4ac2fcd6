"""Training, validation and test by time: one cut for all series, no value seen before its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import DataError, Setting, counted
from fastlstm.forecast.config import split_of
from fastlstm.forecast.data.table import Segments, Table, rows_at_once
from fastlstm.forecast.data.timeline import Frequency
from fastlstm.forecast.data.window_index import WindowIndex, index_windows

_STRETCH = 1 << 18


@dataclass(frozen=True)
class Split:
    """Where each segment is cut.

    Attributes:
        train_ends: the row behind the training rows of each segment, shape ``(S,)``, int64.
        valid_ends: the row behind its validation rows.
        test_ends: the row behind its test rows.
    """

    train_ends: NDArray[np.int64]
    valid_ends: NDArray[np.int64]
    test_ends: NDArray[np.int64]

    def windows(
        self, table: Table, part: str, input_size: int, horizon: int, stride: int = 1
    ) -> WindowIndex:
        """Returns the windows whose horizon lies in a part; the input may reach back before it.

        A training window lies in the training rows with all it has.

        Args:
            table: that was split.
            part: train, valid or test.
            input_size: steps of the past.
            horizon: steps ahead.
            stride: rows from one window to the next.

        Raises:
            DataError: the part holds no window.
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
            longest = f"its longest stretch without a gap has {counted(rows, 'row')}"
            few = f"{longest}, a horizon takes {horizon}"
            smaller = "horizon"
            if rows >= horizon:
                few = f"no stretch holds {input_size} rows to read and {horizon} to forecast"
                smaller = "input_size"
            raise DataError(
                f"{part} part: {few}; give more rows, a smaller ",
                Setting(smaller),
                " or another ",
                Setting("split"),
            ) from error


def split_table(
    table: Table, frequency: Frequency, split: str | Sequence[int] = "70/10/20"
) -> Split:
    """Cuts a table by time.

    Args:
        table: its rows.
        frequency: of them.
        split: shares of the rows in percent, or counts of steps from the earliest time on.

    Raises:
        ConfigError: no such split.
    """
    segments = table.segments
    starts = frequency.ticks(segments.start_times)
    first = int(starts.min())
    parts = split_of(split if isinstance(split, str) else ",".join(map(str, split)))
    last = int((starts + segments.num_rows).max())
    if isinstance(parts[0], float):
        cuts = [_tick_of_share(segments, starts, share) for share in np.cumsum(parts)[:2]]
    else:
        cuts = [first + int(count) for count in np.cumsum(parts)]
        last = cuts.pop() if len(cuts) == 3 else last
    return Split(*(_rows_before(segments, starts, cut) for cut in (*cuts, last)))


def _rows_before(segments: Segments, starts: NDArray[np.int64], tick: int) -> NDArray[np.int64]:
    return segments.first_rows + np.clip(tick - starts, 0, segments.num_rows)


def _tick_of_share(segments: Segments, starts: NDArray[np.int64], share: float) -> int:
    """Returns the tick before which such a share of all rows lies, by bisection."""
    low, high = int(starts.min()), int((starts + segments.num_rows).max())
    wanted = share * int(segments.num_rows.sum())
    while low < high:
        middle = (low + high) // 2
        if np.clip(middle - starts, 0, segments.num_rows).sum() < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@dataclass(frozen=True)
class Scaler:
    """What is taken from each column and what it is divided by, fitted on training rows.

    Attributes:
        mean: shape ``(C,)``, float64, in the table's units.
        std: shape ``(C,)``, float64; 1 for a column that never changes, and for categories.
    """

    mean: NDArray[np.float64]
    std: NDArray[np.float64]


def fit_scaler(table: Table, ends: NDArray[np.int64], categorical: Sequence[int] = ()) -> Scaler:
    """Finds mean and standard deviation of every column.

    Args:
        table: its rows.
        ends: the row behind the training rows of each segment; later ones are not looked at.
        categorical: places of columns that are left as they are.

    Cost: one pass; sums are kept about the first value seen, in float64.
    """
    num = len(table.columns)
    count, total, squares = (np.zeros(num) for _ in range(3))
    center: NDArray[np.float64] | None = None
    stretches = zip(table.segments.first_rows.tolist(), ends.tolist(), strict=True)
    for first, last in _merged(list(stretches)):
        size = rows_at_once(num, _STRETCH)
        for begin in range(first, last, size):
            rows = table.rows(begin, min(begin + size, last)).astype(np.float64)
            if center is None:
                center = np.nan_to_num(rows[0])
            rows -= center
            missing = np.isnan(rows)
            count += len(rows) - missing.sum(axis=0)
            rows[missing] = 0.0
            total += rows.sum(axis=0)
            squares += np.einsum("ij,ij->j", rows, rows)
    if center is None:
        raise DataError("the training part has no rows; give more, or another ", Setting("split"))
    mean = total / np.maximum(count, 1)
    variance = np.maximum(squares / np.maximum(count, 1) - mean**2, 0)
    std = np.where(variance > 1e-12 * mean**2, np.sqrt(variance), 1.0)
    mean += center + table.origin
    mean[list(categorical)], std[list(categorical)] = 0.0, 1.0
    return Scaler(mean, std)


def _merged(stretches: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins stretches that follow each other: a million short series are read in long reads."""
    found: list[tuple[int, int]] = []
    for first, last in stretches:
        if first >= last:
            continue
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], last)
        else:
            found.append((first, last))
    return found
