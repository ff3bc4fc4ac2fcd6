"""Intervals of a difference that is measured on a text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_BLOCKS, _MIN_BLOCKS, _BLOCK = 1000, 20, 200
_SAMPLES = 2000


def bootstrap_interval(values: NDArray[Any], weights: NDArray[Any]) -> tuple[float, float]:
    """Returns the 95 % bootstrap interval of ``sum(values) / sum(weights)``.

    Neighbouring values depend on each other: blocks of at least 200, of few values fewer, are
    drawn, 2,000 times, with a fixed seed.

    Args:
        values: `(n,)`, in the order of the text.
        weights: `(n,)`, not negative; their sum is positive.
    """
    num = max(min(_MIN_BLOCKS, len(values)), min(_MAX_BLOCKS, len(values) // _BLOCK))
    edges = np.linspace(0, len(values), num, endpoint=False).astype(np.int64)
    sums, sizes = (np.add.reduceat(a.astype(np.float64), edges) for a in (values, weights))
    drawn = np.random.default_rng(0).integers(num, size=(_SAMPLES, num))
    ratios = sums[drawn].sum(1) / np.maximum(sizes[drawn].sum(1), 1.0)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(high)
