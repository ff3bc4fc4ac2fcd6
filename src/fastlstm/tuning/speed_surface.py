"""The speed of a grid of settings, from a few timings: the effects of the axes are separable.

The time per token of a training step is close to a product of one factor per axis. One timing per
value of each axis gives the factors; the cells that look best are then timed themselves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

Cell = tuple[Any, ...]
_NUM_CHECKED = 3
"""Cells that are timed because the factors say that they are the best."""


class SpeedSurface:
    """Seconds per token (or window) of every combination of a few axes.

    Args:
        axes: values by name of the axis; the first value of each is that of the base cell.
        time: returns the seconds per token of the values of all axes.

    Attributes:
        base: the cell of first values.
        timed: seconds per token by cell.
        factors: of the time, by axis and value; 1 for the base.
    """

    def __init__(
        self, axes: Mapping[str, Sequence[Any]], time: Callable[[dict[str, Any]], float]
    ) -> None:
        self.axes = {name: list(values) for name, values in axes.items()}
        self._time = time
        self.timed: dict[Cell, float] = {}
        self.base = tuple(values[0] for values in self.axes.values())
        base_s = self._timed(self.base)
        self.factors: dict[str, dict[Any, float]] = {}
        for place, (name, values) in enumerate(self.axes.items()):
            self.factors[name] = {
                value: self._timed(_with(self.base, place, value)) / base_s for value in values
            }

    def cell(self, values: Mapping[str, Any]) -> Cell:
        """Returns the cell of some values, those of the base for axes without one."""
        return tuple(values.get(n, b) for n, b in zip(self.axes, self.base, strict=True))

    def seconds(self, cell: Cell) -> float:
        """Returns the seconds per token of a cell: as timed, else by the factors."""
        if cell in self.timed:
            return self.timed[cell]
        factors = (self.factors[n][v] for n, v in zip(self.axes, cell, strict=True))
        return self.timed[self.base] * math.prod(factors)

    def fastest(self, axes: Collection[str] | None = None) -> dict[str, Any]:
        """Returns the values of the fastest cell; the best by the factors are timed first.

        Args:
            axes: that may differ from the base cell; default all.
        """
        free = [
            values if axes is None or name in axes else values[:1]
            for name, values in self.axes.items()
        ]
        cells = list(itertools.product(*free))
        for cell in sorted(cells, key=self.seconds)[:_NUM_CHECKED]:
            self._timed(cell)
        best = min((c for c in cells if c in self.timed), key=lambda cell: self.timed[cell])
        return dict(zip(self.axes, best, strict=True))

    def to_list(self, unit: str = "tokens") -> list[dict[str, Any]]:
        """Returns the timed cells for JSON, fastest first, with the `unit` per second."""
        ordered = sorted(self.timed.items(), key=lambda item: item[1])
        return [
            {**dict(zip(self.axes, cell, strict=True)), f"{unit}_per_s": 1.0 / seconds}
            for cell, seconds in ordered
        ]

    def _timed(self, cell: Cell) -> float:
        if cell not in self.timed:
            self.timed[cell] = self._time(dict(zip(self.axes, cell, strict=True)))
        return self.timed[cell]


def _with(cell: Cell, place: int, value: Any) -> Cell:
    return (*cell[:place], value, *cell[place + 1 :])
