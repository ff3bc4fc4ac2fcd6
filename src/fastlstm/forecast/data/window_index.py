"""The windows of a table, numbered from 0; finds and copies windows by number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.errors import DataError, counted
from fastlstm.forecast.data.table import DTYPES, Table
from fastlstm.system import hardware

NO_GROUPS = np.zeros(0, dtype=np.int64)
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class WindowIndex:
    """All windows, as runs of windows within segments; arrays are int64 of shape ``(S,)``.

    Attributes:
        first_rows: first row of each run's first window.
        ends: number of windows in this run and all before it; increasing.
        length: rows of a window.
        stride: rows from one window to the next.
    """

    segments: NDArray[np.int64]
    first_rows: NDArray[np.int64]
    ends: NDArray[np.int64]
    length: int
    stride: int

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """Arguments of the native code: two addresses, the number of runs, the stride."""
        return self.first_rows.ctypes.data, self.ends.ctypes.data, len(self.ends), self.stride

    def rows(self, limit: int | None = None) -> NDArray[np.int64]:
        """Returns the first rows of all windows, or of `limit` evenly spread ones."""
        num = len(self) if limit is None else min(len(self), limit)
        return self.locate(np.linspace(0, len(self) - 1, num).astype(np.int64))[0]

    def locate(
        self, numbers: NDArray[np.int64], key: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns first rows and segments of windows by their numbers, int64, contiguous.

        `key`, below 2**64, is of a permutation applied to the numbers first.
        """
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(self):
            raise ValueError(f"window numbers are 0 to {len(self) - 1}")
        rows, runs = np.empty_like(numbers), np.empty_like(numbers)
        source = hardware.native().WindowSource(
            *self.addresses, 0, 0, 1, 0, 0, self.length, 0, 0, 0
        )
        source.locate(key, 0, numbers.ctypes.data, len(numbers), rows.ctypes.data, runs.ctypes.data)
        return rows, self.segments[runs]


def spread_out(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the rows in golden-ratio order: the first m of them are spread evenly, for any m.

    The gaps between the first m have at most three lengths (three-gap theorem), so they follow no
    season.
    """
    return rows[np.argsort(np.arange(len(rows)) * _GOLDEN % 1.0)]


def index_windows(
    table: Table,
    length: int,
    stride: int = 1,
    begins: NDArray[np.int64] | None = None,
    ends: NDArray[np.int64] | None = None,
) -> WindowIndex:
    """Finds the windows of a table: `length` rows each, `stride` rows apart within a segment.

    `begins` and `ends` (exclusive) of the usable rows of each segment have shape ``(S,)``; default
    all. Raises DataError: all segments are shorter than a window.
    """
    segments = table.segments
    first = segments.first_rows if begins is None else np.maximum(begins, segments.first_rows)
    last = segments.first_rows + segments.num_rows
    last = last if ends is None else np.minimum(ends, last)
    counts = np.where(last - first >= length, (last - first - length) // stride + 1, 0)
    used = np.flatnonzero(counts)
    if len(used) == 0:
        longest = int((last - first).max(initial=0))
        raise DataError(
            f"a window needs {counted(length, 'row')}, the longest segment without gaps has"
            f" {max(longest, 0)}; give longer series, a smaller `input_size` or `horizon`, or"
            " `gaps='fill'`"
        )
    ends_of_runs = np.cumsum(counts[used], dtype=np.int64)
    first_rows = np.ascontiguousarray(first[used], dtype=np.int64)
    return WindowIndex(used.astype(np.int64), first_rows, ends_of_runs, length, stride)


def read_windows(table: Table, rows: NDArray[np.int64], length: int) -> Tensor:
    """Returns the windows that begin at `rows`, shape ``(len(rows), length, C)``, float32. Raises
    ValueError: a window reaches beyond the table."""
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) <= table.num_rows - length:
        raise ValueError(
            f"windows of {counted(length, 'row')} begin at row 0 to {table.num_rows - length}"
        )
    wanted = np.ascontiguousarray(rows, dtype=np.int64)
    values = np.empty((len(wanted), length, len(table.columns)), dtype=np.float32)
    index = WindowIndex(wanted[:0], wanted[:0], wanted[:0], length, 1)
    native_source(table, index).gather(wanted.ctypes.data, len(wanted), values.ctypes.data)
    return torch.from_numpy(values)


def native_source(
    table: Table, index: WindowIndex, groups: NDArray[np.int64] = NO_GROUPS, seed: int = 0
) -> Any:
    """Returns the native description of a table and its windows; both must outlive it.

    `groups` of `series_ends` draw all series equally often, in orders of `seed`.
    """
    return hardware.native().WindowSource(
        *index.addresses, table.values.ctypes.data, DTYPES.index(table.values.dtype.name),
        len(table.columns),
        *(row.ctypes.data for row in table.scale_and_offset), index.length,
        groups.ctypes.data, len(groups), seed,
    )  # fmt: skip


def series_ends(table: Table, index: WindowIndex) -> NDArray[np.int64]:
    """Returns, for each series with windows, the number of windows up to its end; int64."""
    series = table.segments.series[index.segments]
    is_last = np.append(series[1:] != series[:-1], True)
    return np.ascontiguousarray(index.ends[is_last])


def windows_apart(
    rows: NDArray[np.int64], groups: NDArray[np.int64], horizon: int
) -> NDArray[np.int64]:
    """Returns for each group, such as a segment, how many of its windows have no step of their
    horizons in common; `rows` are the first rows of all windows, in any order."""
    order = np.argsort(rows)
    rows, groups = rows[order], groups[order]
    first = np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1))
    last = np.append(first[1:], len(rows)) - 1
    return np.asarray(1 + np.minimum(last - first, (rows[last] - rows[first]) // horizon))
