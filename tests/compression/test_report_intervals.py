"""Bootstrap intervals of figures of a text."""

from __future__ import annotations

import numpy as np
import pytest

from fastlstm.compression.report import bootstrap_interval


def test_the_interval_of_independent_values() -> None:
    values = np.random.default_rng(1).normal(0.5, 1.0, 100_000)
    low, high = bootstrap_interval(values, np.ones(len(values)))
    error = 1.96 / np.sqrt(len(values))
    assert low == pytest.approx(values.mean() - error, abs=0.1 * error)
    assert high == pytest.approx(values.mean() + error, abs=0.1 * error)
    assert bootstrap_interval(values, np.ones(len(values))) == (low, high)  # a fixed seed


def test_dependent_neighbours_widen_the_interval() -> None:
    alone = np.random.default_rng(2).normal(0.0, 1.0, 50_000)
    together = np.repeat(alone[:1000], 50)

    def width(values: np.ndarray) -> float:
        low, high = bootstrap_interval(values, np.ones(len(values)))
        return high - low

    assert width(together) > 4 * width(alone)


def test_weights_divide() -> None:
    low, high = bootstrap_interval(np.full(4000, 3.0), np.full(4000, 2.0))
    assert (low, high) == (1.5, 1.5)


@pytest.mark.parametrize("count", [10, 399, 400])
def test_few_values(count: int) -> None:
    low, high = bootstrap_interval(np.arange(count, dtype=float), np.ones(count))
    assert low is not None
    assert high is not None
    assert low <= (count - 1) / 2 <= high


@pytest.mark.parametrize(("count", "block"), [(1, None), (9, None), (9, 1), (29, 3)])
def test_too_few_blocks_have_no_interval(count: int, block: int | None) -> None:
    values, weights = np.arange(count, dtype=float), np.ones(count)
    assert bootstrap_interval(values, weights, block) == (None, None)
    assert bootstrap_interval(values, weights, 30) == (None, None)


def test_the_interval_of_a_small_case_drawn_by_hand() -> None:
    values = np.array([1.0, 3, 0, 2, 5, 1, 4, 4, 2, 0, 1, 7, 2, 2, 6, 1, 0, 3, 5, 9])
    weights = np.array([1.0, 2, 1, 1, 3, 1, 2, 2, 1, 1, 1, 2, 1, 1, 2, 1, 1, 1, 2, 3])
    rng, ratios = np.random.default_rng(0), []
    for drawn in rng.integers(10, size=(2000, 10)).tolist():  # pairs of neighbours
        above = sum(values[2 * k] + values[2 * k + 1] for k in drawn)
        ratios.append(above / sum(weights[2 * k] + weights[2 * k + 1] for k in drawn))
    ratios.sort()
    low, high = bootstrap_interval(values, weights, block=2)
    assert ratios[48] <= (low or 0) <= ratios[51]
    assert ratios[1948] <= (high or 0) <= ratios[1951]
