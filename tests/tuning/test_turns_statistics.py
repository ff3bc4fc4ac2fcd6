import math

import numpy as np
import pytest

from fastlstm.tuning.turns import estimate

stats = pytest.importorskip("scipy.stats")


def test_the_ratio_is_the_median_of_the_pairs():
    found = estimate([1.0, 1.0, 2.0, 2.0, 1.0, 1.0], [1.1, 1.2, 2.6, 2.8, 1.5, 9.0])
    assert (found.ratio, found.low, found.high) == pytest.approx((1.35, 1.1, 9.0))


@pytest.mark.parametrize("count", [6, 8, 9, 16, 48, 192])
def test_the_interval_equals_scipys_quantile_test(count):
    ratios = np.exp(np.random.default_rng(count).normal(0, 0.05, count))
    found = estimate([1.0] * count, ratios.tolist())
    expected = stats.quantile_test(np.log(ratios), q=0, p=0.5).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx(np.exp([expected.low, expected.high]))


def test_exchanged_sides_give_the_inverse_ratio():
    a, b = np.exp(np.random.default_rng(2).normal(0, 0.05, (2, 47)))
    forth, back = estimate(a.tolist(), b.tolist()), estimate(b.tolist(), a.tolist())
    assert forth.ratio == pytest.approx(1 / back.ratio)
    assert (forth.low, forth.high) == pytest.approx((1 / back.high, 1 / back.low))


def test_a_few_disturbed_pairs_hardly_change_the_ratio():
    a, b = np.exp(np.random.default_rng(3).normal(0, 0.02, (2, 48)))
    b *= 1.1
    before = estimate(a.tolist(), b.tolist())
    b[:6] *= 5.0
    after = estimate(a.tolist(), b.tolist())
    assert after.ratio == pytest.approx(before.ratio, rel=0.02)
    assert after.high < 1.2


def test_too_few_pairs_give_no_interval():
    found = estimate([1.0] * 5, [2.0] * 5)
    assert (found.ratio, found.low, found.high, found.pairs) == (2.0, 0.0, math.inf, 5)


def test_the_interval_holds_the_true_ratio_in_95_of_100_measurements():
    rng = np.random.default_rng(7)
    for count in (6, 16, 48):
        found = [estimate(*np.exp(rng.normal(0, 0.1, (2, count))).tolist()) for _ in range(400)]
        assert np.mean([each.low <= 1.0 <= each.high for each in found]) > 0.93
