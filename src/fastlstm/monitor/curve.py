"""A figure of a run over its steps, in a limited number of points."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_POINTS = 120
"""Least number of points of a long curve; above twice as many every second one is dropped."""


class CurvePoint(NamedTuple):
    """A figure of a run: step, seconds since its beginning, units trained on, value."""

    step: float
    seconds: float
    units: float
    value: float


class Curve:
    """Evenly thinned points, always with the newest and the lowest."""

    def __init__(self) -> None:
        self.steps, self.seconds = array("d"), array("d")
        self.units, self.values = array("d"), array("d")
        self._stride, self._num_offered = 1, 0
        self._is_last_kept = True

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[CurvePoint]:
        return map(CurvePoint, *self._columns())

    def _columns(self) -> tuple[array[float], ...]:
        return self.steps, self.seconds, self.units, self.values

    @property
    def is_due(self) -> bool:
        """Whether the next point is kept; another is replaced by its successor."""
        return self._num_offered % self._stride == 0

    def skip(self) -> None:
        """Counts a point that is not due and is not added."""
        self._num_offered += 1

    def make_room(self, count: int) -> None:
        """Thins the curve for `count` points to be added or skipped."""
        while (self._num_offered + count) > 2 * MAX_POINTS * self._stride:
            self._thin()

    def add(self, point: CurvePoint) -> None:
        """Adds the newest point; drops the one before unless it was due or is the lowest."""
        if not self._is_last_kept and (
            self.values[-1] > min(self.values) or point.value <= self.values[-1]
        ):
            for column in self._columns():
                column.pop()
        for column, value in zip(self._columns(), point, strict=True):
            column.append(value)
        self._is_last_kept = self.is_due
        self._num_offered += 1
        if len(self) > 2 * MAX_POINTS:
            self._thin()

    def _thin(self) -> None:
        self._stride *= 2
        last, lowest = len(self) - 1, self.values.index(min(self.values)) if len(self) else 0
        self._keep(at for at in range(len(self)) if at % 2 == 0 or at in (last, lowest))

    def cut_after(self, step: float) -> None:
        """Drops the points after a step; a resumed run repeats them."""
        self._keep(at for at, value in enumerate(self.steps) if value <= step)
        self._is_last_kept = True

    def _keep(self, places: Iterator[int]) -> None:
        kept = list(places)
        for column in self._columns():
            column[:] = array("d", [column[at] for at in kept])

    def lowest_until(self, limit: float, column: array[float]) -> float | None:
        """Returns the lowest value of points whose `seconds` or `units` are within a limit."""
        pairs = zip(column, self.values, strict=True)
        return min((value for at, value in pairs if at <= limit), default=None)
