from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastlstm.cli.main import main
from fastlstm.monitor.tune_front import TUNE_FILE, tune_front


def trial(size: int, expected: float | None, label: str = "x") -> dict[str, Any]:
    return {"options": {"rnn_size": size}, "expected": expected, "label": label}


def write(directory: Path, trials: list[Any]) -> None:
    sizes = [{"rnn_size": size, "latency_s": size / 1e7} for size in (128, 256, 512, 1024)]
    content = {"format": 1, "default": {"sizes": sizes}, "trials": trials}
    (directory / TUNE_FILE).write_text(json.dumps(content), "utf-8")


def test_sizes_by_latency_with_their_best_trial(tmp_path: Path) -> None:
    write(tmp_path, [
        trial(256, 1.8), trial(256, 1.7, "<b>lr</b>"), trial(128, 1.9), trial(512, 1.75),
        trial(1024, None), trial(77, 1.0),
    ])  # fmt: skip
    html = tune_front(tmp_path, "se<arch>")
    places = [html.index(f"{bits:.4f}") for bits in (1.9, 1.7, 1.75)]
    assert places == sorted(places)
    assert "&lt;b&gt;lr" in html
    assert "se&lt;arch" in html
    assert "1.8000" not in html
    assert "1,024" not in html
    line = html[html.index("<polyline") :].split('"')[1]
    assert len(line.split()) == 2  # 512 units are slower and worse than 256


def test_one_size_is_a_row_without_a_chart(tmp_path: Path) -> None:
    write(tmp_path, [trial(256, 1.8)])
    html = tune_front(tmp_path, "search")
    assert "1.8000" in html
    assert "<figure>" not in html


@pytest.mark.parametrize("content", ["", "[]", "7", "{}", '{"default": 3, "trials": {"a": 1}}'])
def test_a_damaged_search_is_left_out(tmp_path: Path, content: str) -> None:
    (tmp_path / TUNE_FILE).write_text(content, "utf-8")
    assert tune_front(tmp_path, "a") == ""
    write(tmp_path, [3, {"options": []}, trial(128, None)])
    assert tune_front(tmp_path, "a") == ""


def test_the_page_of_a_search_has_its_front(write_run: Any, tmp_path: Path) -> None:
    write_run("search/trials/001")
    write(tmp_path / "search", [trial(128, 1.9), trial(256, 1.7)])
    out = tmp_path / "page.html"
    assert main(["monitor", str(tmp_path), "--export", str(out)]) == 0
    assert "Quality and latency: search" in out.read_text("utf-8")
