"""Two variants of the same work timed in turns, so that what disturbs the machine slows both."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any, Protocol

TURN_S = 0.25
_MIN_BLOCKS = 3
"""Of two pairs each: fewer give no interval."""
_HOPELESS = 0.85
"""A variant whose first turns run at this share of the speed of the base is not timed on."""


class TimedVariant(Protocol):
    """Work with one thing changed, whose speed can be timed.

    Attributes:
        cause: what would hold the work back if the variant is faster.
        effect: on the result of the work.
        options: changed, by name.
    """

    @property
    def cause(self) -> str: ...
    @property
    def effect(self) -> str: ...
    @property
    def options(self) -> Mapping[str, Any]: ...

    def warm_up(self) -> None:
        """Does work that does not count."""

    def turn(self, seconds: float, use_mean: bool = False) -> float:
        """Works for about so many seconds; returns the seconds per unit of work."""


def in_turns(
    base: TimedVariant,
    variant: TimedVariant,
    end: float,
    rng: random.Random,
    turn_s: float = TURN_S,
) -> tuple[list[float], list[float]]:
    """Returns the times of both sides in blocks ABBA or BAAB, at least three, until `end`.

    A variant that is hopelessly slower is left after its first block.

    Args:
        base: what the variant is compared with.
        variant: the other side.
        end: of the measurement, as `time.perf_counter`.
        rng: draws which side begins.
        turn_s: seconds of a turn.
    """
    variant.warm_up()
    times: tuple[list[float], list[float]] = ([], [])
    use_mean = variant.cause == "input"
    while len(times[0]) < 2 * _MIN_BLOCKS or time.perf_counter() < end:
        first = rng.randrange(2)
        for side in (first, 1 - first, 1 - first, first):
            times[side].append((base, variant)[side].turn(turn_s, use_mean))
        is_hopeless = min(times[0]) < _HOPELESS * min(times[1])
        if is_hopeless and len(times[0]) >= 2:
            break
    return times
