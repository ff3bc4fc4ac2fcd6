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


def meter_of(gflops: float) -> ThroughputMeter:
    task: Any = SimpleNamespace(forward_share=0.5, step_units=2, flop_per_unit=1e9)
    return ThroughputMeter(task, gflops)


def test_a_ceiling_that_steps_exceed_is_none_from_then_on() -> None:
    meter = meter_of(100.0)
    found = list[float | None]()
    for seconds in (2.0, 0.98, 0.5, 2.0):  # 50, 102, 200 and 50 GFLOP/s
        meter.add_step(loss=1.0, norm=1.0, units=100, seconds=seconds)
        found.append(meter.take(0.0)["ceiling_share"])
    assert found == [0.5, 1.0, None, None]
    assert meter.is_ceiling_wrong


def test_the_wait_of_skipped_steps_is_no_more_than_all() -> None:
    meter = meter_of(0.0)
    meter.add_step(loss=1.0, norm=1.0, units=2, seconds=0.1)
    assert meter.take(wait_s=3.0)["input_wait_share"] == 1.0
    assert not meter.is_ceiling_wrong
