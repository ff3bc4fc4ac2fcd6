"""The rows of every batch that a process has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """Consecutive rows of every batch: one of `size` nearly equal parts.

    Attributes:
        rank: number of the part, from 0.
        size: number of parts.
    """

    rank: int = 0
    size: int = 1

    def rows(self, num_rows: int) -> slice:
        """Returns this part's rows in a batch of `num_rows`; there may be none in a small batch."""
        return slice(num_rows * self.rank // self.size, num_rows * (self.rank + 1) // self.size)
