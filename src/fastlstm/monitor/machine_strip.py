"""How busy the machine of a run was over its time: by the run itself, and by others."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, NamedTuple

from fastlstm.report.events import number

if TYPE_CHECKING:
    from fastlstm.report.events import Event

MAX_BINS = 120
_FIRST_WIDTH_S = 10.0
_MAX_DOUBLINGS = 40
OTHERS = ("others_share", "steal_share", "throttled_share")
"""Shares of the machine that a run does not get, whatever takes them."""


def others_share(event: Event) -> float | None:
    """Returns the share of the machine that others took, 0..1, of an event that has it."""
    if number(event, OTHERS[0]) is None:
        return None
    return min(max(sum(number(event, name) or 0.0 for name in OTHERS), 0.0), 1.0)


class Bin(NamedTuple):
    """A part of a run's time: its beginning and width in seconds, mean shares of all cores."""

    begin_s: float
    width_s: float
    own: float
    others: float


class MachineStrip:
    """Means of `machine` events over equal parts of a run's time, at most 120 of them."""

    def __init__(self) -> None:
        self._width_s = _FIRST_WIDTH_S
        self._counts, self._own, self._others = array("d"), array("d"), array("d")

    def _columns(self) -> tuple[array[float], ...]:
        return self._counts, self._own, self._others

    def __bool__(self) -> bool:
        return bool(self._counts)

    @property
    def bins(self) -> list[Bin]:
        """The parts of which something is known, by time."""
        columns = zip(*self._columns(), strict=True)
        return [
            Bin(at * self._width_s, self._width_s, own / count, others / count)
            for at, (count, own, others) in enumerate(columns)
            if count
        ]

    @property
    def mean_others(self) -> float | None:
        """The share of the machine that others took over the whole run; None: nothing is known."""
        return sum(self._others) / sum(self._counts) if self else None

    def add(self, event: Event) -> None:
        """Adds a `machine` event."""
        at, share = number(event, "elapsed_s"), others_share(event)
        if at is None or share is None or not 0.0 <= at < _FIRST_WIDTH_S * 2.0**_MAX_DOUBLINGS:
            return
        cores = max(number(event, "cores") or 1.0, 1.0)
        own = min(max((number(event, "own_cores") or 0.0) / cores, 0.0), 1.0)
        while at >= MAX_BINS * self._width_s:
            self._halve()
        place = int(at / self._width_s)
        for column, value in zip(self._columns(), (1.0, own, share), strict=True):
            column.extend([0.0] * (place + 1 - len(column)))
            column[place] += value

    def _halve(self) -> None:
        self._width_s *= 2.0
        for column in self._columns():
            if len(column) % 2:
                column.append(0.0)
            column[:] = array("d", map(sum, zip(column[::2], column[1::2], strict=True)))

    def cut_after(self, seconds: float) -> None:
        """Drops what a resumed run repeats."""
        for column in self._columns():
            del column[math.ceil(max(seconds, 0.0) / self._width_s) :]

    def stored(self) -> bytes:
        """Returns the strip as bytes for this machine's own cache."""
        return b"".join(c.tobytes() for c in (array("d", [self._width_s]), *self._columns()))

    @classmethod
    def restored(cls, data: bytes) -> MachineStrip:
        """Returns a strip from `stored`. Raises ValueError for other bytes."""
        numbers = array("d")
        numbers.frombytes(data)
        length, rest = divmod(len(numbers) - 1, 3)
        if length < 0 or rest or not math.isfinite(sum(numbers)) or numbers[0] < _FIRST_WIDTH_S:
            raise ValueError("not a strip of a machine")
        strip = cls()
        strip._width_s = numbers[0]
        for at, column in enumerate(strip._columns()):
            column.extend(numbers[1 + at * length : 1 + (at + 1) * length])
        return strip
