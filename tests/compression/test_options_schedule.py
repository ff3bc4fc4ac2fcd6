"""The schedule of pruning, beside TensorFlow Model Optimization's written out."""

from __future__ import annotations

import pytest

from fastlstm.compression.options import PruningSchedule, in_steps


def polynomial_decay(
    step: int, final: float, begin: int, end: int, power: float, every: int
) -> tuple[bool, float]:
    """`PolynomialDecay.__call__` of tensorflow-model-optimization 0.8.1, in plain numbers."""
    is_in_range = step >= begin and (step <= end or end < 0)
    is_turn = (step - begin) % every == 0
    p = min(1.0, max(0.0, (step - begin) / (end - begin)))
    return is_in_range and is_turn, -final * (1 - p) ** power + final


@pytest.mark.parametrize(
    ("final", "begin", "end", "power", "every"),
    [(0.9, 0, 100, 3, 10), (0.8, 7, 63, 3, 1), (0.75, 10, 95, 2.5, 20), (0.999, 1, 2, 3, 100)],
)
def test_the_schedule_equals_polynomial_decay(
    final: float, begin: int, end: int, power: float, every: int
) -> None:
    schedule = PruningSchedule(final=final, begin=begin, end=end, power=power, every=every)
    for step in range(end + 50):
        is_due, sparsity = polynomial_decay(step, final, begin, end, power, every)
        assert schedule.is_due(step, step) == is_due, step
        assert schedule.sparsity(step) == pytest.approx(sparsity, abs=1e-12), step
    assert schedule.sparsity(begin) == 0.0
    assert schedule.sparsity(end) == final


def test_a_schedule_of_one_step_prunes_at_once() -> None:
    schedule = PruningSchedule(final=0.5, begin=4, end=4)
    assert [schedule.sparsity(step) for step in (3, 4, 5)] == [0.0, 0.5, 0.5]
    assert [schedule.is_due(step, step) for step in (3, 4, 5)] == [False, True, False]


def test_shares_become_steps_if_the_steps_are_known() -> None:
    shares = PruningSchedule(final=0.5, begin=0.05, end=0.6)
    steps = shares.resolved(1000)
    assert (steps.begin, steps.end, type(steps.begin), type(steps.end)) == (50, 600, int, int)
    assert str(steps) == "from step 50 to step 600"
    assert shares.resolved(None) == shares
    assert str(shares) == "from 5 % to 60 % of the run"
    assert steps.resolved(10) == steps, "steps stay"
    assert (in_steps(1, 1000), in_steps(1.0, 1000), in_steps(0.5, None)) == (1, 1000, 0.5)


def test_a_budget_renews_masks_every_so_many_steps() -> None:
    schedule = PruningSchedule(final=0.5, begin=0.25, end=0.75, power=1.0, every=5)
    assert [schedule.is_due(step, 0.3) for step in (9, 10, 11)] == [False, True, False]
    assert not schedule.is_due(10, 0.24)
    assert not schedule.is_due(10, 0.76)
    assert schedule.sparsity(0.5) == 0.25
