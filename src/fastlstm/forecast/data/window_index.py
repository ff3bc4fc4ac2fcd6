"""Windows of a table: numbered from 0 to all of them; a number says where its window begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.errors import DataError, Setting, counted
from fastlstm.forecast.data.table import Table
from fastlstm.system import hardware

NO_GROUPS = np.zeros(0, dtype=np.int64)
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class WindowIndex:
    """Which windows there are.

    Attributes:
        segments: the segment each run of windows belongs to, shape ``(S,)``, int64.
        first_rows: where the first window of each run begins, shape ``(S,)``, int64.
        ends: windows up to and with each run, shape ``(S,)``, int64, increasing.
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
        """What the native code takes: two addresses, the number of runs, the stride."""
        return self.first_rows.ctypes.data, self.ends.ctypes.data, len(self.ends), self.stride

    def rows(self, most: int | None = None) -> NDArray[np.int64]:
        """Returns the first rows of all windows, or of at most so many, evenly spread."""
        num = len(self) if most is None else min(len(self), most)
        return self.locate(np.linspace(0, len(self) - 1, num).astype(np.int64))[0]

    def locate(
        self, numbers: NDArray[np.int64], key: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns first rows and segments of windows.

        Args:
            numbers: from 0 to ``len(self) - 1``, int64, contiguous.
            key: of a permutation that the numbers go through first; below 2**64.
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
    """Returns the same rows in an order of which every beginning is spread evenly over all.

    The first m are those k of n whose k/phi has a fractional part below m/n: the gaps between them
    have at most three lengths (three-gap theorem), and follow no season.
    """
    return rows[np.argsort(np.arange(len(rows)) * _GOLDEN % 1.0)]


def index_windows(
    table: Table,
    length: int,
    stride: int = 1,
    begins: NDArray[np.int64] | None = None,
    ends: NDArray[np.int64] | None = None,
) -> WindowIndex:
    """Finds the windows of a table.

    Args:
        table: the rows.
        length: rows of a window.
        stride: rows from one window to the next of the same segment.
        begins: the first row that a window of each segment may use, shape ``(S,)``; default all.
        ends: the row behind the last one that a window of each segment may use.

    Raises:
        DataError: no segment is as long as a window; the longest is named.
    """
    found = table.segments
    first = found.first_rows if begins is None else np.maximum(begins, found.first_rows)
    last = found.first_rows + found.num_rows
    last = last if ends is None else np.minimum(ends, last)
    counts = np.where(last - first >= length, (last - first - length) // stride + 1, 0)
    used = np.flatnonzero(counts)
    if len(used) == 0:
        longest = int((last - first).max(initial=0))
        raise DataError(
            f"a window takes {counted(length, 'row')} and the longest stretch without a gap has"
            f" {max(longest, 0)}; give longer series, a smaller ",
            Setting("input_size"),
            " or ",
            Setting("horizon"),
            ", or ",
            Setting("gaps", "fill"),
            " to put missing rows in",
        )
    ends_of_runs = np.cumsum(counts[used], dtype=np.int64)
    first_rows = np.ascontiguousarray(first[used], dtype=np.int64)
    return WindowIndex(used.astype(np.int64), first_rows, ends_of_runs, length, stride)


def read_windows(table: Table, rows: NDArray[np.int64], length: int) -> Tensor:
    """Returns the windows that begin at `rows`, shape ``(len(rows), length, C)``, float32.

    Raises:
        ValueError: a window that the table does not hold.
    """
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
    """Returns what the native code knows of a table and its windows; all must outlive it.

    Args:
        table: the rows.
        index: its windows.
        groups: of `series_ends`, where all series are drawn equally often.
        seed: of the orders of their windows; below 2**64.
    """
    return hardware.native().WindowSource(
        *index.addresses, table.values.ctypes.data, table.cell, len(table.columns),
        table.scale.ctypes.data, table.offset.ctypes.data, index.length,
        groups.ctypes.data, len(groups), seed,
    )  # fmt: skip


def series_ends(table: Table, index: WindowIndex) -> NDArray[np.int64]:
    """Returns the windows up to and with each series that has any, int64, increasing."""
    series = table.segments.series[index.segments]
    is_last = np.append(series[1:] != series[:-1], True)
    return np.ascontiguousarray(index.ends[is_last])
