"""A table of time series in memory or mapped from disk: rows of numbers, series after series.

::

    values     row 0  [ target  load  wind ]   ┐ segment 0: series "a", regular in time
               row 1  [    …                ]   ┘
               row 2  [    …                ]   ┐ segment 1: series "a" after a gap
                …                               ┘ segment 2: series "b" …

A segment is a gap-free run of rows of one series, one step of the table's frequency apart. Times
follow from the row number and are not stored; no window crosses a gap. A missing value is NaN (the
smallest number in int16). Columns whose values are large beside their range are stored minus an
origin, because float32 would lose digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import DataError

Statistics = tuple[NDArray[np.float64], NDArray[np.float64]]
DTYPES = ("float32", "float16", "int16")
"""Dtypes of stored values; the native code knows each by its position here."""
MISSING_INT16 = -32768
_CELLS = 1 << 23


def rows_at_once(num_columns: int, limit: int) -> int:
    """Returns how many rows to hold in memory: at most `limit`, fewer for wide tables."""
    return max(1, min(limit, _CELLS // max(1, num_columns)))


def row_blocks(
    first: int, last: int, num_columns: int, limit: int = 1 << 18
) -> Iterator[tuple[int, int]]:
    """Yields ``(begin, end)`` of consecutive blocks of the rows ``first .. last - 1``."""
    size = rows_at_once(num_columns, limit)
    for begin in range(first, last, size):
        yield begin, min(begin + size, last)


def require_matrix(array: NDArray[Any]) -> NDArray[Any]:
    """Returns numbers of shape ``(rows,)`` or ``(rows, columns)`` as ``(rows, columns)``. Raises
    DataError: another shape, or not numbers."""
    matrix = array[:, None] if array.ndim == 1 else array
    if matrix.ndim != 2 or matrix.dtype.kind not in "fiub":
        raise DataError(
            f"got an array of shape {array.shape} and dtype {array.dtype}, expected numbers of"
            " shape (rows, columns)"
        )
    return matrix


@dataclass(frozen=True)
class Segments:
    """Gap-free runs of rows; all arrays are int64 of shape ``(S,)``.

    Attributes:
        series: series number of each segment, in increasing order.
        first_rows: first row of each segment in the table.
        num_rows: rows of each segment.
        start_times: time of each first row: microseconds since 1970, or the row number.
    """

    series: NDArray[np.int64]
    first_rows: NDArray[np.int64]
    num_rows: NDArray[np.int64]
    start_times: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.series)

    @property
    def are_first(self) -> NDArray[np.bool_]:
        """Which segments are the first ones of their series, ``(S,)``."""
        return np.asarray(np.diff(self.series, prepend=-1) != 0)

    def of_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the segment of every row."""
        return np.asarray(np.searchsorted(self.first_rows, rows, side="right") - 1)


@dataclass(frozen=True)
class Table:
    """Rows of numbers in segments.

    Attributes:
        values: shape ``(N, C)``, float32, float16 or int16, contiguous; usually memory-mapped.
        columns: C names.
        segments: cover all rows.
        origin: float64, subtracted before storage; rows and windows are returned without it. Shape
            ``(1, C)``, or ``(S, C)`` with one of each series.
        padding: rows without values before the first row of each series.
    """

    values: NDArray[Any]
    columns: tuple[str, ...]
    segments: Segments
    origin: NDArray[np.float64] = field(default_factory=lambda: np.zeros((1, 1)))
    padding: int = 0

    @cached_property
    def scale_and_offset(self) -> NDArray[np.float32]:
        """What the native code makes floats of int16 with: 1 and 0 for each column, ``(2, C)``."""
        return np.repeat(np.array([[1], [0]], dtype=np.float32), len(self.columns), axis=1)

    @property
    def num_rows(self) -> int:
        return len(self.values)

    @property
    def padded_rows(self) -> NDArray[np.int64]:
        """Rows of padding at the start of each segment, ``(S,)``."""
        return self.padding * self.segments.are_first

    @property
    def own_first_rows(self) -> NDArray[np.int64]:
        """First row of each segment behind its padding, ``(S,)``."""
        return self.segments.first_rows + self.padded_rows

    @cached_property
    def _statistics(self) -> dict[tuple[str, bytes], Statistics]:
        return {}

    def statistics(
        self, name: str, ends: NDArray[np.int64], compute: Callable[[], Statistics]
    ) -> Statistics:
        """Returns statistics of the rows of each segment up to `ends`, computed once: the choices
        before training ask for the same ones many times, and rows do not change. The arrays are
        read-only."""
        key = name, ends.tobytes()
        if key not in self._statistics:
            self._statistics[key] = compute()
            for values in self._statistics[key]:
                values.flags.writeable = False
        return self._statistics[key]

    def rows(self, first: int, last: int) -> NDArray[np.float32]:
        """Returns rows ``first .. last - 1`` minus `origin` as float32; missing values are NaN."""
        return self.rows_at(slice(first, last))

    def rows_at(self, places: NDArray[np.int64] | slice) -> NDArray[np.float32]:
        """Returns rows by number, as `rows` does."""
        stored = self.values[places]
        if stored.dtype != np.int16:
            return np.asarray(stored, dtype=np.float32)
        rows = stored.astype(np.float32)
        rows[stored == MISSING_INT16] = np.nan
        return rows

    def origins(self, series: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the origin of the values of some series, ``(N, C)``, or ``(1, C)`` of all."""
        return self.origin if len(self.origin) == 1 else self.origin[series]

    def whole_rows(self, first: int, last: int) -> NDArray[np.float64]:
        """Returns rows ``first .. last - 1`` with their origin; missing values are NaN."""
        of = self.segments.of_rows(np.arange(first, last))
        return self.rows(first, last) + self.origins(self.segments.series[of])


def table_from_array(values: Any) -> Table:
    """Makes a table of one series from an array ``(N,)`` or ``(N, C)``, without a copy where
    possible.

    float16, float32 and int16 are kept, other numbers become float32. The columns are called "0",
    "1" …. Raises DataError: not numbers of such a shape.
    """
    array = require_matrix(np.asarray(values))
    dtype = array.dtype if array.dtype.name in DTYPES else np.dtype(np.float32)
    array = np.ascontiguousarray(array, dtype=dtype)
    num = array.shape[1]
    names = tuple(str(number) for number in range(num))
    zero = np.zeros(1, dtype=np.int64)
    segments = Segments(zero, zero, np.array([len(array)], dtype=np.int64), zero)
    return Table(array, names, segments)
