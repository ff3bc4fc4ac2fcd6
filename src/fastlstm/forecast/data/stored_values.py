"""Stores the values of a table in the requested dtype and measures what that loses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import DataError
from fastlstm.forecast.data.column_stats import ColumnMoments, ColumnStats
from fastlstm.forecast.data.table import MISSING_INT16, row_blocks
from fastlstm.system.storage import append

Dtype = Literal["auto", "float32", "float16", "int16"]
_STEPS = 65_534
"""Steps between the smallest and the largest int16; -32768 stands for missing values."""


@dataclass(frozen=True)
class StoredValues:
    """The content of values.bin.

    Attributes:
        dtype: float32, float16 or int16.
        scale: shape ``(C,)``; an int16 stands for ``value * scale + offset``.
        offset: shape ``(C,)``.
        notes: the measured loss.
    """

    dtype: str
    scale: NDArray[np.float32]
    offset: NDArray[np.float32]
    notes: tuple[str, ...]


def store_values(
    work: Path,
    num_rows: int,
    dtype: Dtype,
    columns: Sequence[ColumnStats],
    names: Sequence[str],
) -> StoredValues:
    """Converts values.f32, rows of float32, to values.bin.

    Args:
        work: directory of both.
        num_rows: N.
        dtype: requested; auto means int16 if that loses nothing, else float32.
        columns: statistics of every column.
        names: of every column.

    Raises:
        DataError: float16 cannot hold a column's values.
    """
    num = len(columns)
    scale, offset = np.ones(num, dtype=np.float32), np.zeros(num, dtype=np.float32)
    source, target = work / "values.f32", work / "values.bin"
    is_short = all(column.is_short for column in columns)
    if dtype == "float32" or (dtype == "auto" and not is_short):
        source.replace(target)
        return StoredValues("float32", scale, offset, ())
    if dtype == "int16" and not is_short:
        for place, column in enumerate(columns):
            if not column.is_category:
                low, high = _range(column)
                scale[place] = max((high - low) / _STEPS, float(np.finfo(np.float32).tiny))
                offset[place] = (low + high) / 2
    kind, limit = ("float16", 2_048) if dtype == "float16" else ("int16", 32_767)
    for name, column in zip(names, columns, strict=True):
        if column.is_category and column.high > limit:
            raise DataError(
                f"column '{name}' has {column.high + 1:.0f} names, {kind} can number {limit + 1};"
                " give `dtype='float32'`"
            )
        if kind == "float16" and (largest := max(map(abs, _range(column)))) > 65_504:
            what = f"column '{name}' reaches {largest:g}, the limit of float16 is 65504; give "
            raise DataError(f"{what}`dtype='int16'` or float32")
    values = np.memmap(source, dtype=np.float32, mode="r", shape=(num_rows, num))
    error, spread = _convert(values, target, kind, scale, offset)
    source.unlink()
    notes = [
        f"column '{name}' as {kind}: largest error {error[c]:.3g}"
        + (f", {error[c] / spread[c]:.2g} of its standard deviation" if spread[c] > 0 else "")
        for c, name in enumerate(names)
        if error[c] > 0
    ]
    notes = notes or [f"values stored as {kind}: lossless"]
    return StoredValues(kind, scale, offset, tuple(notes))


def _range(column: ColumnStats) -> tuple[float, float]:
    """Returns the smallest and largest stored value; zeros for a column without values."""
    return (0.0, 0.0) if column.low > column.high else column.range


def _convert(
    source: NDArray[np.float32],
    target: Path,
    kind: str,
    scale: NDArray[np.float32],
    offset: NDArray[np.float32],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Writes the values as `kind`; returns each column's largest error and standard deviation."""
    error, moments = np.zeros(len(scale)), ColumnMoments(len(scale))
    with target.open("wb", buffering=0) as file:
        for begin, end in row_blocks(0, len(source), len(scale)):
            values = np.asarray(source[begin:end])
            missing = np.isnan(values)
            if kind == "float16":
                stored = values.astype(np.float16)
                back = stored.astype(np.float32)
            else:
                whole = np.rint((np.where(missing, 0, values) - offset) / scale)
                stored = np.clip(whole, -32_767, 32_767).astype(np.int16)
                back = stored.astype(np.float32) * scale + offset
                stored[missing] = MISSING_INT16
            append(file, stored.data.cast("B"))
            error = np.maximum(error, np.abs(np.where(missing, 0, back - values)).max(axis=0))
            moments.add(values)
    return error, np.sqrt(moments.result()[1])
