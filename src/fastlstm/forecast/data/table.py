"""A table of time series in memory or mapped from disk: rows of numbers, series after series.

::

    values     row 0  [ target  load  wind ]   ┐ segment 0: series "a", regular in time
               row 1  [    …                ]   ┘
               row 2  [    …                ]   ┐ segment 1: series "a" after a gap
                …                               ┘ segment 2: series "b" …

A segment is a stretch of one series whose rows follow each other in steps of the table's
frequency: the row says the time, so that no time is stored per row, and no window crosses a gap.
A missing value is NaN (in int16: the smallest number). Values far from 0 beside how much they move
are stored less an origin per column, which float32 would lose steps of.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import DataError, counted

DTYPES = ("float32", "float16", "int16")
"""How values may be stored; their position is the number the native code knows them by."""
MISSING_INT16 = -32768


_CELLS = 1 << 23


def rows_at_once(num_columns: int, most: int) -> int:
    """Returns how many rows to hold at once, `most` or, of a wide table, fewer."""
    return max(1, min(most, _CELLS // max(1, num_columns)))


@dataclass(frozen=True)
class Segments:
    """Stretches of rows without a gap.

    Attributes:
        series: number of the series of each, shape ``(S,)``, int64, increasing.
        first_rows: where each begins in the table, shape ``(S,)``, int64.
        num_rows: how many rows each has, shape ``(S,)``, int64.
        start_times: of each first row, microseconds since 1970 or the row's number, int64.
    """

    series: NDArray[np.int64]
    first_rows: NDArray[np.int64]
    num_rows: NDArray[np.int64]
    start_times: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.series)

    def cover(self, num_rows: int, num_series: int) -> bool:
        """Returns whether they are the rows of a table one after the other, of series there are."""
        ends = np.cumsum(self.num_rows)
        return (
            len(self) > 0
            and int(self.num_rows.min()) > 0
            and int(ends[-1]) == num_rows
            and bool((self.first_rows == ends - self.num_rows).all())
            and bool((np.diff(self.series, prepend=0) >= 0).all())
            and int(self.series[-1]) < num_series
        )

    def of_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the segment of every row."""
        return np.asarray(np.searchsorted(self.first_rows, rows, side="right") - 1)


@dataclass(frozen=True)
class Table:
    """Rows of numbers in segments.

    Attributes:
        values: shape ``(N, C)``, float32, float16 or int16, contiguous; usually mapped.
        columns: C names.
        segments: rows in order; they cover the table.
        scale: shape ``(C,)``, float32: an int16 stands for ``value * scale + offset``.
        offset: shape ``(C,)``, float32.
        origin: shape ``(C,)``, float64: what was taken from the values of each column; rows and
            windows are without it. Default 0.
    """

    values: NDArray[Any]
    columns: tuple[str, ...]
    segments: Segments
    scale: NDArray[np.float32]
    offset: NDArray[np.float32]
    origin: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if len(self.origin) == 0:
            object.__setattr__(self, "origin", np.zeros(len(self.columns)))

    @property
    def num_rows(self) -> int:
        return len(self.values)

    @property
    def cell(self) -> int:
        """The number by which the native code knows the dtype."""
        return DTYPES.index(self.values.dtype.name)

    def rows(self, first: int, last: int) -> NDArray[np.float32]:
        """Returns rows ``first .. last - 1`` as float32, less `origin`; missing values as NaN."""
        found = self.values[first:last]
        if found.dtype != np.int16:
            return np.asarray(found, dtype=np.float32)
        plain = found.astype(np.float32) * self.scale + self.offset
        plain[found == MISSING_INT16] = np.nan
        return plain


def table_from_array(values: Any, columns: tuple[str, ...] | None = None) -> Table:
    """Makes a table of one series from an array, which is not copied where it can be used as it is.

    Args:
        values: shape ``(N,)`` or ``(N, C)``; float16, float32 and int16 stay what they are, other
            numbers become float32.
        columns: C names; default "0", "1" ….

    Raises:
        DataError: no numbers, or a shape that is no table.
    """
    array = np.asarray(values)
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2 or array.dtype.kind not in "fiub":
        raise DataError(
            f"an array of shape {array.shape} and dtype {array.dtype} came, expected numbers of"
            " shape (rows, columns)"
        )
    dtype = array.dtype if array.dtype.name in DTYPES else np.dtype(np.float32)
    array = np.ascontiguousarray(array, dtype=dtype)
    names = columns or tuple(str(number) for number in range(array.shape[1]))
    if len(names) != array.shape[1]:
        raise DataError(
            f"{counted(len(names), 'name')} came for {counted(array.shape[1], 'column')}; give"
            " one for each"
        )
    one = np.zeros(1, dtype=np.int64)
    segments = Segments(one, one, np.array([len(array)], dtype=np.int64), one)
    num = array.shape[1]
    ones, zeros = np.ones(num, dtype=np.float32), np.zeros(num, dtype=np.float32)
    return Table(array, names, segments, ones, zeros)
