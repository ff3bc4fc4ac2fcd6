"""The front of quality against latency that `fastlstm tune` found, from DIR/tune.json."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fastlstm.errors import FastLSTMError
from fastlstm.monitor.overlay import overlay
from fastlstm.report.events import number
from fastlstm.report.markup import clipped, to_html
from fastlstm.system.storage import MAX_JSON_BYTES, read_bytes

if TYPE_CHECKING:
    from pathlib import Path

TUNE_FILE = "tune.json"
_MAX_ROWS = 40


def tune_front(directory: Path, name: str) -> str:
    """Returns a search's sizes by latency and quality as HTML; empty where it has measured none."""
    try:
        content = json.loads(read_bytes(directory / TUNE_FILE, MAX_JSON_BYTES))
    except (FastLSTMError, ValueError, RecursionError):
        return ""
    rows = _rows(content)
    if not rows:
        return ""
    front, best = [], float("inf")
    for latency, bits, _, _ in rows:  # by latency: what is slower has to be better
        if bits < best:
            front.append((latency, bits))
            best = bits
    curves = [front, [(latency, bits) for latency, bits, _, _ in rows]]
    chart = ""
    if len(rows) > 1:  # one size makes no curve
        svg = overlay(
            [curves[0], *[[point] for point in curves[1] if point not in front][:7]],
            "Bits per character by latency", "us per token", "bits/char", has_marks=True,
        )  # fmt: skip
        chart = f"<figure>{svg}</figure>"
    lines = "".join(
        f"<tr><td>{size:,.0f} units</td><td>{latency:,.1f}</td><td>{bits:.4f}</td>"
        f"<td>{to_html(label)}</td></tr>"
        for latency, bits, size, label in rows[:_MAX_ROWS]
    )
    return (
        f"<h2>Quality and latency: {to_html(clipped(name, 60))}</h2>\n"
        f'<div class="charts">{chart}<div class="scroll"><table><tr><th>size</th>'
        "<th>us/token</th><th>expected bits/char</th><th>best trial</th></tr>"
        f"{lines}</table></div></div>\n"
    )


def _rows(content: Any) -> list[tuple[float, float, float, str]]:
    """Returns latency (us), expected bits, size and label of the best trial of each size."""
    if not isinstance(content, dict):
        return []
    default = content.get("default")
    sizes = default.get("sizes") if isinstance(default, dict) else content.get("sizes")
    latencies = {}
    for size in _dicts(sizes):
        units, seconds = number(size, "rnn_size"), number(size, "latency_s")
        if units is not None and seconds is not None and seconds > 0.0:
            latencies[units] = 1e6 * seconds
    best: dict[float, tuple[float, str]] = {}
    for trial in _dicts(content.get("trials")):
        options, bits = trial.get("options"), number(trial, "expected")
        units = number(options, "rnn_size") if isinstance(options, dict) else None
        if units in latencies and bits is not None and bits < best.get(units, (9e99, ""))[0]:
            best[units] = bits, clipped(str(trial.get("label")), 60)
    return sorted((latencies[units], *found[:1], units, found[1]) for units, found in best.items())


def _dicts(values: Any) -> list[dict[str, Any]]:
    return [v for v in values if isinstance(v, dict)] if isinstance(values, list) else []
