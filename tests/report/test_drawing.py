"""One chart as SVG: axes, legend, colours and ids of a page."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fastlstm.report.charts import draw_charts
from fastlstm.report.drawing import Band, DrawnCurve, Panel, draw
from fastlstm.report.history import read_history


def texts(svg: str) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter("text")]


def chart(*curves: DrawnCurve, unit: str = "steps", **axes: Any) -> str:
    shown = curves or [DrawnCurve([0, 1], [1.0, 2.0], "a", "a")]
    return draw(Panel(shown, unit, "y", **axes), "t", "", name="n").svg


@pytest.mark.parametrize(
    ("longest_s", "unit", "tick"),
    [(100, "seconds", "100"), (600, "minutes", "10"), (36_000, "hours", "10")],
)
def test_time_is_in_the_unit_that_fits(longest_s: int, unit: str, tick: str) -> None:
    shown = texts(chart(DrawnCurve([0, longest_s], [1.0, 2.0], "a", "a"), unit="time"))
    assert unit in shown
    assert tick in shown


@pytest.mark.parametrize(
    ("values", "is_log"), [([1.0, 2.1], True), ([1.0, 1.9], False), ([0.0, 9.0], False)]
)
def test_a_logarithmic_axis_is_for_positive_values_far_apart(
    values: list[float], is_log: bool
) -> None:
    curve = DrawnCurve([0, 1], values, "a", "a")
    assert ("y, log scale" in texts(chart(curve, may_be_log=True))) is is_log
    assert "y, log scale" not in texts(chart(curve))


def test_ids_have_the_name_of_the_chart_and_references_resolve() -> None:
    svg = chart(bands=[Band([0, 1], [0.5, 1.0], [1.5, 3.0], "80 %")])
    root = ElementTree.fromstring(svg)
    ids = {element.get("id") for element in root.iter()} - {None}
    assert ids
    assert all(str(name).startswith("n-") for name in ids)
    references = re.findall(r"url\(#([^)]+)\)", svg) + re.findall(r'href="#([^"]+)"', svg)
    assert references
    assert set(references) <= ids


def test_colours_are_variables_of_the_page_and_nothing_is_loaded() -> None:
    ends = ("one", "a", [1.0, 2.0]), ("two", "b", [2.0, 3.0])
    svg = chart(*(DrawnCurve([0, 1], y, label, colour) for label, colour, y in ends))
    assert {"a", "b", "muted", "grid", "ink"} <= set(re.findall(r"var\(--(\w+)\)", svg))
    assert "#0102" not in svg
    assert "http" not in svg
    assert {"one", "two"} <= set(texts(svg))


def test_one_curve_has_no_legend() -> None:
    assert "a" not in texts(chart())


def test_an_empty_band_is_not_drawn() -> None:
    band = Band([0, 1], [math.nan, 1.0], [1.0, math.nan], "80 %")
    assert band.is_empty
    assert chart(bands=[band]) == chart()
    assert not Band([0, 1], [0.0, 1.0], [1.0, math.nan], "80 %").is_empty


def test_the_title_is_for_readers_of_screens() -> None:
    svg = draw(Panel([], "steps", "y"), 'a "<b>\x1b', "", name="n").svg
    assert ElementTree.fromstring(svg).get("aria-label") == 'a "<b>\\x1b'


def test_the_first_losses_are_inside_the_chart(run_dir: Path) -> None:
    history = read_history(run_dir / "metrics.jsonl")
    svg = ElementTree.fromstring(draw_charts(history)[0].svg)
    clip = next(svg.iter("clipPath")).find("rect")
    assert clip is not None
    top, bottom = float(clip.get("y", "")), float(clip.get("y", "")) + float(clip.get("height", ""))
    lines = [line.get("d", "") for line in svg.iter("path") if line.get("clip-path")]
    heights = [float(y) for line in lines for y in re.findall(r"[ML] \S+ (\S+)", line)]
    assert len(heights) > 60
    assert top <= min(heights)
    assert max(heights) <= bottom
    assert "bits/char, log scale" in "".join(svg.itertext()), "from 1.6 to 6"


def test_a_curve_without_points_is_not_in_the_legend(run_dir: Path) -> None:
    history = read_history(run_dir / "metrics.jsonl")
    for event in history.steps:
        event["bits_per_char"] = None
    (chart, *_) = draw_charts(history)
    text = "".join(ElementTree.fromstring(chart.svg).itertext())
    assert "validation" in text
    assert "training" not in text


def test_losses_of_either_sign_are_drawn_on_a_plain_axis(run_dir: Path) -> None:
    history = read_history(run_dir / "metrics.jsonl")
    history.steps[-1]["bits_per_char"] = -3.0
    assert "log scale" not in draw_charts(history)[0].svg


def test_years_on_an_axis_are_not_thousands() -> None:
    years = DrawnCurve([0, 1], [2015.5, 2022.5], "a", "a")
    shown = texts(chart(years))
    assert {"2016", "2020", "2022"} <= set(shown)
    assert not any(text.endswith("k") for text in shown)
