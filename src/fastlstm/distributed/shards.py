"""Logical shards: fixed parts of every batch, whatever number of processes computes them.

The gradient of a batch is the sum over its S shards, added as a binary tree. The tree does not
depend on how many processes share the shards, so neither do the weights, to the last bit::

    shard      0   1   2   3        1 process: adds all
    level 1    └─+─┘   └─+─┘        2 processes: each adds two shards, then they exchange
    level 2      └───+───┘          4 processes: exchange with 1 neighbour, then with 2

The random numbers of a shard follow from (seed, step, shard) alone.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Shards:
    """The shards of a batch, and those that this process computes.

    Attributes:
        num: S, a power of two; 1 is a batch that is not cut.
        rank: of this process.
        world_size: W, processes that share the shards; divides S.
    """

    num: int = 1
    rank: int = 0
    world_size: int = 1

    @property
    def own(self) -> range:
        """Numbers of the shards that this process computes."""
        each = self.num // self.world_size
        return range(self.rank * each, (self.rank + 1) * each)

    def rows(self, num_rows: int) -> slice:
        """Returns the rows of a batch of `num_rows` that this process computes."""
        return slice(self._begin(self.own.start, num_rows), self._begin(self.own.stop, num_rows))

    def parts(self, num_rows: int, num_own: int) -> list[slice]:
        """Returns the rows of each own shard of a batch with places for `num_rows`, of which this
        process has `num_own`, counted from its first; a small batch leaves shards empty.
        """
        first = self.rows(num_rows).start
        shards = range(self.own.start, self.own.stop + 1)
        bounds = [min(self._begin(shard, num_rows) - first, num_own) for shard in shards]
        return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]

    def _begin(self, shard: int, num_rows: int) -> int:
        return num_rows * shard // self.num


def shard_seed(seed: int, step: int, shard: int) -> int:
    """Returns the seed of the random numbers that a shard draws in a step, 63 bits."""
    words = np.random.SeedSequence([seed, step, shard]).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))
