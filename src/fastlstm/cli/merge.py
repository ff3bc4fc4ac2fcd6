"""`fastlstm merge DIR`: joins the parts of a table's forecasts or evaluation."""

from __future__ import annotations

from fastlstm.cli.command import Command, Option, Positional
from fastlstm.cli.evaluate import table_rows
from fastlstm.cli.forecast import show_written, suffix_of
from fastlstm.cli.options import json_option
from fastlstm.cli.output import print_result
from fastlstm.cli.parser import parse
from fastlstm.errors import EXIT_OK, UsageError

COMMAND = Command(
    verb="merge",
    summary="Join the parts that forecast, or evaluate on a table, wrote with --shard.",
    positionals=(Positional("DIR", "the directory or URL of all parts"),),
    options=(
        Option(
            "out",
            str | None,
            None,
            "a .parquet, .csv or .arrow file; of forecasts",
            value="FILE",
        ),
        json_option("one JSON object; of an evaluation"),
    ),
    examples=("fastlstm merge parts --out pred.parquet", "fastlstm merge parts --json"),
)


def run(argv: list[str]) -> int:
    """Joins and writes, or prints; returns the exit code."""
    parsed = parse(COMMAND, argv)
    [directory] = parsed.positionals
    out = parsed["out"]
    suffix = None if out is None else suffix_of(out)

    from fastlstm.forecast.table_parts import collect_parts, merge_evaluations, merge_forecasts

    parts, stored = collect_parts(directory)
    if stored[0].work["command"] == "forecast":
        if out is None or suffix is None or parsed["json"]:
            raise UsageError(f"{directory} has parts of forecasts; give --out FILE, not --json")
        show_written(out, *merge_forecasts(parts, stored, out, suffix))
        return EXIT_OK
    if out is not None:
        raise UsageError(
            f"{directory} has parts of an evaluation, which is printed; leave out --out"
        )
    facts = {**dict(stored[0].facts["shown"]), "scores": merge_evaluations(parts, stored)}
    print_result(facts, table_rows(facts), parsed["json"])
    return EXIT_OK
