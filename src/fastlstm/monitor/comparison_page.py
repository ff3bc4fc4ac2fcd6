"""`fastlstm compare --html`: a comparison as one offline file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastlstm.errors import counted
from fastlstm.monitor.overlay import COLOURS
from fastlstm.monitor.page import charts, difference_table, page
from fastlstm.report.markup import to_html
from fastlstm.report.terminal import clock, percent

if TYPE_CHECKING:
    from pathlib import Path

    from fastlstm.monitor.comparison import RunComparison
    from fastlstm.monitor.run_summary import RunSummary

_HEADS = ("run", "state", "best", "at equal time", "at equal chars", "time", "units/s", "ceiling")


def comparison_page(result: RunComparison) -> bytes:
    """Returns the whole HTML of a comparison."""
    names = _names([run.path for run in result.runs])
    heads = "".join(f"<th>{head}</th>" for head in _HEADS)
    rows = "".join(_row(result, run, names[run.path]) for run in result.runs)
    notes = "".join(f"<li>{to_html(note)}</li>" for note in result.notes)
    body = (
        '<p class="eyebrow">fastlstm compare</p>\n'
        f"<h1>{counted(len(result.runs), 'run')}</h1>\n"
        f'<div class="scroll runs"><table><tr>{heads}</tr>{rows}</table></div>\n'
        f'<p class="quiet">{to_html(_at(result))}</p>\n'
        + (f"<h2>Notes</h2>\n<ul>{notes}</ul>\n" if notes else "")
        + charts(result.runs[: len(COLOURS)], names)
        + difference_table(result.runs, names)
    )
    return page(body, is_live=False, title="fastlstm compare")


def _names(paths: list[Path]) -> dict[Path, str]:
    """Returns the name of each directory, or its path where two have one name."""
    is_plain = len({path.name for path in paths}) == len(set(paths)) and all(p.name for p in paths)
    return {path: path.name if is_plain else str(path) for path in paths}


def _at(result: RunComparison) -> str:
    labels = ", ".join(dict.fromkeys(run.measure.label for run in result.runs))
    seconds, chars = result.at["seconds"], result.at["chars"]
    points = [] if seconds is None else [clock(seconds)]
    points += [] if chars is None else [f"{chars:,.0f} chars"]
    at = f"; equal: at {' and '.join(points)}" if points else ""
    return f"best: lowest validation figure ({labels}); lower is better{at}."


def _row(result: RunComparison, run: RunSummary, name: str) -> str:
    share = run.last.get("ceiling_share")
    figures = [run.best, result.figure(run, "seconds"), result.figure(run, "chars")]
    cells = [
        *("" if figure is None else f"{figure:.4f}" for figure in figures),
        clock(run.seconds),
        "" if run.rate is None else f"{run.rate:,.0f}",
        "" if share is None else percent(share),
    ]
    state = run.state
    rest = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr><td>{to_html(name)}</td><td class="{state}">{state}</td>{rest}</tr>\n'
