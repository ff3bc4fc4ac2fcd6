"""The card of one run: predicted end, warnings, phases, machine, GPUs, profile."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fastlstm.monitor.overlay import COLOURS
from fastlstm.report.events import Event, number, stored_json, text_of
from fastlstm.report.lines import gpu_state, joined, outlook_text
from fastlstm.report.markup import clipped, to_html
from fastlstm.report.terminal import clock, percent, short_bytes

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
    """Returns the HTML of a run; empty if it has no more than its line in the table."""
    silent_s = time.time() - run.changed_at if state == "running" else 0.0
    silent = [f"no event for {clock(silent_s)}"] if silent_s > _SILENT_S else []
    warnings = [*run.warnings[-_MAX_WARNINGS:], *silent]
    told = outlook_text(run.outlook) if run.outlook and run.end is None else ""
    parts = [
        f'<p class="outlook">{to_html(told)}</p>' if told else "",
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


def phase_bar(phases: Mapping[str, float]) -> str:
    """Returns one bar of the seconds of each phase, largest first; empty without phases."""
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
    """Returns the GPUs of a `machine` event, and those that the run may use."""
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
    busy, index = number(gpu, "busy_share"), number(gpu, "index")
    text = joined(
        "" if used is None or total is None else f"{short_bytes(used)} of {short_bytes(total)}",
        f"others hold {short_bytes(others)}" if others else "",
        "" if busy is None else f"{percent(busy)} busy",
        gpu_state(gpu),
        "slowed down by heat or power" if gpu.get("is_held_back") is True else "",
    )
    return f"{'GPU' if index is None else f'GPU {index:.0f}'}: {text or 'no figures'}"


def profile_cards(run: Path) -> str:
    """Returns the recommended verdicts of a run's profile as HTML; empty without a profile."""
    found = stored_json(run / PROFILE_FILE)
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
