from __future__ import annotations

import numpy as np
import pytest

from fastlstm.tuning.turns import (
    LOOK_ERROR,
    Estimate,
    estimate,
    hodges_lehmann,
    jackknife_error,
    student_quantile,
    undisturbed,
    verdict,
)

LOOKS = (12, 24, 48, 96, 192)
stats = pytest.importorskip("scipy.stats")


def pairs(
    rng: np.random.Generator, count: int = 48, ratio: float = 1.0, noise: float = 0.05
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    a = np.exp(rng.normal(0, noise, count))
    return a, ratio * np.exp(rng.normal(0, noise, count)), np.arange(count) // 4


def test_the_quantiles_are_those_of_scipy() -> None:
    for freedom in (1, 2, 5, 23, 95):
        for probability in (0.9, 0.975, 1 - LOOK_ERROR / 2):
            expected = stats.t.ppf(probability, freedom)
            assert student_quantile(probability, freedom) == pytest.approx(expected, rel=1e-6)


def test_the_error_of_a_look_makes_five_per_cent_over_all_looks() -> None:
    places = np.array(LOOKS, dtype=float)
    correlation = np.sqrt(np.minimum.outer(places, places) / np.maximum.outer(places, places))
    normal = stats.multivariate_normal(cov=correlation)
    bound = np.full(len(LOOKS), stats.norm.isf(LOOK_ERROR / 2))
    inside = normal.cdf(bound, lower_limit=-bound, rng=np.random.default_rng(0))
    assert inside == pytest.approx(0.95, abs=5e-4)


def test_the_estimate_is_the_median_of_the_means_of_pairs() -> None:
    assert hodges_lehmann(np.array([0.0, 1.0, 5.0])) == 1.75  # of 0, .5, 1, 2.5, 3, 5
    values = np.random.default_rng(0).normal(0.3, 1.0, 30)
    # It is where the signed-rank statistic changes sides.
    ranks = stats.wilcoxon(values - hodges_lehmann(values)).statistic
    assert ranks == pytest.approx(30 * 31 / 4, abs=1)


def test_groups_count_and_not_the_pairs_in_them() -> None:
    rng = np.random.default_rng(1)
    group = np.arange(48) // 8
    values = rng.normal(0, 0.01, 48) + rng.normal(0, 0.1, 6)[group]
    expected = 0.1 / np.sqrt(6)
    assert jackknife_error(values, group) == pytest.approx(expected, rel=0.6)
    assert jackknife_error(values, np.arange(48)) < 0.6 * jackknife_error(values, group)


def test_exchanged_sides_give_the_inverse_ratio() -> None:
    a, b, group = pairs(np.random.default_rng(2), ratio=1.04)
    b[8:12] *= 5  # one side of two blocks
    forth, back = estimate(a, b, group), estimate(b, a, group)
    assert forth.ratio == pytest.approx(1 / back.ratio)
    assert forth.low == pytest.approx(1 / back.high)
    assert (forth.pairs, forth.dropped) == (back.pairs, back.dropped)


def test_a_disturbed_block_goes_on_both_sides() -> None:
    a, b, _ = pairs(np.random.default_rng(3))
    a[10] *= 20
    for first, second in ((a, b), (b, a)):
        kept = undisturbed(first, second)
        assert np.flatnonzero(~kept).tolist() == [10, 11]


def test_at_most_a_quarter_of_the_blocks_is_dropped() -> None:
    a, b, _ = pairs(np.random.default_rng(4))
    a[:20] *= 9
    b[:20] *= 9
    assert (~undisturbed(a, b)).sum() == 12


def test_a_slower_side_is_never_dropped_for_it() -> None:
    a, b, _ = pairs(np.random.default_rng(5), ratio=3.0, noise=0.01)
    assert (~undisturbed(a, b)).sum() <= 4


@pytest.mark.parametrize(
    ("low", "ratio", "high", "shown"),
    [
        (1.01, 1.05, 1.09, "slower"),
        (0.97, 1.00, 1.02, "not slower"),
        (0.80, 0.85, 0.90, "not slower"),
        (1.005, 1.01, 1.02, "not slower"),  # slower, but by less than 3 %
        (0.97, 1.01, 1.05, "undecided"),
        (0.0, 1.50, float("inf"), "undecided"),
    ],
)
def test_the_three_verdicts(low: float, ratio: float, high: float, shown: str) -> None:
    assert verdict(Estimate(ratio, low, high, 48, 0, 12, 0.1), 0.03) == shown


def test_too_few_groups_give_no_interval() -> None:
    a, b, _ = pairs(np.random.default_rng(6))
    found = estimate(a[:8], b[:8], np.repeat([0, 1], 4))
    assert (found.low, found.high) == (0.0, float("inf"))


def test_false_alarms_and_misses_of_simulated_measurements() -> None:
    rng = np.random.default_rng(7)
    shown = {1.0: [], 1.05: []}
    for ratio, found in shown.items():
        for _ in range(30):
            a, b, group = pairs(rng, 96, ratio, 0.04)
            looks = (estimate(a[:n], b[:n], group[:n]) for n in LOOKS[:4])
            verdicts = [verdict(look, 0.03) for look in looks]
            decided = [v for v in verdicts if v != "undecided"]
            found.append(decided[0] if decided else "undecided")
    assert shown[1.0].count("slower") <= 3
    assert shown[1.05].count("not slower") <= 3
    assert shown[1.05].count("slower") >= 25
