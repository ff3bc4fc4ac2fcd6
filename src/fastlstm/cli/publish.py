"""`fastlstm publish RUN --to wandb|mlflow|trackio|csv`: the metrics of a run for other tools."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Literal

from fastlstm.cli.command import Command, Option, Positional
from fastlstm.cli.inputs import require_run
from fastlstm.cli.options import json_option
from fastlstm.cli.output import print_result, say
from fastlstm.cli.parser import parse
from fastlstm.errors import EXIT_FAILED, EXIT_OK, counted

EXIT_INTERRUPTED = 130

COMMAND = Command(
    verb="publish",
    summary="Publish the metrics of a run as a table or in a tracker.",
    positionals=(Positional("RUN", "a run directory; it may still be training"),),
    options=(
        Option("to", Literal["wandb", "mlflow", "trackio", "csv"], "csv", "where to"),
        Option("live", bool, False, "follow the run until it ends", is_switch=True),
        Option("out", str | None, None, "the file of csv; default is RUN.csv", value="FILE"),
        Option("name", str | None, None, "name of the run there; default is RUN's"),
        Option(
            "project", str | None, None,
            "project of W&B and Trackio, experiment of MLflow; default is fastlstm",
        ),
        json_option(),
    ),
    examples=(
        "fastlstm publish runs/book --to csv --out book.csv",
        "fastlstm publish runs/book --to wandb --live",
    ),
    other="Exit status: 0 done, 1 the run died while it was followed, 130 interrupted.",
)  # fmt: skip


def run(argv: list[str]) -> int:
    """Prints what was published; returns the exit code."""
    parsed = parse(COMMAND, argv)
    (path,) = parsed.positionals
    if not os.path.isdir(path):
        require_run(path)  # says what to do instead

    from fastlstm.monitor.publish import publish
    from fastlstm.training.signals import StopFlag

    with StopFlag() as stop, contextlib.redirect_stdout(sys.stderr):  # MLflow prints there
        report = publish(
            path, to=parsed["to"], out=parsed["out"], name=parsed["name"],
            project=parsed["project"], live=parsed["live"], stop=stop,
        )  # fmt: skip
    last = "" if report.last_step is None else f", to step {report.last_step:,}"
    rows = [("written", report.where), ("rows", counted(report.rows, "step") + last)]
    if report.next_command:
        rows.append(("next", report.next_command))
    print_result(report.to_dict(), rows, parsed["json"])
    for note in report.notes:
        say(f"note: {note}")
    if stop():
        return EXIT_INTERRUPTED
    if parsed["live"] and report.state == "dead":
        say("no process writes this run any more, and it has not ended")
        return EXIT_FAILED
    return EXIT_OK
