"""Turns of two variants: in blocks ABBA or BAAB, at least three, hopeless ones are left."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastlstm.tuning.turns import in_turns


@dataclass
class Planned:
    name: str
    seconds: float
    log: list[str]
    cause: str = "threads"
    effect: str = "exact"
    options: Mapping[str, Any] = field(default_factory=dict)

    def warm_up(self) -> None:
        self.log.append("warm up")

    def turn(self, seconds: float, use_mean: bool = False) -> float:
        self.log.append(f"{self.name}{'*' * use_mean}")
        return self.seconds


def run(a: float, b: float, cause: str = "threads") -> tuple[list[str], tuple[list[float], ...]]:
    log: list[str] = []
    base, variant = Planned("A", a, log), Planned("B", b, log, cause)
    times = in_turns(base, variant, time.perf_counter() - 1.0, random.Random(0), 0.01)
    return log, times


def test_both_sides_take_turns_in_blocks_of_four() -> None:
    log, times = run(1.0, 0.5)
    assert log[0] == "warm up"
    blocks = ["".join(log[k : k + 4]) for k in range(1, len(log), 4)]
    assert len(blocks) == 3
    assert set(blocks) <= {"ABBA", "BAAB"}
    assert times == ([1.0] * 6, [0.5] * 6)


def test_a_hopeless_variant_is_left_after_a_block() -> None:
    assert run(1.0, 2.0)[1] == ([1.0] * 2, [2.0] * 2)


def test_waits_for_input_are_means() -> None:
    assert "A*" in run(1.0, 0.5, "input")[0]
