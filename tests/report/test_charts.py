from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fastlstm.report.charts import draw_charts
from fastlstm.report.history import History, read_history


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
    code = "import sys, fastlstm.report.page; print('matplotlib' in sys.modules)"
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert done.stdout == b"False\n"


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
