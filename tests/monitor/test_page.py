from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fastlstm.cli.main import main
from fastlstm.monitor.page import _ticks, body, overlay, page
from fastlstm.monitor.run_summary import RunSummary
from recorded_run import add_event


def read(*paths: Path) -> list[RunSummary]:
    runs = [RunSummary(path) for path in paths]
    for run in runs:
        run.update()
    return runs


def test_runs_curves_and_differences_are_shown(write_run: Any, tmp_path: Path) -> None:
    runs = read(write_run("one"), write_run("two", batch_size=64, is_ended=False, seconds=20.0))
    html = body(runs, tmp_path)
    assert html.count("<tr>") == 3 + 2
    assert "1 dead, 1 finished" in html
    assert html.count("<polyline") == 2 + 2 * 2
    assert "<td>batch_size</td><td>64</td><td>32</td>" in html


def test_names_and_texts_of_runs_are_escaped(write_run: Any, tmp_path: Path) -> None:
    evil = '<img src=x onerror="alert(1)">'
    run, other = write_run(evil.replace("/", ""), **{evil: evil}, source=evil), write_run("b")
    add_event(run, event="message", level="warning", text=evil)
    html = body(read(run, other), tmp_path)
    assert "<img" not in html
    assert "&lt;img" in html


def test_odd_values_do_not_break_the_page(write_run: Any, tmp_path: Path) -> None:
    paths = [write_run("good")]
    for at, value in enumerate(("1", None, [], {"a": [1]}, True, 10**400, -1, 0, 1e300, -1.7e308)):
        keys = ("task", "unit", "model", "kernels", "vocab", "source", "device", "ceiling_gflops")
        path = write_run(f"odd{at}", **dict.fromkeys(keys, value))
        step = dict.fromkeys(("step", "elapsed_s", "units", "eta_s", "loss", "progress"), value)
        for event in ("step", "eval", "message", "skip", "end"):
            add_event(path, event=event, **step, bits_per_char=value)
        paths.append(path)
    for chosen in (paths, paths[1:2], paths[-1:], []):
        page(body(read(*chosen), tmp_path), is_live=True)


def test_an_exported_page_needs_nothing(
    write_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run("a")
    write_run("b")
    out = tmp_path / "pa\x1bge.html"
    assert main(["monitor", str(tmp_path), "--export", str(out)]) == 0
    assert "pa\\x1bge.html: 2 runs" in capsys.readouterr().out
    html = out.read_text("utf-8")
    assert "<script" not in html
    assert not re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?!data:)\w""", html)
    assert "http" not in re.sub(r'<meta http-equiv="', "", html)
    assert main(["monitor", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize(
    ("low", "high", "count"),
    [(0.0, 495.0, 5), (1.87, 3.44, 3), (0.0, 1e-300, 1), (-1e308, 1e308, 1)],
)
def test_ticks_are_few_and_inside(low: float, high: float, count: int) -> None:
    ticks = _ticks(low, high)
    assert len(ticks) == count
    assert all(low <= tick <= high for tick in ticks)


@pytest.mark.parametrize("value", [1e300, -1e300, 1e17, 0.0])
def test_a_constant_curve_is_drawn_however_large_it_is(value: float) -> None:
    assert "<polyline" in overlay([[(1.0, value), (2.0, value)]], "t", "x", "y")
