"""The page of `fastlstm monitor`: a table of runs, their curves, what differs between them.

All text of runs goes through `markup.to_html`. The policy of the page allows its own style and,
live, its own script; an exported page has no script. Neither asks another host for anything.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
from statistics import median
from typing import TYPE_CHECKING, Any

from fastlstm.errors import counted
from fastlstm.monitor.overlay import COLOURS, overlay, sparkline
from fastlstm.monitor.run_card import run_card
from fastlstm.monitor.run_summary import differences
from fastlstm.report.markup import clipped, to_html
from fastlstm.report.terminal import clock
from fastlstm.runs.run_directory import held_locks

if TYPE_CHECKING:
    from collections.abc import Sequence
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
    " machine can do; ETA: time left; slip: how much later the run ends than it first said"
)


def _file(package: str, name: str) -> str:
    return (importlib.resources.files(f"fastlstm.{package}") / name).read_text("utf-8")


def page(body: str, is_live: bool, title: str = "fastlstm monitor") -> bytes:
    """Returns a whole page; the live one asks for its body once a second."""
    style = _file("report", "report.css") + _file("monitor", "monitor.css")
    script = _file("monitor", "monitor.js") if is_live else ""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    allowed = f"; script-src 'sha256-{digest}'; connect-src 'self'" if is_live else ""
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:{allowed}; base-uri 'none'"
    )
    html = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}; form-action \'none\'">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{title}</title>\n<style>\n{style}'
        f"</style>\n</head>\n<body>\n<main>\n{body}</main>\n"
        + (f"<script>{script}</script>\n" if is_live else "")
        + "</body>\n</html>\n"
    )
    return html.encode("utf-8", "replace")


def body(runs: Sequence[RunSummary], root: Path) -> str:
    """Returns the inner HTML for some runs, named by their paths below `root`."""
    held = held_locks()
    states = {run.path: run.state_by(held) for run in runs}
    newest_first = sorted(runs, key=lambda run: -run.changed_at)
    ordered = sorted(newest_first, key=lambda run: _STATES.index(states[run.path]))
    counts = [(s, sum(one == s for one in states.values())) for s in _STATES]
    lead = ", ".join(f"{number} {state}" for state, number in counts if number) or "no runs yet"
    names = {run.path: _name(run.path, root) for run in runs}
    common_s = {measure: _common_s(runs, measure) for measure in {run.measure for run in runs}}
    rows = [_row(run, names[run.path], states[run.path], common_s[run.measure]) for run in ordered]
    heads = "".join(f"<th>{head}</th>" for head in _HEADS)
    table = f'<div class="scroll runs"><table><tr>{heads}</tr>{"".join(rows)}</table></div>\n'
    shown = [run for run in ordered if run.training or run.validation][: len(COLOURS)]
    return (
        '<p class="eyebrow">fastlstm monitor</p>\n'
        f"<h1>{counted(len(runs), 'run')}</h1>\n"
        f'<p class="lead">{to_html(lead)}</p>\n<h2>Runs</h2>\n{table if rows else ""}'
        f"{_note(common_s) if rows else ''}"
        f"{charts(shown, names)}{_cards(shown, names, states)}"
        f"{difference_table(shown, names)}"
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
    """Returns the median time of the last evaluation of the runs with a figure."""
    reached = [run.reach("seconds") for run in runs if run.measure == measure]
    known = [seconds for seconds in reached if seconds is not None]
    return median(known) if known else None


def _note(common_s: dict[Measure, float | None]) -> str:
    times = [
        f"{measure.label} at {clock(at)}" for measure, at in common_s.items() if at is not None
    ]
    text = "best: lowest validation figure, lower is better"
    text += f"; at equal time: {', '.join(sorted(times))}" if times else ""
    return f'<p class="quiet">{to_html(text)}; {_COLUMNS}.</p>\n'


def _row(run: RunSummary, name: str, state: str, common_s: float | None) -> str:
    reached = run.reach("seconds")
    has_reached = None not in (reached, common_s) and reached >= common_s  # type: ignore[operator]
    at_equal = run.best_until(common_s or 0.0, "seconds") if has_reached else None
    left = run.last.get("eta_s") if state == "running" else None
    told = to_html("\n".join(run.warnings), keep="\n")
    curve = run.validation if len(run.validation) > 1 else run.training
    figure = _text(run.best, ".4f")
    cells = (
        f'<span title="{to_html(run.measure.label)}">{figure}</span>' if figure else "",
        _text(at_equal, ".4f"),
        _text(run.rate, ",.0f"),
        _text(run.last.get("ceiling_share"), ".0%"),
        clock(run.seconds),
        "" if left is None else clock(left),
        _text(run.slip, "+.0%"),
        f'<span class="dead" title="{told}">{run.num_warnings}</span>' if run.warnings else "",
        sparkline(curve.values),
    )
    rest = "".join(f"<td>{cell}</td>" for cell in cells)
    return (
        f'<tr><td>{to_html(clipped(name, 200))}</td><td class="{state}">{state}</td>{rest}</tr>\n'
    )


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def charts(runs: Sequence[RunSummary], names: dict[Path, str]) -> str:
    """Returns the curves of up to eight runs over seconds and over what they count."""
    figures, measures = [], dict.fromkeys(run.measure for run in runs)
    for measure in measures:
        units = " or ".join(dict.fromkeys(r.unit for r in runs if r.measure == measure))
        for key, label in (("seconds", "seconds"), ("units", units)):
            svg = overlay(
                [_curve(run, key, measure) for run in runs],
                f"{measure.title} by {label}", label, measure.label,
            )  # fmt: skip
            if svg:
                figures.append(
                    f"<figure><figcaption><h3>{to_html(measure.title)} by {to_html(label)}</h3>"
                    f"<p>Validation; training where there is no evaluation yet.</p></figcaption>"
                    f"{svg}</figure>"
                )
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
    """Returns the table of settings that are not the same in all the charted runs."""
    rows: dict[str, list[Any]] = differences(runs) if len(runs) > 1 else {}
    if not rows:
        return ""
    heads = "".join(f"<th>{to_html(clipped(names[r.path], _MAX_CELL))}</th>" for r in runs)
    lines = []
    for name, values in rows.items():
        cells = [
            "" if value is None else to_html(clipped(str(value), _MAX_CELL)) for value in values
        ]
        line = "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f"<tr><td>{to_html(clipped(name, _MAX_CELL))}</td>{line}</tr>\n")
    table = f"<table><tr><th></th>{heads}</tr>{''.join(lines)}</table>"
    return f'<h2>Differences</h2>\n<div class="scroll">{table}</div>\n'
