"""How a pipeline divides layers, and what it costs: pure functions.

Chunks of time pass through the stages of W processes, forward and then back, K chunks of a step::

    rank 0   f0 f1 f2 f3  .  .  .  b3 b2 b1 b0        W = 2, K = 4: of K + W - 1 = 5 places
    rank 1    . f0 f1 f2 f3 b3 b2 b1 b0  .            in each direction 1 is empty
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache


def divided(costs: Sequence[float], num_stages: int) -> list[range]:
    """Returns the layers of each stage, consecutive, so that the slowest stage is fastest.

    Args:
        costs: of every layer; at least as many as there are stages.
        num_stages: W.
    """

    @cache
    def cut(first: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """Returns the cost of the slowest of so many stages, and where each ends."""
        if stages == 1:
            return sum(costs[first:]), (len(costs),)
        choices = []
        for end in range(first + 1, len(costs) - stages + 2):
            slowest, ends = cut(end, stages - 1)
            choices.append((max(sum(costs[first:end]), slowest), (end, *ends)))
        return min(choices)

    ends = cut(0, num_stages)[1]
    return [range(a, b) for a, b in zip((0, *ends[:-1]), ends, strict=True)]


def bubble(num_stages: int, num_chunks: int) -> float:
    """Returns the share of time that a process waits in a pipeline of equal stages."""
    return (num_stages - 1) / (num_chunks + num_stages - 1)


def bubble_of(busy_s: Sequence[float], num_chunks: int) -> float:
    """Returns that share, the mean of the processes, where each is busy for another time.

    The slowest stage runs its chunks without a pause; the others wait for it.
    """
    slowest, total = max(busy_s), sum(busy_s)
    wall_s = (total + (num_chunks - 1) * slowest) / num_chunks
    return 1.0 - total / (len(busy_s) * wall_s) if wall_s else 0.0


def boundary_bytes(num_tokens: int, width: int, element_size: int) -> int:
    """Returns what crosses the boundary of two stages in a step, activations and gradients."""
    return 2 * num_tokens * width * element_size
