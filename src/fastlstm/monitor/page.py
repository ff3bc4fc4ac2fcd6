"""The page of `fastlstm monitor`: a table of runs, their curves, what differs between them.

An exported page has no script.
"""

from __future__ import annotations

import functools
import importlib.resources
from statistics import median
from typing import TYPE_CHECKING, Any

from fastlstm.errors import counted
from fastlstm.monitor.overlay import COLOURS, overlay, sparkline
from fastlstm.monitor.run_card import run_card
from fastlstm.monitor.run_summary import differences
from fastlstm.report.html import Html, document, figure, quiet, table
from fastlstm.report.markup import clipped, to_html
from fastlstm.report.terminal import clock, percent
from fastlstm.runs.run_directory import held_locks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from fastlstm.monitor.run_summary import RunSummary
    from fastlstm.report.events import Measure

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
    common_s = {measure: _common_s(runs, measure) for measure in {run.measure for run in runs}}
    rows = [_row(run, names[run.path], states[run.path], common_s[run.measure]) for run in ordered]
    runs_html = table(_HEADS, rows, kind="runs") + _remark(common_s) if rows else ""
    charted = [run for run in ordered if run.training or run.validation][: len(COLOURS)]
    return (
        '<p class="eyebrow">fastlstm monitor</p>\n'
        f"<h1>{counted(len(runs), 'run')}</h1>\n"
        f'<p class="lead">{to_html(lead)}</p>\n<h2>Runs</h2>\n{runs_html}'
        f"{charts(charted, names)}{_cards(charted, names, states)}"
        f"{difference_table(charted, names)}"
    )


@functools.lru_cache(maxsize=10_000)
def _name(path: Path, root: Path) -> str:
    inside = path.is_relative_to(root) and path != root
    return str(path.relative_to(root)) if inside else path.name


def _cards(runs: Sequence[RunSummary], names: dict[Path, str], states: dict[Path, str]) -> str:
    cards = "".join(
        run_card(run, clipped(names[run.path], _MAX_CELL), states[run.path]) for run in runs
    )
    return f'<h2>Each run</h2>\n<div class="cards">{cards}</div>\n' if cards else ""


def _common_s(runs: Sequence[RunSummary], measure: Measure) -> float | None:
    """Returns the median time of the last evaluation of the runs with this figure."""
    reached = [run.reach("seconds") for run in runs if run.measure == measure]
    known = [seconds for seconds in reached if seconds is not None]
    return median(known) if known else None


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
            curves, title = [_curve(r, key, measure) for r in runs], f"{measure.title} by {label}"
            if svg := overlay(curves, title, label, measure.label):
                figures.append(figure(title, _WHAT_CURVES, svg))
    if not figures:
        return ""
    return f'<h2>Curves</h2>\n{_key(runs, names)}<div class="charts">{"".join(figures)}</div>\n'


def _curve(run: RunSummary, key: str, measure: Measure) -> list[tuple[float, float]]:
    if run.measure != measure:
        return []
    curve = run.validation or run.training
    return list(zip(getattr(curve, key), curve.values, strict=True))


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
