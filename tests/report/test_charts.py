from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fastlstm.report import charts as charts_module
from fastlstm.report.charts import draw_charts
from fastlstm.report.drawing import tick_text
from fastlstm.report.history import History, read_history
from fastlstm.report.markup import name_text
from odd_names import NAMES, forecast_event


def test_no_steps_no_charts() -> None:
    assert draw_charts(History()) == []


def test_what_says_nothing_is_not_drawn(run_dir: Path) -> None:
    history = read_history(run_dir / "metrics.jsonl")
    for event in history.steps:
        event["ceiling_share"], event["input_wait_share"] = None, 0.004
    assert "Share of the ceiling" not in [chart.title for chart in draw_charts(history)]
    history.steps[5]["input_wait_share"] = 0.3
    titles = [chart.title for chart in draw_charts(history)]
    assert "Input wait" in titles
    assert "Share of the ceiling" not in titles


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


def test_a_history_without_some_numbers_lacks_those_charts(run_dir: Path) -> None:
    history = read_history(run_dir / "metrics.jsonl")
    for event in history.steps:
        event["ceiling_share"] = event["input_wait_share"] = event["lr"] = None
    titles = [chart.title for chart in draw_charts(history)]
    assert titles == ["Quality by tokens", "Quality by time", "Throughput", "Gradient norm"]


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


def test_the_same_run_gives_the_same_page(run_dir: Path) -> None:
    history = read_history(run_dir / "metrics.jsonl")
    assert draw_charts(history) == draw_charts(history)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1.5, "1.5"), (20_000, "20k"), (2_500_000, "2.5M"), (0.005, "0.005")],
)
def test_tick_text(value: float, text: str) -> None:
    assert tick_text(value) == text


def test_importing_the_report_loads_no_plotting_library() -> None:
    code = "import sys, fastlstm.report.page; print('matplotlib' in sys.modules)"
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert done.stdout == b"False\n"


def test_no_window_is_opened(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_charts(read_history(run_dir / "metrics.jsonl"))
    assert "matplotlib.pyplot" not in sys.modules


def test_forecasts_are_drawn_though_no_step_was_logged() -> None:
    """A run of less than a second has no line of progress."""
    shown = {"past": [1.0, 2.0], "actual": [3.0], "center": [2.5], "low": [2.0], "high": [None]}
    event = {"event": "forecast", "series": "a", "target": "y", **shown}
    curve = {"event": "calibration", "levels": [0.1, 0.9], "observed": [0.2, 0.8]}
    charts = draw_charts(History(forecasts=[event], calibration=curve))
    assert [chart.title for chart in charts] == [
        "Forecast of y of a",
        "Calibration of the intervals",
    ]
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
    assert {child.tag for child in svg.iter()} <= {
        "svg",
        "g",
        "defs",
        "path",
        "clipPath",
        "rect",
        "use",
        "text",
    }


def test_a_chart_that_fails_says_so_beside_the_others(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(history: History) -> None:
        raise ValueError("no <b>paper</b>\nleft")

    history = read_history(run_dir / "metrics.jsonl")
    whole = draw_charts(history)
    monkeypatch.setattr(charts_module, "_throughput", fail)
    charts = draw_charts(history)
    assert [chart.title for chart in charts] == [chart.title for chart in whole]
    failed = [chart for chart in charts if not chart.svg]
    assert [chart.title for chart in failed] == ["Throughput"]
    assert "ValueError: no <b>paper</b>\\nleft" in failed[0].caption
