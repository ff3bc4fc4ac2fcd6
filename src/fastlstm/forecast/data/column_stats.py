"""What is noted of a column while it is read: its range, and codes that stand for no value."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

SENTINELS = (
    *(-99.0, -99.9, -99.99, -999.0, -999.9, -999.99, -9999.0, -9999.9, -99999.0, -999999.0),
    *(9999.0, 9999.9, 99999.0, 999999.0, -32768.0, -2147483648.0),
    *(1e20, -1e20, 1e30, -1e30, 1e36, -1e36, 9.969209968386869e36),
)
"""Numbers that stand for "no value" in many files."""
_CODES = {float(read): s for s in SENTINELS for read in (s, np.float32(s))}
_LARGE = 1e20
_MOST_RATIO = 1024
"""Of the largest value to the range, up to which float32 keeps 14 bits of the range."""


@dataclass
class ColumnStats:
    """What was seen of one column.

    Attributes:
        kept: sentinels that are values.
        origin: what is taken from values before they are stored.
        missing: rows without a value.
        low: the smallest value, as it came.
        high: the largest one.
        is_short: every stored value is a whole number that int16 holds.
        sentinels: rows that hold one, by its number.
        is_category: values are numbers of names.
    """

    kept: tuple[float, ...] = ()
    origin: float = 0.0
    missing: int = 0
    low: float = float("inf")
    high: float = float("-inf")
    is_short: bool = True
    sentinels: dict[float, int] = field(default_factory=dict)
    is_category: bool = False
    _other_low: float = float("inf")
    _other_high: float = float("-inf")

    def stored(self, values: NDArray[np.floating]) -> NDArray[np.float32]:
        """Returns values as they are stored: less the origin; infinite where float32 ends."""
        with np.errstate(over="ignore"):
            if self.origin:
                values = values.astype(np.float64) - self.origin
            return values.astype(np.float32, copy=False)

    def add(self, values: NDArray[np.floating], stored: NDArray[np.float32]) -> int | None:
        """Takes a batch in; returns the first row that float32 holds as an infinity, or None."""
        if not np.isfinite(stored).all():
            infinite = np.flatnonzero(np.isinf(stored))
            if len(infinite):
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
            others = values[~is_code]
            low, high = float(others.min()), float(others.max())
        self._other_low = min(self._other_low, low)
        self._other_high = max(self._other_high, high)

    @property
    def others(self) -> tuple[float, float]:
        """The smallest and largest value that is no sentinel."""
        return self._other_low, self._other_high

    def far_sentinels(self) -> list[float]:
        """Returns those that stand apart from all other values, as a code for no value does.

        Farther from them than they are from each other, and than half its own size; one that is
        above 0 and no more than 1e20 must be there twice.
        """
        low, high = self.others
        if low > high:
            return []
        found = []
        for code, count in sorted(self.sentinels.items()):
            distance = max(low - code, code - high)
            is_far = distance > max(high - low, abs(code) / 2)
            if is_far and (code < 0 or count > 1 or code >= _LARGE):
                found.append(code)
        return found

    def near_sentinels(self) -> list[float]:
        """Returns those that are an extreme, and yet may be values like the others."""
        low, high = self.others
        return [c for c in sorted(self.sentinels) if not low <= c <= high and low <= high]

    def best_origin(self) -> float:
        """Returns what to take from values so that float32 holds what is left; 0 mostly.

        Values around 1e9 with steps of 1 are all alike in float32; less 1e9 they are not.
        """
        if self.is_category or self.is_short or self.low > self.high:
            return 0.0
        spread = self.high - self.low
        if spread == 0 and float(np.float32(self.low)) == self.low:
            return 0.0
        if max(abs(self.low), abs(self.high)) <= _MOST_RATIO * spread:
            return 0.0
        middle = self.low + spread / 2
        return float(np.rint(middle)) if spread >= 2 else middle


def shown(value: float) -> str:
    """Returns a number as people write it: -9999, 1e+20."""
    return f"{value:.15g}" if float(f"{value:.15g}") == value else repr(value)
