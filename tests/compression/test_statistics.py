"""Bootstrap intervals of figures of a text."""

from __future__ import annotations

import numpy as np
import pytest

from fastlstm.compression.statistics import bootstrap_interval


def test_the_interval_of_independent_values() -> None:
    values = np.random.default_rng(1).normal(0.5, 1.0, 100_000)
    low, high = bootstrap_interval(values, np.ones(len(values)))
    error = 1.96 / np.sqrt(len(values))
    assert low == pytest.approx(values.mean() - error, abs=0.1 * error)
    assert high == pytest.approx(values.mean() + error, abs=0.1 * error)
    assert bootstrap_interval(values, np.ones(len(values))) == (low, high)  # a fixed seed


def test_neighbours_that_depend_on_each_other_make_it_wider() -> None:
    alone = np.random.default_rng(2).normal(0.0, 1.0, 50_000)
    together = np.repeat(alone[:1000], 50)

    def width(values: np.ndarray) -> float:
        low, high = bootstrap_interval(values, np.ones(len(values)))
        return high - low

    assert width(together) > 4 * width(alone)


def test_weights_divide() -> None:
    low, high = bootstrap_interval(np.full(4000, 3.0), np.full(4000, 2.0))
    assert (low, high) == (1.5, 1.5)


@pytest.mark.parametrize("count", [1, 2, 399, 400])
def test_few_values(count: int) -> None:
    low, high = bootstrap_interval(np.arange(count, dtype=float), np.ones(count))
    assert low <= (count - 1) / 2 <= high
