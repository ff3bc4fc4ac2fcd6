"""`fastlstm compare RUN RUN…`: runs side by side at equal seconds or characters."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastlstm.cli.command import Command, Option, Positional, parse, switch
from fastlstm.cli.output import print_json, table, write_page
from fastlstm.errors import EXIT_OK
from fastlstm.report.lines import ceiling_share
from fastlstm.report.markup import visible
from fastlstm.report.terminal import clip, clock

if TYPE_CHECKING:
    from fastlstm.monitor.comparison import RunComparison

_AT = Literal["seconds", "chars"]
COMMAND = Command(
    verb="compare",
    summary="Show runs side by side, at equal seconds or characters, and what differs.",
    positionals=(Positional("RUN", "a run directory", is_many=True),),
    options=(
        Option("at", "what is equal where quality is compared", _AT, "seconds"),
        Option("html", "write table, curves and differences to a file as well", value="FILE"),
        switch("json", "print one JSON object with both comparisons"),
    ),
    examples=(
        "fastlstm compare runs/small runs/large",
        "fastlstm compare runs/* --at chars",
        "fastlstm compare runs/* --html runs.html",
    ),
)
_MAX_WIDTH = 40


def run(argv: list[str]) -> int:
    """Prints the comparison."""
    parsed = parse(COMMAND, argv)

    from fastlstm.monitor.comparison import compare_runs, comparison_page

    result = compare_runs([Path(path) for path in parsed.positionals])
    if parsed["html"] is not None:
        write_page(parsed["html"], comparison_page(result), "--html")
    if parsed["json"]:
        print_json(result.to_dict())
    else:
        sys.stdout.write(text(result, parsed["at"]))
    return EXIT_OK


def text(result: RunComparison, at: str) -> str:
    """Returns a table of the runs, one of their differences, and the notes."""
    limit = result.at[at]
    point = "none in common"
    if limit is not None:
        point = clock(limit) if at == "seconds" else f"{limit:,.0f} chars"
    rows = [["run", "state", "best", f"at {point}", "time", "units/s", "ceiling"]]
    for one in result.runs:
        share, rate = ceiling_share(one.start, one.rate), one.rate
        quality = [_shown(figure, "{:.4f}") for figure in (one.best, result.figure(one, at))]
        of_ceiling = _shown(None if share is None else 100 * share, "{:.0f}%")
        figures = [*quality, clock(one.seconds), _shown(rate, "{:,.0f}"), of_ceiling]
        rows.append([str(one.path), one.state, *figures])
    labels = dict.fromkeys(run.measure.label for run in result.runs)
    parts = [table(rows), f"best: lowest validation figure ({', '.join(labels)}); lower is better"]
    if result.differences:
        names = ["differs", *(run.path.name or str(run.path) for run in result.runs)]
        lines = [[name, *map(_value, values)] for name, values in result.differences.items()]
        parts += ["", table([names, *lines])]
    parts += ["", *(f"note: {visible(note)}" for note in result.notes)] if result.notes else []
    return "\n".join(parts) + "\n"


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _value(value: Any) -> str:
    return "-" if value is None else clip(str(value), _MAX_WIDTH)
