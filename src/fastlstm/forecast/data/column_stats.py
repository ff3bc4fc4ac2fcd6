"""Statistics of a column, gathered while it is read: range, missing values, sentinel codes."""

from __future__ import annotations

from collections.abc import Collection
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
_NEAR = 0.5
"""Distance over the range of the others up to which a value is one of them."""
_FEW_LEVELS = 10
"""Range of whole numbers below which they may be levels, such as 0, 1 and 5."""
_MAX_RATIO = 1024
"""Largest magnitude over range at which float32 still keeps 14 bits of the range."""


@dataclass
class _End:
    """The smallest value of a column (`sign` -1: of the negated values) and the values next to it.

    Attributes:
        count: its rows, in `runs` of adjacent ones; not counted once `next` is near.
        next: the smallest of the others.
    """

    sign: int = 1
    value: float = float("inf")
    count: int = 0
    runs: int = 0
    next: float = float("inf")
    highest: float = float("-inf")

    def add(self, values: NDArray[np.floating], low: float, high: float) -> None:
        """Adds a batch with its smallest and largest value."""
        self.highest = max(self.highest, high)
        if low > self.value:
            self.next = min(self.next, low)
            return
        if low < self.value:
            self.value, self.count, self.runs, self.next = low, 0, 0, self.value
        is_near = self.next - self.value <= _NEAR * (self.highest - self.next)
        if is_near or low == 0:  # it stays so, and the others need not be searched
            return
        is_it = values == self.sign * low
        others = values[~is_it]
        self.count += len(values) - len(others)
        self.runs += int(is_it[0]) + int(np.count_nonzero(is_it[1:] & ~is_it[:-1]))
        if len(others):
            lowest = others.min() if self.sign == 1 else -others.max()
            self.next = min(self.next, float(lowest))


@dataclass
class ColumnStats:
    """Statistics of one column.

    Attributes:
        kept: sentinels that the user declared to be values.
        origin: subtracted from values before they are stored; one of each series or of all.
        missing: number of rows without a value.
        low: smallest value, before the origin is subtracted.
        is_short: every stored value is a whole number within int16.
        sentinels: number of rows by sentinel.
        is_category: values are numbers of names.
        others: smallest and largest value apart from sentinels.
        ends: the smallest value, and the smallest of the negated values.
        range: smallest and largest value as stored.
    """

    kept: tuple[float, ...] = ()
    origin: float | NDArray[np.float64] = 0.0
    missing: int = 0
    low: float = float("inf")
    high: float = float("-inf")
    is_short: bool = True
    sentinels: dict[float, int] = field(default_factory=dict)
    is_category: bool = False
    others: tuple[float, float] = (float("inf"), float("-inf"))
    range: tuple[float, float] = (float("inf"), float("-inf"))
    ends: tuple[_End, _End] = field(default_factory=lambda: (_End(), _End(-1)))

    def stored(
        self, values: NDArray[np.floating], series: NDArray[np.int32] | None = None
    ) -> NDArray[np.float32]:
        """Returns values minus the origin as float32, infinite beyond its range; origins of series
        need the series number of each value.
        """
        with np.errstate(over="ignore"):
            if isinstance(self.origin, np.ndarray):
                values = values.astype(np.float64) - self.origin[series]
            elif self.origin:
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
        own = low, high
        if isinstance(self.origin, np.ndarray):
            own = float(stored.min()), float(stored.max())
        elif self.origin:
            own = low - self.origin, high - self.origin
        self.range = min(self.range[0], own[0]), max(self.range[1], own[1])
        if self.is_short:
            fits = own[0] > -32768 and own[1] < 32768
            self.is_short = fits and bool((stored == np.rint(stored)).all())
        if self.is_category:
            return None
        self.ends[0].add(values, low, high)
        self.ends[1].add(values, -high, -low)
        if low in _CODES or high in _CODES:
            kept = {float(np.float32(value)) for value in self.kept}
            codes = [read for read, code in _CODES.items() if float(np.float32(code)) not in kept]
            is_code = np.isin(values, codes)
            for value, count in zip(*np.unique(values[is_code], return_counts=True), strict=True):
                code = _CODES[float(value)]
                self.sentinels[code] = self.sentinels.get(code, 0) + int(count)
            if is_code.all():
                return None
            low, high = float(values[~is_code].min()), float(values[~is_code].max())
        self.others = min(self.others[0], low), max(self.others[1], high)
        return None

    def far_values(self) -> dict[float, int]:
        """Returns values far from all others, probably codes for "no value", and their rows.

        Those are sentinels that are farther from the others than their range and than half the
        sentinel's magnitude; a positive one below 1e20 must occur twice. The smallest or the
        largest value is one if it is repeated and farther from the others than twice their range;
        or if it is the only negative one, a whole number, and farther than half of it.
        """
        low, high = self.others
        found = {
            code: count
            for code, count in sorted(self.sentinels.items())
            if low <= high
            and max(low - code, code - high) > max(high - low, abs(code) / 2)
            and (code < 0 or count > 1 or code >= 1e20)
        }
        kept = {float(np.float32(value)) for value in (0.0, *self.kept)}  # 0: nothing was sold
        for least, end in zip((2, 3), self.ends, strict=True):
            value, gap, width = end.sign * end.value, end.next - end.value, end.highest - end.next
            are_levels = self.is_short and width < _FEW_LEVELS
            if end.count < least or are_levels or width <= 0 or float(np.float32(value)) in kept:
                continue
            is_only = end.sign == 1 and value < 0 <= end.next and value % 1 == 0
            is_far = gap > 2 * width and end.runs > 1  # one run may be a series of its own
            if is_far or (is_only and gap > _NEAR * width):
                found[value] = end.count
        return found

    def others_than(self, codes: Collection[float]) -> tuple[float, float]:
        """Returns the smallest and the largest value apart from `codes` and sentinels."""
        low, high = self.others
        low = self.ends[0].next if low in codes else low
        return low, -self.ends[1].next if high in codes else high

    def near_sentinels(self) -> list[float]:
        """Returns the sentinels outside the range of the others, which may still be values."""
        low, high = self.others
        return [c for c in sorted(self.sentinels) if not low <= c <= high and low <= high]


class SeriesRanges:
    """The smallest and the largest value of each series in a column."""

    def __init__(self) -> None:
        self.low, self.high = np.zeros(0), np.zeros(0)

    def add(self, values: NDArray[np.floating], series: NDArray[np.int32], num_series: int) -> None:
        """Adds a batch, with the number of each value's series; NaN where missing."""
        if more := num_series - len(self.low):
            self.low = np.append(self.low, np.full(more, np.inf))
            self.high = np.append(self.high, np.full(more, -np.inf))
        values = values.astype(np.float64, copy=False)  # ufunc.at takes 10 times as long to cast
        starts = np.flatnonzero(np.diff(series, prepend=-1))
        if 8 * len(starts) < len(series):  # runs of one series
            np.fmin.at(self.low, series[starts], np.fmin.reduceat(values, starts))
            np.fmax.at(self.high, series[starts], np.fmax.reduceat(values, starts))
        else:
            np.fmin.at(self.low, series, values)
            np.fmax.at(self.high, series, values)

    def tell_apart(self) -> bool:
        """Returns whether each series has one whole number, and no two the same."""
        is_one = (self.low == self.high) & (np.rint(self.low) == self.low)
        return bool(is_one.all()) and len(np.unique(self.low)) == len(self.low) > 1


def best_origins(low: NDArray[np.float64], high: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns origins that keep the digits of values in float32, by their ranges; usually 0.

    Values around 1e9 with steps of 1 collapse in float32; minus 1e9 they do not.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # numbers beyond float32 are refused later
        spread = high - low
        is_kept = spread == 0  # as are constants with the same digits in float32: prices, 3.99
        one, short = low[is_kept], low[is_kept].astype(np.float32)
        is_kept[is_kept] = (short == one) | (short.astype(str) == one.astype(str))
        is_near_zero = np.maximum(abs(low), abs(high)) <= _MAX_RATIO * spread
        middle = low + spread / 2
    origins = np.where(spread >= 2, np.rint(middle), middle)
    return np.where(is_kept | is_near_zero | (low > high), 0.0, origins)


def shown(value: float) -> str:
    """Returns the shortest text of a number: -9999, 1e+20."""
    return f"{value:.15g}" if float(f"{value:.15g}") == value else repr(value)
