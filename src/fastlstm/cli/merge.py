"""`fastlstm merge DIR`: joins the parts of a table, of its forecasts or of its evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastlstm.cli.command import Command, Option, Positional
from fastlstm.cli.evaluate import table_rows
from fastlstm.cli.forecast import show_written, suffix_of
from fastlstm.cli.options import json_option
from fastlstm.cli.output import print_result
from fastlstm.cli.parser import parse
from fastlstm.cli.prepare import show_prepared
from fastlstm.errors import EXIT_OK, UsageError
from fastlstm.runs.parts import PartDirectory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastlstm.cli.parser import Parsed
    from fastlstm.runs.parts import StoredPart

COMMAND = Command(
    verb="merge",
    summary="Join the parts that prepare, forecast or evaluate wrote with --shard.",
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

    parts = PartDirectory(directory)
    stored = parts.collect()
    command = stored[0].work.get("command")
    if command == "prepare":
        return _merge_table(parsed, parts, stored)
    if parsed["cache_dir"] is not None:
        raise UsageError(f"{directory} has no parts of a table; leave out --cache-dir")

    from fastlstm.forecast.table_parts import merge_evaluations, merge_forecasts, warn_of_kernels

    warn_of_kernels(stored)
    if command == "forecast":
        if out is None or suffix is None or parsed["json"]:
            raise UsageError(f"{directory} has parts of forecasts; give --out FILE, not --json")
        show_written(out, *merge_forecasts(parts, stored, out, suffix))
        return EXIT_OK
    if out is not None:
        raise UsageError(
            f"{directory} has parts of an evaluation, which is printed; leave out --out"
        )
    scores = merge_evaluations(parts, stored)
    with parts.reading(stored[0]):
        facts = {**dict(stored[0].facts["shown"]), "scores": scores}
        rows = table_rows(facts)
    print_result(facts, rows, parsed["json"])
    return EXIT_OK


def _merge_table(parsed: Parsed, parts: PartDirectory, stored: Sequence[StoredPart]) -> int:
    if parsed["out"] is not None:
        raise UsageError(f"{parts.name} has parts of a table, for the cache; leave out --out")

    from fastlstm.forecast.prepared_parts import merge_prepared

    show_prepared(
        lambda show: merge_prepared(parts, stored, parsed["cache_dir"], show), parsed["json"]
    )
    return EXIT_OK
