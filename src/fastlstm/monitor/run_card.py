"""One run in some detail: how it will end, its warnings, its time, its machine, its profile."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from fastlstm.errors import FastLSTMError
from fastlstm.monitor.overlay import COLOURS
from fastlstm.report.events import Event, number, text_of
from fastlstm.report.markup import clipped, to_html
from fastlstm.report.terminal import clock, percent, short_bytes
from fastlstm.system.storage import MAX_JSON_BYTES, read_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from fastlstm.monitor.run_summary import RunSummary

PROFILE_FILE = "profile.json"
_MAX_GPUS, _MAX_WARNINGS, _MAX_VERDICTS = 16, 3, 6
_MAX_TEXT, _MAX_COMMAND = 400, 2000
_MIN_SHARE = 0.005
_SILENT_S = 60.0


def run_card(run: RunSummary, name: str, state: str) -> str:
    """Returns the HTML of a run; empty where there is nothing but its line in the table."""
    silent_s = time.time() - run.changed_at if state == "running" else 0.0
    silent = [f"no event for {clock(silent_s)}"] if silent_s > _SILENT_S else []
    warnings = [*run.warnings[-_MAX_WARNINGS:], *silent]
    parts = [
        outlook_line(run),
        "".join(f'<p class="alert">{to_html(text)}</p>' for text in warnings),
        _titled("Time by phase", phase_bar(run.phases)),
        _titled("Cores in use over time", run.machine.drawing()),
        gpu_lines(run.machine_event),
        _titled("Profile", profile_cards(run.path)),
    ]
    if not any(parts):
        return ""
    title = f'<h3>{to_html(name)} <span class="{state}">{state}</span></h3>'
    return f'<div class="card">{title}{"".join(parts)}</div>\n'


def _titled(title: str, html: str) -> str:
    return f'<p class="what">{title}</p>{html}' if html else ""


def outlook_line(run: RunSummary) -> str:
    """Returns what a running text model is expected to end at; empty where that is not known."""
    bits, error = number(run.outlook, "bits_per_char"), number(run.outlook, "error")
    if bits is None or run.end is not None:
        return ""
    told = f"predicted final validation: {bits:.3f}"
    told += "" if error is None else f" ± {error:.3f}"
    told += f" {run.measure.label}"
    more = number(run.outlook, "hour_more_bits_per_char")
    told += "" if more is None else f"; with one hour more {more:.3f}"
    return f'<p class="outlook">{to_html(told)}</p>'


def phase_bar(phases: Mapping[str, float]) -> str:
    """Returns one bar of the seconds of each phase, largest first; empty where there are none."""
    total = sum(phases.values())
    if not total > 0.0:
        return ""
    ordered = sorted(phases.items(), key=lambda item: -item[1])
    shown = [item for item in ordered if item[1] / total >= _MIN_SHARE][: len(COLOURS)]
    parts, key = [], []
    for (name, seconds), colour in zip(shown, COLOURS, strict=False):
        label = f"{clipped(name.replace('_', ' '), 40)} {percent(seconds / total)}"
        width = f"{100 * seconds / total:.2f}%"
        parts.append(f'<i style="width:{width};background:{colour}"></i>')
        key.append(f'<span><b style="background:{colour}"></b>{to_html(label)}</span>')
    return f'<div class="bar">{"".join(parts)}</div><p class="key">{"".join(key)}</p>'


def gpu_lines(event: Event) -> str:
    """Returns what a `machine` event says of GPUs, and which of them the run may use."""
    gpus = event.get("gpus")
    if not isinstance(gpus, list) or not gpus:
        return ""
    lines = [_gpu(gpu) for gpu in gpus[:_MAX_GPUS] if isinstance(gpu, dict)]
    visible = event.get("cuda_visible_devices")
    allowed = "not set" if visible is None else clipped(text_of(event, "cuda_visible_devices"), 80)
    lines.append(f"CUDA_VISIBLE_DEVICES: {allowed}")
    items = "".join(f"<li>{to_html(line)}</li>" for line in lines)
    return f'<p class="what">GPUs</p><ul class="gpus">{items}</ul>'


def _gpu(gpu: Event) -> str:
    used, total, others = (number(gpu, f"{name}_bytes") for name in ("used", "total", "others"))
    busy, power, clock = (number(gpu, n) for n in ("busy_share", "power_w", "clock_mhz"))
    parts = [
        "" if used is None or total is None else f"{short_bytes(used)} of {short_bytes(total)}",
        f"others hold {short_bytes(others)}" if others else "",
        "" if busy is None else f"{percent(busy)} busy",
        "" if power is None else f"{power:.0f} W",
        "" if clock is None else f"{clock:.0f} MHz",
        "slowed down by heat or power" if gpu.get("is_held_back") is True else "",
    ]
    index = number(gpu, "index")
    name = "GPU" if index is None else f"GPU {index:.0f}"
    return f"{name}: {', '.join(filter(None, parts)) or 'tells nothing'}"


def profile_cards(run: Path) -> str:
    """Returns the recommended verdicts of a run's profile as HTML; empty where there is none."""
    try:
        found = json.loads(read_bytes(run / PROFILE_FILE, MAX_JSON_BYTES))
    except (FastLSTMError, ValueError, RecursionError):
        return ""
    verdicts = found.get("verdicts") if isinstance(found, dict) else None
    if not isinstance(verdicts, list):
        return ""
    chosen = [v for v in verdicts if isinstance(v, dict) and v.get("is_recommended") is True]
    cards = [_card(verdict) for verdict in chosen[:_MAX_VERDICTS]]
    if not cards and found.get("is_undecided") is True:
        return '<p class="quiet">undecided: a change may gain more than 5 %.</p>'
    if not cards:
        return '<p class="quiet">nothing above 5 %, this run is healthy.</p>'
    return f'<div class="verdicts">{"".join(cards)}</div>'


def _card(verdict: Event) -> str:
    gain, low, high = (_gain(verdict, name) for name in ("gain", "low", "high"))
    within = f" ({low} to {high})" if low and high and low != high else ""
    lines = [
        f"<h4>{_text(verdict, 'cause')}: {gain}{within} speed</h4>",
        f"<p>{_text(verdict, 'effect')}. {_text(verdict, 'evidence')}</p>",
    ]
    if command := text_of(verdict, "command"):
        lines.append(f'<code class="command">{to_html(clipped(command, _MAX_COMMAND))}</code>')
    return f'<div class="verdict">{"".join(lines)}</div>'


def _gain(event: Event, name: str) -> str:
    value = number(event, name)
    return "" if value is None else f"{100 * value:+,.0f} %"


def _text(event: Event, name: str) -> str:
    return to_html(clipped(text_of(event, name), _MAX_TEXT))
