"""The page of `fastlstm monitor`: a table of runs, curves, a card of each run, differences.

An exported page has no script. A live page is made once a second, so its curves are SVG written
here: a chart takes 2 ms, with matplotlib 97 ms.
"""

from __future__ import annotations

import functools
import importlib.resources
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from fastlstm.errors import counted
from fastlstm.monitor.run_summary import RunSummary, differences
from fastlstm.report.drawing import LOG_RATIO
from fastlstm.report.events import Event, Measure, number, stored_json, text_of
from fastlstm.report.html import Html, document, figure, quiet, table
from fastlstm.report.lines import gpu_state, joined, outlook_text
from fastlstm.report.markup import clipped, to_html
from fastlstm.report.terminal import clock, percent, short_bytes, tick_texts
from fastlstm.runs.run_directory import PROFILE_FILE, held_locks

COLOURS = (
    *("#2e7cf6", "#e8710a", "#12a150", "#d6336c"),
    *("#8b5cf6", "#0e9aa7", "#b8860b", "#7a869a"),
)
"""Visible on white and on black."""
_STATES = ("running", "dead", "stopped", "finished")
_MAX_CELL = 60
_HEADS = (
    *("run", "state", "best", "at equal time", "units/s"),
    *("ceiling", "time", "ETA", "slip", "warnings", "curve"),
)
_COLUMNS = (
    "units/s: tokens, windows or sequences a second; ceiling: share of the arithmetic that this"
    " machine can do; ETA: time left; slip: delay of the end beyond the first prediction"
)
_WHAT_CURVES = "Validation; training for runs without an evaluation."


def page(body: str, is_live: bool, title: str = "fastlstm monitor") -> bytes:
    """Returns a whole page; the live one asks for its body once a second."""
    files = importlib.resources.files("fastlstm.monitor")
    style = (files / "monitor.css").read_text("utf-8")
    script = (files / "monitor.js").read_text("utf-8") if is_live else ""
    return document(title, body, style, script)


def body(runs: Sequence[RunSummary], root: Path) -> str:
    """Returns the HTML of the body; runs are named by their paths below `root`."""
    held = held_locks()
    states = {run.path: run.state_by(held) for run in runs}
    newest_first = sorted(runs, key=lambda run: -run.changed_at)
    ordered = sorted(newest_first, key=lambda run: _STATES.index(states[run.path]))
    counts = [(s, sum(one == s for one in states.values())) for s in _STATES]
    lead = ", ".join(f"{number} {state}" for state, number in counts if number) or "no runs yet"
    names = {run.path: _name(run.path, root) for run in runs}
    common_s: dict[Measure, float | None] = {}
    for measure in {run.measure for run in runs}:
        reached = [run.reach("seconds") for run in runs if run.measure == measure]
        known = [seconds for seconds in reached if seconds is not None]
        common_s[measure] = median(known) if known else None
    rows = [_row(run, names[run.path], states[run.path], common_s[run.measure]) for run in ordered]
    runs_html = table(_HEADS, rows, kind="runs") + _remark(common_s) if rows else ""
    charted = [run for run in ordered if run.training or run.validation][: len(COLOURS)]
    cards = "".join(
        run_card(run, clipped(names[run.path], _MAX_CELL), states[run.path]) for run in charted
    )
    cards = f'<h2>Each run</h2>\n<div class="cards">{cards}</div>\n' if cards else ""
    return (
        '<p class="eyebrow">fastlstm monitor</p>\n'
        f"<h1>{counted(len(runs), 'run')}</h1>\n"
        f'<p class="lead">{to_html(lead)}</p>\n<h2>Runs</h2>\n{runs_html}'
        f"{charts(charted, names)}{cards}{difference_table(charted, names)}"
    )


@functools.lru_cache(maxsize=10_000)
def _name(path: Path, root: Path) -> str:
    inside = path.is_relative_to(root) and path != root
    return str(path.relative_to(root)) if inside else path.name


def _remark(common_s: dict[Measure, float | None]) -> str:
    times = [
        f"{measure.label} at {clock(at)}" for measure, at in common_s.items() if at is not None
    ]
    text = "best: lowest validation figure, lower is better"
    text += f"; at equal time: {', '.join(sorted(times))}" if times else ""
    return quiet(f"{text}; {_COLUMNS}.")


def _row(run: RunSummary, name: str, state: str, common_s: float | None) -> list[str]:
    reached = run.reach("seconds")
    has_reached = None not in (reached, common_s) and reached >= common_s  # type: ignore[operator]
    at_equal = run.best_until(common_s or 0.0, "seconds") if has_reached else None
    left = run.last.get("eta_s") if state == "running" else None
    told = to_html("\n".join(run.warnings), keep="\n")
    warned = f'<span class="dead" title="{told}">{run.num_warnings}</span>' if run.warnings else ""
    curve = run.validation if len(run.validation) > 1 else run.training
    best = shown(run.best, "{:.4f}".format)
    return [
        clipped(name, 200),
        Html(f'<span class="{state}">{state}</span>'),
        Html(f'<span title="{to_html(run.measure.label)}">{best}</span>') if best else "",
        shown(at_equal, "{:.4f}".format),
        shown(run.rate, "{:,.0f}".format),
        shown(run.last.get("ceiling_share"), percent),
        clock(run.seconds),
        shown(left, clock),
        shown(run.slip, "{:+.0%}".format),
        Html(warned),
        Html(sparkline(curve.values)),
    ]


def shown(value: float | None, form: Callable[[float], str]) -> str:
    """Returns a number as text, empty where there is none."""
    return "" if value is None else form(value)


def charts(runs: Sequence[RunSummary], names: dict[Path, str]) -> str:
    """Returns the curves of up to eight runs over seconds and over tokens or windows."""
    figures, measures = [], dict.fromkeys(run.measure for run in runs)
    for measure in measures:
        units = " or ".join(dict.fromkeys(r.unit for r in runs if r.measure == measure))
        for key, label in (("seconds", "seconds"), ("units", units)):
            curves, title = [], f"{measure.title} by {label}"
            for run in runs:
                curve = run.validation or run.training
                points = zip(getattr(curve, key), curve.values, strict=True)
                curves.append(list(points) if run.measure == measure else [])
            if svg := overlay(curves, title, label, measure.label):
                figures.append(figure(title, _WHAT_CURVES, svg))
    if not figures:
        return ""
    return f'<h2>Curves</h2>\n{_key(runs, names)}<div class="charts">{"".join(figures)}</div>\n'


def _key(runs: Sequence[RunSummary], names: dict[Path, str]) -> str:
    marks = [
        f'<span><svg viewBox="0 0 12 12"><circle cx="6" cy="6" r="5" fill="{colour}"/></svg>'
        f"{to_html(clipped(names[run.path], _MAX_CELL))}</span>"
        for run, colour in zip(runs, COLOURS, strict=False)
    ]
    return f'<p class="key">{"".join(marks)}</p>\n'


def difference_table(runs: Sequence[RunSummary], names: dict[Path, str]) -> str:
    """Returns the table of settings that are not equal in all charted runs."""
    rows: dict[str, list[Any]] = differences(runs) if len(runs) > 1 else {}
    if not rows:
        return ""
    heads = ["", *(clipped(names[run.path], _MAX_CELL) for run in runs)]
    lines = [
        [clipped("" if cell is None else str(cell), _MAX_CELL) for cell in (name, *values)]
        for name, values in rows.items()
    ]
    return f"<h2>Differences</h2>\n{table(heads, lines)}"


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
    gain, low, high = (
        "" if (value := number(verdict, name)) is None else f"{100 * value:+,.0f} %"
        for name in ("gain", "low", "high")
    )
    within = f" ({low} to {high})" if low and high and low != high else ""
    lines = [
        f"<h4>{_text(verdict, 'cause')}: {gain}{within} speed</h4>",
        f"<p>{_text(verdict, 'effect')}. {_text(verdict, 'evidence')}</p>",
    ]
    if command := text_of(verdict, "command"):
        lines.append(f'<code class="command">{to_html(clipped(command, _MAX_COMMAND))}</code>')
    return f'<div class="verdict">{"".join(lines)}</div>'


def _text(event: Event, name: str) -> str:
    return to_html(clipped(text_of(event, name), _MAX_TEXT))


_WIDTH, _HEIGHT = 540, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 8, 10, 40


def overlay(
    curves: Sequence[Sequence[tuple[float, float]]], title: str, x_label: str, y_label: str
) -> str:
    """Returns the SVG of curves of (x, y), in the order of `COLOURS`; empty without two points."""
    if sum(map(len, curves)) < 2:
        return ""
    all_x, all_y = zip(*(point for curve in curves for point in curve), strict=True)
    right, low, high = max(all_x) or 1.0, min(all_y), max(all_y)
    is_log = 0 < low * LOG_RATIO < high
    scale = math.log if is_log else float
    first, last = scale(low), scale(high if high > low else low + max(1.0, abs(low)))
    width, height, span = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM, last - first

    parts = []
    marks = _log_ticks(low, high) if is_log else _ticks(low, high)
    for y, text in zip(marks, tick_texts(marks), strict=True):
        up = _TOP + height * (last - scale(y)) / span
        parts.append(
            f'<path d="M{_LEFT} {up:.1f}H{_WIDTH - _RIGHT}" stroke="var(--grid)"/>'
            f'<text x="{_LEFT - 8}" y="{up + 4:.1f}" text-anchor="end">{text}</text>'
        )
    marks = _ticks(0.0, right)
    for x, text in zip(marks, tick_texts(marks), strict=True):
        across = _LEFT + width * x / right
        anchor = "end" if across > _WIDTH - 30 else "middle"
        parts.append(
            f'<text x="{across:.1f}" y="{_HEIGHT - 22}" text-anchor="{anchor}">{text}</text>'
        )
    for curve, colour in zip(curves, COLOURS, strict=False):
        points = [
            (_LEFT + width * x / right, _TOP + height * (last - scale(y)) / span) for x, y in curve
        ]
        parts.append(_line(points, colour))
    unit = f"{y_label}, log scale" if is_log else y_label
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{to_html(title)}"'
        f' font-size="12" fill="var(--muted)">{"".join(parts)}'
        f'<text x="{_LEFT}" y="{_HEIGHT - 4}">{to_html(unit)}</text>'
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">{to_html(x_label)}</text>'
        "</svg>"
    )


def _ticks(low: float, high: float) -> list[float]:
    """Returns 1 to 6 round values from `low` to `high`."""
    span = high - low
    if not 1e-290 < span < math.inf:
        return [float(f"{low:.4g}")]
    power = 10.0 ** math.floor(math.log10(span / 5))
    step = next((power * s for s in (1, 2, 2.5, 5) if span / (power * s) <= 5), 10 * power)
    first = math.ceil(low / step)
    return [step * at for at in range(first, math.floor(high / step) + 1)] or [low]


def _log_ticks(low: float, high: float) -> list[float]:
    """Returns some values from `low` to `high` in equal ratios."""
    ratio = high / low
    return [float(f"{low * ratio ** (at / 4):.3g}") for at in range(5)]


def sparkline(values: Sequence[float]) -> str:
    """Returns a curve of a few values without axes; empty with fewer than two."""
    values = values[:: max(1, -(-len(values) // 32))]
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    span = high - low or 1.0
    step = 90 / (len(values) - 1)
    points = [(2 + step * at, 2 + 16 * (high - y) / span) for at, y in enumerate(values)]
    return f'<svg viewBox="0 0 94 20">{_line(points, "var(--a)")}</svg>'


def _line(points: Sequence[tuple[float, float]], colour: str) -> str:
    if len(points) == 1:
        ((x, y),) = points
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
    path = " ".join(map("%.1f,%.1f".__mod__, points))  # fastest: a page has thousands of points
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
