"""The values of a table in the smallest dtype that is safe, or that was asked for and measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import DataError, Setting
from fastlstm.forecast.data.arrange import Arranged
from fastlstm.forecast.data.column_stats import ColumnStats
from fastlstm.forecast.data.table import MISSING_INT16, rows_at_once
from fastlstm.system.storage import append

_ROWS = 1 << 18
_STEPS = 65_534
"""From the smallest to the largest int16 beside the one for missing values."""


@dataclass(frozen=True)
class Stored:
    """What values.bin holds.

    Attributes:
        dtype: float32, float16 or int16.
        scale: shape ``(C,)``; an int16 stands for ``value * scale + offset``.
        offset: shape ``(C,)``.
        notes: what was lost, measured.
    """

    dtype: str
    scale: NDArray[np.float32]
    offset: NDArray[np.float32]
    notes: tuple[str, ...]


def store_values(
    work: Path,
    arranged: Arranged,
    dtype: Literal["auto", "float32", "float16", "int16"],
    facts: Sequence[ColumnStats],
    names: Sequence[str],
) -> Stored:
    """Turns values.f32 into values.bin.

    Args:
        work: where both are.
        arranged: the rows, as float32.
        dtype: wanted; auto is int16 where that loses nothing, else float32.
        facts: of every column.
        names: of every column.

    Raises:
        DataError: float16 cannot hold a column's values.
    """
    num = len(facts)
    scale, offset = np.ones(num, dtype=np.float32), np.zeros(num, dtype=np.float32)
    target = work / "values.bin"
    is_short = all(fact.is_short for fact in facts)
    if dtype == "float32" or (dtype == "auto" and not is_short):
        arranged.values.replace(target)
        return Stored("float32", scale, offset, ())
    if dtype == "int16" and not is_short:
        for column, fact in enumerate(facts):
            if fact.is_category:
                continue
            low, high = _range(fact)
            scale[column] = max((high - low) / _STEPS, float(np.finfo(np.float32).tiny))
            offset[column] = (low + high) / 2
    kind = "float16" if dtype == "float16" else "int16"
    most = 2_048 if kind == "float16" else 32_767
    for name, fact in zip(names, facts, strict=True):
        if fact.is_category and fact.high > most:
            raise DataError(
                f"column '{name}' has {fact.high + 1:.0f} names, {kind} tells {most + 1} apart;"
                " give ",
                Setting("dtype", "float32"),
            )
        if kind == "float16" and (largest := max(map(abs, _range(fact)))) > 65_504:
            raise DataError(
                f"column '{name}' reaches {largest:g}, float16 ends at 65504; give ",
                Setting("dtype", "int16"),
                " or float32",
            )
    error, spread = _convert(arranged, target, kind, scale, offset)
    arranged.values.unlink()
    notes = [
        f"column '{name}' as {kind}: largest error {error[c]:.3g}"
        + (f", {error[c] / spread[c]:.2g} of its standard deviation" if spread[c] > 0 else "")
        for c, name in enumerate(names)
        if error[c] > 0
    ]
    return Stored(kind, scale, offset, tuple(notes or [f"values stored as {kind}: nothing lost"]))


def _range(fact: ColumnStats) -> tuple[float, float]:
    """Returns the smallest and largest value as stored; zeros of a column without any."""
    if fact.low > fact.high:
        return 0.0, 0.0
    return fact.low - fact.origin, fact.high - fact.origin


def _convert(
    arranged: Arranged,
    target: Path,
    kind: str,
    scale: NDArray[np.float32],
    offset: NDArray[np.float32],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Writes the values in another dtype; returns largest error and standard deviation."""
    shape = (arranged.num_rows, len(scale))
    source = np.memmap(arranged.values, dtype=np.float32, mode="r", shape=shape)
    error, total, squares = (np.zeros(len(scale)) for _ in range(3))
    count = np.zeros(len(scale))
    center = np.nan_to_num(np.asarray(source[0], dtype=np.float64))
    with target.open("wb", buffering=0) as file:
        size = rows_at_once(len(scale), _ROWS)
        for first in range(0, arranged.num_rows, size):
            values = np.asarray(source[first : first + size])
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
            centered = np.where(missing, 0, values - center)
            total += centered.sum(axis=0)
            squares += (centered**2).sum(axis=0)
            count += (~missing).sum(axis=0)
    mean = total / np.maximum(count, 1)
    variance = squares / np.maximum(count, 1) - mean**2
    return error, np.sqrt(np.maximum(variance, 0))
