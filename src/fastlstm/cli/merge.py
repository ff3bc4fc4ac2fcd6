"""`fastlstm merge DIR`: joins the parts of a table, of its forecasts or of its evaluation."""

from __future__ import annotations

from fastlstm.cli.command import Command, Option, Positional
from fastlstm.cli.evaluate import table_rows
from fastlstm.cli.forecast import show_written, suffix_of
from fastlstm.cli.options import json_option
from fastlstm.cli.output import print_result
from fastlstm.cli.parser import parse
from fastlstm.cli.prepare import show_prepared
from fastlstm.errors import EXIT_OK, UsageError

COMMAND = Command(
    verb="merge",
    summary="Join the parts that prepare, forecast or evaluate on a table wrote with --shard.",
    positionals=(Positional("DIR", "the directory or URL of all parts"),),
    options=(
        Option(
            "out",
            str | None,
            None,
            "a .parquet, .csv or .arrow file; of forecasts",
            value="FILE",
        ),
        Option(
            "cache_dir",
            str | None,
            None,
            "directory of the cache into which a table is put",
        ),
        json_option("one JSON object; of an evaluation or a table"),
    ),
    examples=(
        "fastlstm merge parts --out pred.parquet",
        "fastlstm merge parts --json",
        "fastlstm merge s3://shop/parts",
    ),
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
    is_table = stored[0].work["command"] == "prepare"
    if out is not None:
        what = (
            "a table, which is put in the cache" if is_table else "an evaluation, which is printed"
        )
        raise UsageError(f"{directory} has parts of {what}; leave out --out")
    if is_table:
        from fastlstm.forecast.prepared_parts import merge_prepared

        show_prepared(
            lambda show: merge_prepared(parts, stored, parsed["cache_dir"], show), parsed["json"]
        )
        return EXIT_OK
    facts = {**dict(stored[0].facts["shown"]), "scores": merge_evaluations(parts, stored)}
    print_result(facts, table_rows(facts), parsed["json"])
    return EXIT_OK
