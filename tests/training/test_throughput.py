"""How long a unit takes to score."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fastlstm.training.throughput import ThroughputMeter


def test_the_seconds_of_a_unit_are_of_the_steps_of_this_start_until_an_evaluation_is_timed() -> (
    None
):
    task: Any = SimpleNamespace(forward_share=1 / 3, step_units=2, flop_per_unit=0)
    meter = ThroughputMeter(task, 0.0)
    assert meter.unit_s == 0.0
    for _ in range(10):
        meter.add_step(loss=1.0, norm=1.0, units=2, seconds=1.5)
    assert meter.unit_s == pytest.approx(1.5 / 3 / 2)
    meter.add_evaluation(seconds=4.0, units=100)
    assert meter.unit_s == pytest.approx(0.04)
