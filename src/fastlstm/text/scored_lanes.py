"""The lanes that a text is scored in, side by side, each with a state that earlier text warmed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

LANES, PRIME = 32, 256
"""Defaults of `evaluate`."""


@dataclass(frozen=True)
class ScoredLanes:
    """Lanes to run side by side: lane `k` predicts `length[k]` tokens from index `start[k]`.

    `prime` tokens before each `start` warm the state of every lane but that at the start of the
    text, which is the first where there is one (`has_first`).
    """

    start: NDArray[np.int64]
    length: NDArray[np.int64]
    prime: int = 0
    has_first: bool = True

    def part(self, lanes: range) -> ScoredLanes:
        own = slice(lanes.start, lanes.stop)
        return ScoredLanes(self.start[own], self.length[own], self.prime, lanes.start == 0)


def num_lanes(num_ids: int, lanes: int = LANES, prime: int = PRIME) -> int:
    """Returns the lanes that a text of so many tokens is evaluated in."""
    return max(1, min(lanes, (num_ids - 1) // max(prime, 1)))


def lanes_of(num_ids: int, lanes: int, prime: int = PRIME) -> ScoredLanes:
    """Returns lanes that score every token of a text but the first."""
    targets = num_ids - 1
    length = np.full(lanes, targets // lanes, dtype=np.int64)
    length[: targets % lanes] += 1
    start = 1 + np.concatenate([[0], np.cumsum(length)[:-1]])
    return ScoredLanes(start, length, prime if lanes > 1 else 0)
