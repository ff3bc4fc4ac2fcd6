from __future__ import annotations

from typing import Any

import pytest

from fastlstm.report import terminal
from fastlstm.report.terminal import cell_width, clip, tick_texts, wrap


@pytest.mark.parametrize(
    ("shown", "texts"),
    [
        (terminal.short_count, {0: "0", 999.4: "999", 999.9: "1.0k", 12_345: "12.3k",
         182_345: "182k", 999_499: "999k", 999_900: "1.00M", 1_234_567: "1.23M",
         45_600_000_000: "45.6G"}),
        (terminal.clock, {0.4: "0:00", 7: "0:07", 754: "12:34", 3723: "1:02:03",
         360_000: "4d04h"}),
        (terminal.percent, {0: "0%", 0.0012: "0.1%", 0.0996: "10%", 0.613: "61%", 1: "100%"}),
        (terminal.short_bytes, {950: "950 B", 12_345: "12.3 kB", 1.23e9: "1.23 GB"}),
    ],
    ids=["counts in five characters", "clock", "percent", "bytes"],
)  # fmt: skip
def test_numbers_are_shown_shortly(shown: Any, texts: dict[float, str]) -> None:
    assert {value: shown(value) for value in texts} == texts


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.0, 0.005, 1.5], ["0", "0.005", "1.5"]),
        ([0, 20_000, 2_500_000], ["0", "20k", "2.5M"]),
        ([2018, 2019], ["2018", "2019"]),
        ([12_345.1, 12_345.2], ["12.3451k", "12.3452k"]),
        ([0.16205, 0.162025, 0.162], ["0.16205", "0.162025", "0.162"]),
        ([], []),
    ],
)
def test_labels_of_an_axis_are_precise(values: list[float], texts: list[str]) -> None:
    assert tick_texts(values) == texts


def test_width_of_wide_and_combining_characters() -> None:
    assert cell_width("abc") == 3
    assert cell_width("戦争") == 4
    assert cell_width("é") == 1


@pytest.mark.parametrize(
    "text", ["plain words here", "戦争と平和" * 9, "x" * 50, "    indented text"]
)
def test_wrap_keeps_the_width_and_the_text(text: str) -> None:
    lines = wrap(text, 11)
    assert max(map(cell_width, lines)) <= 11
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_wrap_keeps_the_indentation() -> None:
    assert wrap("    def f(x):", 20) == ["    def f(x):"]
    assert wrap("", 20) == [""]


def test_clip_counts_columns() -> None:
    assert clip("short", 10) == "short"
    assert clip("戦争と平和", 8) == "戦争..."
