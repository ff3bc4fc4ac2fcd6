"""A compression's figures on the terminal and in report.html."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from compression_report import REPORT
from fastlstm.report.compression import compression_charts, compression_rows
from fastlstm.report.page import write_report
from fastlstm.system.storage import encode_json

FACTS: dict[str, Any] = json.loads(encode_json(REPORT.to_dict()))


def test_rows() -> None:
    assert compression_rows(FACTS) == [
        ("source", "runs/book, model aaaaaaaaaaaa"),
        ("result", "runs/small, model bbbbbbbbbbbb"),
        ("methods", "75 % of the weights pruned, int8"),
        ("bits/char", "2.0000 -> 2.0100 (+0.0100, 95 % interval +0.0050 to +0.0150) on 5,000"
         " tokens of book.txt"),
        ("outputs", "logits off by 0.1 (RMS), 0.5 (max); the likeliest token is the same at"
         " 98.00%"),
        ("weights", "1.00M -> 1.00M, 75.0 % zeros"),
        ("on disk", "4.00 MB -> 1.00 MB (25.0 %)"),
        ("in memory", "4.40 MB -> 1.20 MB (27.3 %)"),
        ("1 stream", "10.0k -> 30.0k characters/s (3.00x)"),
        ("64 streams", "50.0k -> 200k characters/s (4.00x)"),
        ("kernels", "native decode, fp32 -> native decode, int8"),
        ("training", "100 steps, 1:05, 0:12 of it in the teacher"),
        ("this CPU", "has no AVX-512 VNNI, with which int8 is fastest"),
        ("notes", "a note"),
    ]  # fmt: skip


def test_a_difference_that_is_rounded_to_zero_has_no_minus() -> None:
    change = {**FACTS["change"], "difference": -1e-6, "low": -0.00004, "high": -0.0}
    text = dict(compression_rows({**FACTS, "change": change}))["bits/char"]
    assert "(+0.0000, 95 % interval +0.0000 to +0.0000)" in text


def test_rows_without_measurements() -> None:
    report = dataclasses.replace(
        REPORT, change=None, not_measured="no text", outputs=None, training=None, lacks=[],
        notes=[], is_published=False,
    ).to_dict()  # fmt: skip
    rows = dict(compression_rows(report))
    assert rows["bits/char"] == "not measured: no text"
    assert rows["result"] == "not published: the loss is above the limit"
    assert not rows.keys() & {"outputs", "training", "this CPU", "notes"}
    assert compression_charts(report) == []


def test_too_few_blocks_have_no_interval() -> None:
    assert REPORT.change is not None
    change = dataclasses.replace(REPORT.change, low=None, high=None, num_scored=128)
    report = dataclasses.replace(REPORT, kind="forecaster", measure="mae", change=change).to_dict()
    told = "(+0.0100, no interval: too few blocks of windows) on 128 windows of book.txt"
    assert dict(compression_rows(report))["mae"] == f"2.0000 -> 2.0100 {told}"
    charts = compression_charts(report)
    assert len(charts) == 3
    assert all(chart.svg and "95 % interval" not in chart.svg for chart in charts)


def test_charts() -> None:
    charts = compression_charts(FACTS)
    by = ["speed, 1 stream", "speed, 64 streams", "bytes on disk"]
    assert [chart.title for chart in charts] == [f"Quality by {what}" for what in by]
    for chart in charts:
        assert "source, fp32" in chart.svg
        assert "95 % interval" in chart.svg


@pytest.mark.parametrize("place", ["file", "event"])
def test_the_page_has_a_section(tmp_path: Path, place: str) -> None:
    if place == "file":
        (tmp_path / "compression.json").write_bytes(encode_json(REPORT.to_dict()))
    else:
        end = {"event": "end", "step": 1, "reason": "1 step", "compression": FACTS}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(end) + "\n")
    page = write_report(tmp_path).read_text()
    assert "<h2>Compression</h2>" in page
    assert "source      runs/book, model aaaaaaaaaaaa" in page
    assert "on disk     4.00 MB -&gt; 1.00 MB (25.0 %)" in page
    assert page.count("<svg") == 3
    assert "fastlstm compressed run" in page
    assert "No steps recorded yet" not in page
    assert "could not be written" not in page


def test_other_runs_have_no_section(tmp_path: Path) -> None:
    assert "Compression" not in write_report(tmp_path).read_text()
    (tmp_path / "compression.json").write_text("[1, 2]")
    assert "Compression" not in write_report(tmp_path).read_text()
