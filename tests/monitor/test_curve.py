from __future__ import annotations

import random
from itertools import pairwise

import pytest

from fastlstm.monitor.curve import MAX_POINTS, Curve, CurvePoint


def curve_of(values: list[float]) -> Curve:
    curve = Curve()
    for at, value in enumerate(values):
        curve.add(CurvePoint(at, 2.0 * at, 3.0 * at, value))
    return curve


@pytest.mark.parametrize("count", [1, 2, 240, 241, 1000, 5003])
def test_a_curve_is_short_and_keeps_newest_and_lowest(count: int) -> None:
    rng = random.Random(count)
    values = [rng.random() for _ in range(count)]
    curve = curve_of(values)
    assert len(curve) <= 2 * MAX_POINTS
    assert len(curve) >= min(count, MAX_POINTS)
    assert curve.steps[-1] == count - 1
    assert min(curve.values) == min(values)
    assert list(curve.steps) == sorted(set(curve.steps))


def test_points_are_as_dense_at_the_beginning_as_at_the_end() -> None:
    curve = curve_of([1.0] * 5000)
    gaps = [after - before for before, after in pairwise(curve.steps)]
    assert max(gaps) <= 2 * 5000 / MAX_POINTS


def test_steps_that_a_resumed_run_repeats_are_cut() -> None:
    curve = curve_of([5.0, 4.0, 3.0, 2.0])
    curve.cut_after(1)
    curve.add(CurvePoint(2, 9.0, 9.0, 3.5))
    assert list(curve.steps) == [0, 1, 2]
    assert curve.lowest_until(8.0, curve.seconds) == 4.0
    assert curve.lowest_until(-1.0, curve.seconds) is None
