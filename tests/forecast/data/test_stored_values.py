from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fastlstm.errors import DataError
from fastlstm.forecast.data.column_stats import ColumnStats
from fastlstm.forecast.data.stored_values import StoredValues, store_values
from fastlstm.forecast.data.table import MISSING_INT16


def stored(
    work: Path, rows: NDArray[np.float64], dtype: Any = "auto", is_category: bool = False
) -> tuple[StoredValues, NDArray[Any]]:
    """Stores a table of one segment; returns the result and values.bin."""
    rows.astype(np.float32).tofile(work / "values.f32")
    columns = []
    for values in rows.T:
        columns.append(ColumnStats(is_category=is_category))
        columns[-1].add(values, columns[-1].stored(values))
    names = [f"c{n}" for n in range(rows.shape[1])]
    found = store_values(work, len(rows), dtype, columns, names)
    return found, np.fromfile(work / "values.bin", dtype=found.dtype).reshape(rows.shape)


def test_whole_numbers_are_int16_without_loss(tmp_path: Path) -> None:
    rows = np.array([[1.0, -5.0], [np.nan, 300.0]])
    found, values = stored(tmp_path, rows)
    assert (found.dtype, found.notes) == ("int16", ("values stored as int16: lossless",))
    assert values.tolist() == [[1, -5], [MISSING_INT16, 300]]
    assert (found.scale.tolist(), found.offset.tolist()) == ([1, 1], [0, 0])


def test_fractions_stay_float32(tmp_path: Path) -> None:
    found, values = stored(tmp_path, np.array([[0.5], [np.nan]]))
    assert (found.dtype, found.notes) == ("float32", ())
    np.testing.assert_array_equal(values, np.array([[0.5], [np.nan]], np.float32))
    assert not (tmp_path / "values.f32").exists()


@pytest.mark.parametrize("dtype", ["int16", "float16"])
def test_the_loss_of_a_smaller_dtype_is_measured(tmp_path: Path, dtype: str) -> None:
    rows = np.random.default_rng(1).normal(20.0, 4.0, (300, 1))
    rows[7] = np.nan
    found, values = stored(tmp_path, rows, dtype)
    back = values.astype(np.float32) * found.scale + found.offset if dtype == "int16" else values
    error = np.nanmax(np.abs(np.delete(back, 7, 0) - np.delete(rows, 7, 0)))
    (note,) = found.notes
    measured, _, rest = note.partition(": largest error ")[2].partition(", ")
    assert note.startswith(f"column 'c0' as {dtype}: largest error ")
    assert float(measured) == pytest.approx(error, rel=0.02)
    share = float(rest.split(" of its")[0])
    assert share == pytest.approx(error / np.nanstd(rows), rel=0.1)


def test_int16_uses_its_whole_range(tmp_path: Path) -> None:
    _, values = stored(tmp_path, np.array([[0.5], [10.25], [3.0]]), "int16")
    assert (values.min(), values.max()) == (-32_767, 32_767)


@pytest.mark.parametrize(
    ("rows", "dtype", "is_category", "message"),
    [
        ([[1e5], [0.5]], "float16", False, "column 'c0' reaches 100000, the limit of float16"),
        ([[0.0], [3000.0]], "float16", True, "has 3001 names, float16 can number 2049"),
        ([[0.0], [40_000.0]], "int16", True, "has 40001 names, int16 can number 32768"),
    ],
)
def test_what_a_dtype_cannot_hold_is_refused(
    tmp_path: Path, rows: list[list[float]], dtype: str, is_category: bool, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        stored(tmp_path, np.array(rows), dtype, is_category)
