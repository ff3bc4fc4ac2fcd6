from __future__ import annotations

import numpy as np
import pytest

from fastlstm.tuning import paired_times
from fastlstm.tuning.paired_times import (
    LOOK_ERROR,
    LOOKS,
    Estimate,
    Verdict,
    estimate,
    hodges_lehmann,
    jackknife_error,
    pairs_needed,
    student_quantile,
    undisturbed,
    verdict,
)

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
        (1.01, 1.05, 1.09, Verdict.SLOWER),
        (0.97, 1.00, 1.02, Verdict.NOT_SLOWER),
        (0.80, 0.85, 0.90, Verdict.NOT_SLOWER),
        (1.005, 1.01, 1.02, Verdict.NOT_SLOWER),  # slower, but by less than 3 %
        (0.97, 1.01, 1.05, Verdict.UNDECIDED),
        (0.0, 1.50, float("inf"), Verdict.UNDECIDED),
    ],
)
def test_the_three_verdicts(low: float, ratio: float, high: float, shown: Verdict) -> None:
    assert verdict(Estimate(ratio, low, high, 48, 0, 12, 0.1), 0.03) is shown


def test_too_few_groups_give_no_interval() -> None:
    a, b, _ = pairs(np.random.default_rng(6))
    found = estimate(a[:8], b[:8], np.repeat([0, 1], 4))
    assert (found.low, found.high) == (0.0, float("inf"))
    assert pairs_needed(found, 0.03) is None


def test_pairs_needed_grows_with_the_square_of_the_noise() -> None:
    wide = Estimate(1.0, np.exp(-0.06), np.exp(0.06), 48, 0, 12, 0.1)
    wider = Estimate(1.0, np.exp(-0.12), np.exp(0.12), 48, 0, 12, 0.1)
    needed, more = pairs_needed(wide, 0.03), pairs_needed(wider, 0.03)
    assert needed == 204  # 48 * (0.06 / log 1.03)² = 198
    assert more == 792
    assert pairs_needed(Estimate(1.10, 0.99, 1.22, 48, 0, 12, 0.1), 0.03) == 60


def test_false_alarms_and_misses_of_simulated_measurements() -> None:
    """A check of the parts together; the campaign has the figures."""
    rng = np.random.default_rng(7)
    shown = {1.0: [], 1.05: []}
    for ratio, found in shown.items():
        for _ in range(30):
            a, b, group = pairs(rng, 96, ratio, 0.04)
            looks = (estimate(a[:n], b[:n], group[:n]) for n in LOOKS[:4])
            verdicts = [verdict(look, 0.03) for look in looks]
            decided = [v for v in verdicts if v is not Verdict.UNDECIDED]
            found.append(decided[0] if decided else Verdict.UNDECIDED)
    assert shown[1.0].count(Verdict.SLOWER) <= 3
    assert shown[1.05].count(Verdict.NOT_SLOWER) <= 3
    assert shown[1.05].count(Verdict.SLOWER) >= 25


def test_the_file_is_pure_numpy() -> None:
    names = {name for name, value in vars(paired_times).items() if hasattr(value, "__spec__")}
    assert names == {"functools", "math", "np"}
