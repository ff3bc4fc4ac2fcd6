"""Intervals of a difference that is measured on a text or a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MIN_BLOCKS = 10
"""Fewer say too little about how the values scatter."""
_MAX_BLOCKS, _NUM_BLOCKS, _BLOCK = 1000, 20, 200
_SAMPLES = 2000


def bootstrap_interval(
    values: NDArray[Any], weights: NDArray[Any], block: int | None = None
) -> tuple[float, float] | tuple[None, None]:
    """Returns the 95 % bootstrap interval of ``sum(values) / sum(weights)``, both `(n,)`.

    Neighbouring values depend on each other: blocks of at least `block` of them are drawn, 2,000
    times, with a fixed seed; by default blocks of 200, or 20 shorter ones. None, None of fewer than
    10 blocks.
    """
    least = min(_NUM_BLOCKS, len(values)) if block is None else 0
    num = min(_MAX_BLOCKS, max(least, len(values) // (block or _BLOCK)))
    if num < MIN_BLOCKS:
        return None, None
    edges = np.linspace(0, len(values), num, endpoint=False).astype(np.int64)
    sums, sizes = (np.add.reduceat(a.astype(np.float64), edges) for a in (values, weights))
    drawn = np.random.default_rng(0).integers(num, size=(_SAMPLES, num))
    ratios = sums[drawn].sum(1) / np.maximum(sizes[drawn].sum(1), 1.0)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(high)
