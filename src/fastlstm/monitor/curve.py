"""A figure of a run over its steps, in few points however long the run is."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_POINTS = 120
"""Points kept of a curve; beyond twice as many every second one goes."""


class Point(NamedTuple):
    """A figure of a run: step, seconds since its beginning, units trained on, value."""

    step: float
    seconds: float
    units: float
    value: float


class Curve:
    """Evenly thinned points, always with the newest and the lowest of those that were added.

    It is kept in arrays, so that a thousand curves are loaded in a few milliseconds.

    Attributes:
        steps, seconds, units, values: the columns.
    """

    def __init__(self) -> None:
        self.steps, self.seconds = array("d"), array("d")
        self.units, self.values = array("d"), array("d")
        self._stride, self._num_offered = 1, 0
        self._is_last_kept = True

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Point]:
        return map(Point, *self._columns())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Curve) and self._columns() == other._columns()

    __hash__ = None  # type: ignore[assignment]

    def _columns(self) -> tuple[array[float], ...]:
        return self.steps, self.seconds, self.units, self.values

    @property
    def is_due(self) -> bool:
        """Whether the next point stays; others make room for the one that follows them."""
        return self._num_offered % self._stride == 0

    def skip(self) -> None:
        """Counts a point that is not due, and is not added."""
        self._num_offered += 1

    def make_room(self, count: int) -> None:
        """Thins for so many points that are to be added or skipped."""
        while (self._num_offered + count) > 2 * MAX_POINTS * self._stride:
            self._thin()

    def add(self, point: Point) -> None:
        """Adds the newest point."""
        if not self._is_last_kept and self.values[-1] > min(min(self.values), point.value):
            self._remove_last()
        elif not self._is_last_kept and point.value <= self.values[-1]:
            self._remove_last()  # another one is the lowest now
        for column, value in zip(self._columns(), point, strict=True):
            column.append(value)
        self._is_last_kept = self.is_due
        self._num_offered += 1
        if len(self) > 2 * MAX_POINTS:
            self._thin()

    def _remove_last(self) -> None:
        for column in self._columns():
            column.pop()

    def _thin(self) -> None:
        self._stride *= 2
        last, lowest = len(self) - 1, self.values.index(min(self.values)) if len(self) else 0
        kept = [at for at in range(len(self)) if at % 2 == 0 or at in (last, lowest)]
        for column in self._columns():
            column[:] = array("d", [column[at] for at in kept])

    def cut_after(self, step: float) -> None:
        """Drops the points after a step, which a resumed run repeats."""
        kept = [at for at, value in enumerate(self.steps) if value <= step]
        for column in self._columns():
            column[:] = array("d", [column[at] for at in kept])
        self._is_last_kept = True

    def lowest_until(self, limit: float, column: array[float]) -> float | None:
        """Returns the lowest value where a column, `seconds` or `units`, is within a limit."""
        pairs = zip(column, self.values, strict=True)
        return min((value for at, value in pairs if at <= limit), default=None)

    def stored(self) -> bytes:
        """Returns the curve as bytes for this machine's own cache."""
        head = array("d", (self._stride, self._num_offered, self._is_last_kept))
        return b"".join(part.tobytes() for part in (head, *self._columns()))

    @classmethod
    def restored(cls, data: bytes) -> Curve:
        """Returns a curve from `stored`. Raises ValueError for other bytes."""
        numbers = array("d")
        numbers.frombytes(data)
        length, rest = divmod(len(numbers) - 3, 4)
        if length < 0 or rest or not all(map(math.isfinite, numbers)):
            raise ValueError("not a curve")
        curve = cls()
        curve._stride, curve._num_offered = max(int(numbers[0]), 1), int(numbers[1])
        curve._is_last_kept = bool(numbers[2])
        for at, column in enumerate(curve._columns()):
            column.extend(numbers[3 + at * length : 3 + (at + 1) * length])
        return curve
