from __future__ import annotations

import numpy as np
import pytest

from fastlstm.forecast.data.table import Segments, Table, table_from_array
from fastlstm.forecast.data.window_index import (
    index_windows,
    read_windows,
    series_ends,
)

LENGTHS = (5, 2, 7)
SERIES = (0, 0, 1)


def table() -> Table:
    """Fourteen rows, each with its number, in three segments of two series."""
    plain = table_from_array(np.arange(14, dtype=np.float32))
    num = np.array(LENGTHS, dtype=np.int64)
    first = np.cumsum(num) - num
    segments = Segments(np.array(SERIES, dtype=np.int64), first, num, first)
    return Table(plain.values, ("y",), segments)


def test_numbers_lead_to_rows_and_segments() -> None:
    index = index_windows(table(), 3)
    rows, segments = index.locate(np.array([7, 0, 3], dtype=np.int64))
    assert (rows.tolist(), segments.tolist()) == ([11, 0, 7], [2, 0, 2])
    for wrong in (-1, 8):
        with pytest.raises(ValueError, match="window numbers are 0 to 7"):
            index.locate(np.array([wrong], dtype=np.int64))


def test_some_windows_are_spread_evenly() -> None:
    assert index_windows(table(), 3).rows(3).tolist() == [0, 7, 11]
    assert len(index_windows(table(), 3).rows(100)) == 8


def test_windows_are_read_as_float32() -> None:
    windows = read_windows(table(), np.array([2, 9]), 3)
    assert windows[..., 0].tolist() == [[2, 3, 4], [9, 10, 11]]
    for row in (-1, 12):
        with pytest.raises(ValueError, match="begin at row 0 to 11"):
            read_windows(table(), np.array([row]), 3)


def test_a_series_ends_behind_its_last_segment() -> None:
    source = table()
    assert series_ends(source, index_windows(source, 2)).tolist() == [5, 11]
    assert series_ends(source, index_windows(source, 6)).tolist() == [2]
