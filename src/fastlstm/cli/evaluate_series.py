"""`fastlstm evaluate RUN DATA` of a forecaster: its errors beside those of naive forecasts."""

from __future__ import annotations

from typing import Any, Literal

from fastlstm.cli.command import Command, Option, Positional
from fastlstm.cli.kind import refuse_swapped, require_tables
from fastlstm.cli.parser import parse
from fastlstm.cli.series_options import READ_OPTIONS, read_settings
from fastlstm.cli.table import print_json, print_rows
from fastlstm.errors import EXIT_OK
from fastlstm.runs.find_run import require_run
from fastlstm.system.storage import finite

COMMAND = Command(
    verb="evaluate",
    summary="Measure the errors of a forecaster on a table, beside those of naive forecasts.",
    positionals=(
        Positional("RUN", "a run directory of a forecaster"),
        Positional("DATA", "a table in any form that train takes", is_many=True),
    ),
    options=(
        Option(
            "split", Literal["valid", "test"], "test", "the part of DATA, cut as RUN cut its own"
        ),
        Option("stride", int, 1, "rows from one origin to the next"),
        Option("season", int | None, None, "steps that the seasonal naive forecast repeats"),
        Option("scaled", bool, False, "errors in deviations of the training rows", is_switch=True),
        Option("json", bool, False, "print one JSON object", is_switch=True),
        *READ_OPTIONS,
    ),
    examples=("fastlstm evaluate runs/etth1 ETTh1.csv --scaled",),
)


def run(argv: list[str]) -> int:
    """Prints the figures on standard output; returns the exit code."""
    parsed = parse(COMMAND, argv)
    path, *data = parsed.positionals
    refuse_swapped("evaluate", path, data)
    require_run(path, "forecaster")
    require_tables(data)
    others = {"json", *(option.name for option in READ_OPTIONS)}
    given = {o.name: parsed.get(COMMAND, o.name) for o in COMMAND.options if o.name not in others}

    from fastlstm.forecast.forecaster import Forecaster
    from fastlstm.report.lines import score_text

    model = Forecaster.load(path, **read_settings(parsed))
    frame: Any = data[0] if len(data) == 1 else data
    part = given.pop("split")
    scores = model.backtest(part, frame=frame, **given)
    if parsed.values.get("json"):
        print_json(finite({"run": path, "data": data, "split": part, **given, "scores": scores}))
        return EXIT_OK
    units = "deviations of the training rows" if given["scaled"] else "units of the table"
    print_rows(
        [
            ("run", path),
            ("data", f"{', '.join(data)}, {part} part, in {units}"),
            *((name.replace("_", " "), score_text(found)) for name, found in scores.items()),
        ]
    )
    return EXIT_OK
