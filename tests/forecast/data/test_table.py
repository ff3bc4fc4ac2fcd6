from __future__ import annotations

import numpy as np
import pytest

from fastlstm.errors import DataError
from fastlstm.forecast.data.table import Segments, require_matrix, table_from_array


def segments(series: list[int], first: list[int], num: list[int]) -> Segments:
    arrays = (np.array(values, dtype=np.int64) for values in (series, first, num, series))
    return Segments(*arrays)


@pytest.mark.parametrize(
    ("series", "first", "num", "covers"),
    [
        ([0, 0, 1], [0, 3, 5], [3, 2, 5], True),
        ([0, 1], [0, 4], [3, 6], False),  # a row in none
        ([0, 1], [0, 2], [3, 8], False),  # a row in two
        ([0, 1], [0, 5], [5, 4], False),  # ends early
        ([0, 1], [0, 10], [10, 0], False),  # an empty one
        ([1, 0], [0, 5], [5, 5], False),  # series not in order
        ([0, 2], [0, 5], [5, 5], False),  # a series that does not exist
        ([-1, 0], [0, 5], [5, 5], False),
        ([], [], [], False),
    ],
)
def test_segments_must_cover_all_rows(
    series: list[int], first: list[int], num: list[int], covers: bool
) -> None:
    assert segments(series, first, num).cover(10, 2) is covers


@pytest.mark.parametrize("dtype", ["float16", "float32", "int16"])
def test_arrays_of_a_stored_dtype_are_not_copied(dtype: str) -> None:
    array = np.zeros((4, 2), dtype=dtype)
    assert np.shares_memory(table_from_array(array).values, array)


@pytest.mark.parametrize("array", [np.zeros((2, 2, 2)), np.array("x"), np.array(["a"]), 3.0])
def test_what_is_no_matrix_of_numbers_is_refused(array):
    with pytest.raises(DataError, match=r"expected numbers of shape \(rows, columns\)"):
        require_matrix(np.asarray(array))
