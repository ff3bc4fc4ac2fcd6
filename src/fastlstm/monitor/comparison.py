"""`fastlstm compare`: runs side by side at equal seconds or characters, also as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastlstm.errors import ConfigError, RunDirectoryError, counted
from fastlstm.monitor.page import COLOURS, charts, difference_table, page, shown
from fastlstm.monitor.run_summary import RunSummary, differences
from fastlstm.report.events import number, text_of
from fastlstm.report.html import Html, quiet, table
from fastlstm.report.markup import to_html
from fastlstm.report.terminal import clock, percent

_CEILING_RATIO = 1.25
"""Larger ratios of ceilings mean another or a busy machine."""
_MIN_OTHERS = 0.1
"""Least share of the machine used by others that gets a note."""
_MOST_OF_CEILING = 1.1
"""A larger share means that the ceiling was measured too low."""
_HEADS = ("run", "state", "best", "at equal time", "at equal chars", "time", "units/s", "ceiling")


@dataclass(frozen=True)
class RunComparison:
    """Runs side by side.

    Attributes:
        at: the point of comparison in "seconds" and in "chars"; None if a run has no evaluation.
        differences: settings, kernels and machine that differ: name -> one value per run.
        notes: reasons to distrust the figures.
    """

    runs: list[RunSummary]
    at: dict[str, float | None]
    differences: dict[str, list[Any]]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        runs = [
            {
                "run": str(run.path),
                "state": run.state,
                "measure": run.measure.key,
                "best": run.best,
                **{f"at_equal_{by}": self.figure(run, by) for by in self.at},
                "seconds": run.seconds,
                "units": run.last.get("units"),
                "unit": run.unit,
                "units_per_s": run.rate,
                "ceiling_share": run.last.get("ceiling_share"),
                "others_share": run.machine.mean_others,
            }
            for run in self.runs
        ]
        return {"at": self.at, "runs": runs, "differences": self.differences, "notes": self.notes}

    def figure(self, run: RunSummary, by: str) -> float | None:
        """Returns the best validation of a run at the common point."""
        limit = self.at[by]
        return None if limit is None else run.best_until(limit, by)


def compare_runs(paths: Sequence[Path]) -> RunComparison:
    """Reads runs and compares them. Raises ConfigError: fewer than two runs; RunDirectoryError: a
    path has no events of a run."""
    if len(paths) < 2:
        raise ConfigError("compare takes two runs or more; name another run")
    runs = [RunSummary(path) for path in paths]
    for run in runs:
        run.update()
        if not run.start and not run.training and not run.validation:
            raise RunDirectoryError(
                f"{run.path}: no training is recorded there (metrics.jsonl is missing, as in an"
                " imported run, or empty, damaged or not readable); `fastlstm evaluate` measures a"
                " model"
            )
    at: dict[str, float | None] = {}
    for by in ("seconds", "chars"):
        reached = [value for run in runs if (value := run.reach(by)) is not None]
        at[by] = min(reached) if len(reached) == len(runs) else None
    return RunComparison(runs, at, differences(runs), _notes(runs))


def _notes(runs: Sequence[RunSummary]) -> list[str]:
    notes = []
    if len({text_of(run.start, "task") or "text" for run in runs}) > 1:
        notes.append("the runs have different tasks: their figures cannot be compared")
    if len({text_of(run.start, "source") for run in runs}) > 1:
        notes.append("the runs read different sources: their figures are of different data")
    notes += [note for note in (_machines(runs), *map(_load, runs)) if note]
    for run in runs:
        share = number(run.last, "ceiling_share")
        if share is not None and share > _MOST_OF_CEILING:
            notes.append(
                f"{run.path} reached {100 * share:.0f} % of its ceiling: other processes slowed the"
                " measurement of the ceiling"
            )
        if run.state in ("running", "dead", "stopped"):
            notes.append(f"{run.path} is {run.state}: its figures are not final")
        if run.best is None:
            notes.append(f"{run.path} has no evaluation yet")
    return notes


def _machines(runs: Sequence[RunSummary]) -> str:
    ceilings = [number(run.start, "ceiling_gflops") for run in runs]
    known = [ceiling for ceiling in ceilings if ceiling]
    devices = {text_of(run.start, "device") for run in runs}
    machines = {text_of(run.start, "machine") for run in runs} - {""}  # older runs lack this entry
    # Ceilings differ between numbers of threads and precisions on one machine too.
    settings = {f"{run.start.get('threads')} {run.start.get('precision')}" for run in runs}
    differ = len(settings) == 1 and known and max(known) > _CEILING_RATIO * min(known)
    if len(devices) == 1 and len(machines) < 2 and not differ:
        return ""
    listed = ", ".join("unknown" if not c else f"{c:,.0f} GFLOP/s" for c in ceilings)
    return (
        f"different machines, or a busy one (ceilings: {listed}): seconds and rates depend on the"
        " machine more than on the settings; compare at equal chars"
    )


def _load(run: RunSummary) -> str:
    others = run.machine.mean_others
    if others is None or others < _MIN_OTHERS:
        return ""
    return (
        f"{run.path} was trained beside other processes, which used {percent(others)} of the"
        " machine: its seconds and rates are not comparable; compare at equal chars"
    )


def comparison_page(result: RunComparison) -> bytes:
    """Returns the whole HTML of a comparison."""
    names = _names([run.path for run in result.runs])
    rows = [_row(result, run, names[run.path]) for run in result.runs]
    notes = "".join(f"<li>{to_html(note)}</li>" for note in result.notes)
    body = (
        '<p class="eyebrow">fastlstm compare</p>\n'
        f"<h1>{counted(len(result.runs), 'run')}</h1>\n"
        f"{table(_HEADS, rows, kind='runs')}{quiet(_at(result))}"
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


def _row(result: RunComparison, run: RunSummary, name: str) -> list[str]:
    figures = [run.best, result.figure(run, "seconds"), result.figure(run, "chars")]
    return [
        name,
        Html(f'<span class="{run.state}">{run.state}</span>'),
        *(shown(figure, "{:.4f}".format) for figure in figures),
        clock(run.seconds),
        shown(run.rate, "{:,.0f}".format),
        shown(run.last.get("ceiling_share"), percent),
    ]
