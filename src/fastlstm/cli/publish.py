"""`fastlstm publish RUN --to csv`: the metrics of a run for other tools."""

from __future__ import annotations

from typing import Literal

from fastlstm.cli.command import Command, Option, Positional
from fastlstm.cli.inputs import require_run
from fastlstm.cli.options import json_option
from fastlstm.cli.output import print_result
from fastlstm.cli.parser import parse
from fastlstm.errors import EXIT_OK, counted

COMMAND = Command(
    verb="publish",
    summary="Write the metrics of a run as a table for other tools.",
    positionals=(Positional("RUN", "a run directory; it may still be training"),),
    options=(
        Option("to", Literal["csv"], "csv", "what to write"),
        Option("out", str | None, None, "the file; default is RUN.csv", value="FILE"),
        Option("name", str | None, None, "name of the run in the table; default is RUN's"),
        json_option(),
    ),
    examples=("fastlstm publish runs/book --to csv --out book.csv",),
)


def run(argv: list[str]) -> int:
    """Prints what was written; returns the exit code."""
    parsed = parse(COMMAND, argv)
    (path,) = parsed.positionals
    require_run(path)

    from fastlstm.monitor.publish import publish

    report = publish(path, to=parsed["to"], out=parsed["out"], name=parsed["name"])
    rows = [
        ("written", report.where),
        ("rows", f"{counted(report.rows, 'step')}, to step {report.last_step:,}"),
    ]
    print_result(report.to_dict(), rows, parsed["json"])
    return EXIT_OK
