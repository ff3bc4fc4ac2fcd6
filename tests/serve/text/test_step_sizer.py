"""How many tokens a call advances: from what the calls before it took."""

from __future__ import annotations

import pytest

from fastlstm.serve.text.step_sizer import LONGEST_S, PER_ROW_S, SHORTEST_S, StepSizer


def test_a_call_takes_the_time_it_should() -> None:
    pace, step_s = StepSizer(), 0.0005
    pace.saw(100, 100 * 50, 50 * step_s)
    aim_s = SHORTEST_S + 100 * PER_ROW_S
    assert pace.steps(100) == pytest.approx(aim_s / step_s, abs=1)
    assert pace.steps(1) == pytest.approx((SHORTEST_S + PER_ROW_S) / step_s, abs=1)
    assert pace.steps(10_000) <= LONGEST_S / step_s, "more rows take longer a step"
    for _ in range(50):  # the machine has become slower
        pace.saw(100, 100 * 50, 50 * 3 * step_s)
    assert pace.steps(100) == pytest.approx(aim_s / (3 * step_s), abs=1)


def test_a_call_advances_by_at_least_a_token_and_not_for_ever() -> None:
    pace = StepSizer()
    pace.saw(1, 1, 10.0)
    assert pace.steps(1) == 1
    pace = StepSizer()
    for _ in range(50):
        pace.saw(1, 1000, 1e-9)
    assert pace.steps(1) == 4096
    pace.saw(1, 0, 5.0)  # nothing was read or written: nothing is learnt
    assert pace.steps(1) == 4096
