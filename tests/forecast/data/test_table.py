from __future__ import annotations

import numpy as np
import pytest

from fastlstm.errors import DataError
from fastlstm.forecast.data.table import require_matrix, table_from_array


@pytest.mark.parametrize("dtype", ["float16", "float32", "int16"])
def test_arrays_of_a_stored_dtype_are_not_copied(dtype: str) -> None:
    array = np.zeros((4, 2), dtype=dtype)
    assert np.shares_memory(table_from_array(array).values, array)


@pytest.mark.parametrize("array", [np.zeros((2, 2, 2)), np.array("x"), np.array(["a"]), 3.0])
def test_what_is_no_matrix_of_numbers_is_refused(array):
    with pytest.raises(DataError, match=r"expected numbers of shape \(rows, columns\)"):
        require_matrix(np.asarray(array))
