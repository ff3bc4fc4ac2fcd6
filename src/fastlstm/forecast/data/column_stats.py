"""Statistics of a column, gathered while it is read: range, missing values, sentinel codes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_SENTINELS = (
    *(-99.0, -99.9, -99.99, -999.0, -999.9, -999.99, -9999.0, -9999.9, -99999.0, -999999.0),
    *(9999.0, 9999.9, 99999.0, 999999.0, -32768.0, -2147483648.0),
    *(1e20, -1e20, 1e30, -1e30, 1e36, -1e36, 9.969209968386869e36),
)
"""Numbers that many files use for "no value"."""
_CODES = {float(read): s for s in _SENTINELS for read in (s, np.float32(s))}
_MAX_RATIO = 1024
"""Largest magnitude over range at which float32 still keeps 14 bits of the range."""


@dataclass
class ColumnStats:
    """Statistics of one column.

    Attributes:
        kept: sentinels that the user declared to be values.
        origin: subtracted from values before they are stored.
        missing: number of rows without a value.
        low: smallest value, before the origin is subtracted.
        high: largest value.
        is_short: every stored value is a whole number within int16.
        sentinels: number of rows by sentinel.
        is_category: values are numbers of names.
        others: smallest and largest value apart from sentinels.
    """

    kept: tuple[float, ...] = ()
    origin: float = 0.0
    missing: int = 0
    low: float = float("inf")
    high: float = float("-inf")
    is_short: bool = True
    sentinels: dict[float, int] = field(default_factory=dict)
    is_category: bool = False
    others: tuple[float, float] = (float("inf"), float("-inf"))

    def stored(self, values: NDArray[np.floating]) -> NDArray[np.float32]:
        """Returns values minus the origin as float32; infinite beyond its range."""
        with np.errstate(over="ignore"):
            if self.origin:
                values = values.astype(np.float64) - self.origin
            return values.astype(np.float32, copy=False)

    def add(self, values: NDArray[np.floating], stored: NDArray[np.float32]) -> int | None:
        """Adds a batch; returns the first row that is infinite in float32, or None."""
        if not np.isfinite(stored).all():
            if len(infinite := np.flatnonzero(np.isinf(stored))):
                return int(infinite[0])
            is_there = ~np.isnan(values)
            self.missing += len(values) - int(is_there.sum())
            values, stored = values[is_there], stored[is_there]
        if len(values) == 0:
            return None
        low, high = float(values.min()), float(values.max())
        self.low, self.high = min(self.low, low), max(self.high, high)
        if self.is_short:
            fits = low - self.origin > -32768 and high - self.origin < 32768
            self.is_short = fits and bool((stored == np.rint(stored)).all())
        if not self.is_category:
            self._count_sentinels(values, low, high)
        return None

    def _count_sentinels(self, values: NDArray[np.floating], low: float, high: float) -> None:
        if low in _CODES or high in _CODES:
            kept = {float(np.float32(value)) for value in self.kept}
            codes = [read for read, code in _CODES.items() if float(np.float32(code)) not in kept]
            is_code = np.isin(values, codes)
            for value, count in zip(*np.unique(values[is_code], return_counts=True), strict=True):
                code = _CODES[float(value)]
                self.sentinels[code] = self.sentinels.get(code, 0) + int(count)
            if is_code.all():
                return
            low, high = float(values[~is_code].min()), float(values[~is_code].max())
        self.others = min(self.others[0], low), max(self.others[1], high)

    def far_sentinels(self) -> list[float]:
        """Returns the sentinels that are far from all other values, probably codes for "no value".

        Far means farther than the range of the others and than half the sentinel's magnitude. A
        positive one below 1e20 must also occur at least twice.
        """
        low, high = self.others
        return [
            code
            for code, count in sorted(self.sentinels.items())
            if low <= high
            and max(low - code, code - high) > max(high - low, abs(code) / 2)
            and (code < 0 or count > 1 or code >= 1e20)
        ]

    def near_sentinels(self) -> list[float]:
        """Returns the sentinels outside the range of the others, which may still be values."""
        low, high = self.others
        return [c for c in sorted(self.sentinels) if not low <= c <= high and low <= high]

    def best_origin(self) -> float:
        """Returns the origin that keeps the column's digits in float32; usually 0.

        Values around 1e9 with steps of 1 collapse in float32; minus 1e9 they do not.
        """
        spread = self.high - self.low
        is_exact = spread == 0 and float(np.float32(self.low)) == self.low
        is_near_zero = max(abs(self.low), abs(self.high)) <= _MAX_RATIO * spread
        if self.is_category or self.is_short or self.low > self.high or is_exact or is_near_zero:
            return 0.0
        middle = self.low + spread / 2
        return float(np.rint(middle)) if spread >= 2 else middle


class ColumnMoments:
    """Mean and variance of C columns over blocks of rows; missing values are skipped.

    Attributes:
        center: the first row, float64, which sums are taken about; None before any row.
    """

    def __init__(self, num_columns: int) -> None:
        self.center: NDArray[np.float64] | None = None
        self._count, self._total, self._squares = (np.zeros(num_columns) for _ in range(3))

    def add(self, values: NDArray[np.floating]) -> None:
        """Adds rows, shape ``(N, C)``; NaN where missing."""
        rows = values.astype(np.float64)
        if self.center is None:
            self.center = np.nan_to_num(rows[0])
        rows -= self.center
        missing = np.isnan(rows)
        self._count += len(rows) - missing.sum(axis=0)
        rows[missing] = 0.0
        self._total += rows.sum(axis=0)
        self._squares += np.einsum("ij,ij->j", rows, rows)

    def result(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns means about `center` and variances, shape ``(C,)``; zeros without values."""
        count = np.maximum(self._count, 1)
        mean = self._total / count
        return mean, np.maximum(self._squares / count - mean**2, 0)


def shown(value: float) -> str:
    """Returns the shortest text of a number: -9999, 1e+20."""
    return f"{value:.15g}" if float(f"{value:.15g}") == value else repr(value)
