"""Charts of a run; of a forecaster: forecasts beside actual values, calibration."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fastlstm.report.charts import draw_charts
from fastlstm.report.history import History, read_history
from fastlstm.report.markup import name_text
from odd_names import NAMES, forecast_event
from test_light_import import loaded_by


def test_no_steps_no_charts() -> None:
    assert draw_charts(History()) == []


def test_a_chart_without_a_visible_curve_is_left_out(run_dir: Path) -> None:
    history = read_history(run_dir / "metrics.jsonl")
    for event in history.steps:
        event["ceiling_share"], event["input_wait_share"] = None, 0.004
    assert "Share of the ceiling" not in [chart.title for chart in draw_charts(history)]
    history.steps[5]["input_wait_share"] = 0.3
    titles = [chart.title for chart in draw_charts(history)]
    assert "Input wait" in titles
    assert "Share of the ceiling" not in titles


def test_charts_without_numbers_are_left_out(run_dir: Path) -> None:
    history = read_history(run_dir / "metrics.jsonl")
    for event in history.steps:
        event["ceiling_share"] = event["input_wait_share"] = event["lr"] = None
    titles = [chart.title for chart in draw_charts(history)]
    assert titles == ["Quality by tokens", "Quality by time", "Throughput", "Gradient norm"]


def test_the_same_run_gives_the_same_charts(run_dir: Path) -> None:
    history = read_history(run_dir / "metrics.jsonl")
    assert draw_charts(history) == draw_charts(history)


def test_importing_the_report_loads_no_plotting_library() -> None:
    assert "matplotlib" not in loaded_by("import fastlstm.report.page")


def test_no_window_is_opened(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)  # another test's
    draw_charts(read_history(run_dir / "metrics.jsonl"))
    assert "matplotlib.pyplot" not in sys.modules


def test_several_processes_have_a_chart_that_names_the_slowest(run_dir: Path) -> None:
    history = read_history(run_dir / "metrics.jsonl")
    assert "Processes" not in [chart.title for chart in draw_charts(history)]
    for event in history.steps:
        event["rank_s"] = [0.2, 0.21, 0.4, 0.19]
    chart = next(chart for chart in draw_charts(history) if chart.title == "Processes")
    assert "at the end rank 2 of 4" in chart.caption
    assert "slowest" in chart.svg


def test_a_resume_is_a_line_in_the_pictures_of_the_losses(run_dir: Path) -> None:
    history = read_history(run_dir / "metrics.jsonl")
    history.start["units"] = 4e5  # the fixture has no step before its resume
    marked = [chart.title for chart in draw_charts(history) if "resumed" in chart.svg]
    assert marked == ["Quality by tokens", "Quality by time"]
    history.starts.clear()
    assert not any("resumed" in chart.svg for chart in draw_charts(history))


def drawn(event: dict[str, object]) -> ElementTree.Element:
    (chart,) = draw_charts(History(forecasts=[event]))
    return ElementTree.fromstring(chart.svg)


def test_a_forecast_has_dates_and_a_legend_with_its_interval() -> None:
    times = [f"2024-05-0{day}T12:00:00" for day in range(1, 5)]
    text = "".join(drawn({**forecast_event("y"), "times": times}).itertext())
    for word in ("actual", "forecast", "80 % interval", "2024-May"):
        assert word in text, word
    assert "steps" not in text


@pytest.mark.parametrize(
    "times", [None, [], ["12024-05-01"] * 4, [1, 2, 3, 4], "2024", ["2024-05-01"] * 3]
)
def test_without_dates_steps_are_counted(times: object) -> None:
    text = "".join(drawn({**forecast_event("y"), "times": times}).itertext())
    assert "steps from the forecast origin" in text


def test_steps_are_whole_numbers() -> None:
    texts = [text.text or "" for text in drawn({**forecast_event("y"), "past": [1.0]}).iter("text")]
    steps = texts[: texts.index("steps from the forecast origin")]
    assert steps
    assert all(re.fullmatch(r"-?\d+", text) for text in steps)


def test_an_interval_of_unknown_ends_is_not_in_the_legend() -> None:
    event = {**forecast_event("y"), "low": [None, None], "high": [None, 3.0]}
    (chart,) = draw_charts(History(forecasts=[event]))
    assert "interval" not in "".join(ElementTree.fromstring(chart.svg).itertext())
    assert "no interval: too few validation values" in chart.caption


def test_single_points_are_seen() -> None:
    ahead = {"actual": [3.0], "center": [2.5], "low": [2.0], "high": [3.0]}
    svg = drawn({**forecast_event("y"), "past": [1.0, None, 2.0], **ahead})
    marks = [use for use in svg.iter("use") if use.get("y")]
    assert len(marks) >= 1 + 3, "the forecast, and values beside a missing one"
    assert "80 % interval" in "".join(svg.itertext())


def test_forecasts_are_drawn_though_no_step_was_logged() -> None:
    """A run of less than a second has no line of progress."""
    shown = {"past": [1.0, 2.0], "actual": [3.0], "center": [2.5], "low": [2.0], "high": [None]}
    event = {"event": "forecast", "series": "a", "target": "y", **shown}
    curve = {"event": "calibration", "levels": [0.1, 0.9], "observed": [0.2, 0.8]}
    charts = draw_charts(History(forecasts=[event], calibration=curve))
    titles = [chart.title for chart in charts]
    assert titles == ["Forecast of y of a", "Calibration of the intervals"]
    assert not draw_charts(History(forecasts=[{**event, "center": [1.0, 2.0]}]))


@pytest.mark.parametrize("name", NAMES)
def test_names_are_drawn_as_they_are(name: str) -> None:
    (chart,) = draw_charts(History(forecasts=[forecast_event(name, series=name)]))
    svg = ElementTree.fromstring(chart.svg)
    texts = ["".join(text.itertext()) for text in svg.iter("text")]
    shown = name_text(name)
    assert chart.title == f"Forecast of {shown} of {shown}"
    assert svg.get("aria-label") == chart.title
    assert any(shown[:24].strip() == text[: len(shown[:24])].strip() for text in texts)
    known = {"svg", "g", "defs", "path", "clipPath", "rect", "use", "text"}
    assert {child.tag for child in svg.iter()} <= known


@pytest.mark.parametrize(
    "change",
    [
        {"past": []}, {"past": "12"}, {"past": [1.0, "2"]}, {"center": None},
        {"low": [1.0]}, {"actual": [1.0, 2.0, 3.0]}, {"high": {"a": 1}},
    ],
)  # fmt: skip
def test_a_forecast_without_its_values_is_not_drawn(change: dict[str, object]) -> None:
    assert draw_charts(History(forecasts=[{**forecast_event("y"), **change}])) == []


def test_a_calibration_is_drawn_if_it_has_its_values() -> None:
    event, shown = {"levels": [0.1, 0.9], "observed": [0.2, 0.8]}, [forecast_event("y")]
    _, whole = draw_charts(History(forecasts=shown, calibration=event))
    assert whole.title == "Calibration of the intervals"
    assert "ideal" in "".join(ElementTree.fromstring(whole.svg).itertext())
    for change in ({"levels": []}, {"levels": [0.1]}, {"observed": None}, {"observed": [0.1, "x"]}):
        assert len(draw_charts(History(forecasts=shown, calibration={**event, **change}))) == 1


def test_the_time_zone_is_in_the_caption_and_a_long_name_is_cut_on_the_axis() -> None:
    event = {**forecast_event("y" * 60), "time_zone": "Europe/Berlin"}
    (chart,) = draw_charts(History(forecasts=[event]))
    assert chart.caption.endswith("with its 80 % interval. Times in Europe/Berlin.")
    texts = ["".join(text.itertext()) for text in ElementTree.fromstring(chart.svg).iter("text")]
    assert "y" * 24 + "…" in texts
