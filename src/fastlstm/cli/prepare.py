"""`fastlstm prepare DATA`: reads a table of time series into the cache and describes it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

from fastlstm.cli.command import Command, Option, Positional
from fastlstm.cli.inputs import require_tables
from fastlstm.cli.options import TABLE_OPTIONS, given_options, json_option
from fastlstm.cli.output import print_json, print_rows
from fastlstm.cli.parser import parse
from fastlstm.errors import EXIT_OK, counted, in_flags
from fastlstm.forecast.config import ForecastConfig
from fastlstm.system.fields import built

if TYPE_CHECKING:
    from fastlstm.forecast.data.dataset import SeriesDataset

Dtype = Literal["auto", "float32", "float16", "int16"]

COMMAND = Command(
    verb="prepare",
    summary="Read a table of time series into the cache, check it and describe it.",
    positionals=(
        Positional(
            "DATA",
            "CSV (.gz, .zst), Parquet, Arrow or .npy files, directories or globs of them",
            is_many=True,
        ),
    ),
    options=(
        *TABLE_OPTIONS,
        Option("dtype", Dtype, "auto", "data type of the stored values", "table"),
        json_option(),
    ),
    examples=(
        "fastlstm prepare ETTh1.csv",
        "fastlstm prepare sales/ --target units --series store --gaps fill",
    ),
)


def run(argv: list[str]) -> int:
    """Prepares, showing progress on a terminal; returns the exit code."""
    parsed = parse(COMMAND, argv)
    config = built(ForecastConfig, given_options(parsed, TABLE_OPTIONS), "command line")

    from fastlstm.forecast.data.preparation import prepare
    from fastlstm.report.progress import default_output

    paths = parsed.positionals
    require_tables(paths)
    use_json = parsed["json"]
    with nullcontext() if use_json else default_output(use_json=False) as output:
        found = prepare(
            paths[0] if len(paths) == 1 else paths,
            config,
            None if output is None else lambda done, total: output(_progress(done, total)),
            parsed["dtype"],
        )
    if use_json:
        print_json(facts(found))
        return EXIT_OK
    rate = found.table.num_rows / max(found.seconds, 1e-9)
    print_rows(
        [
            ("rows", f"{found.table.num_rows:,} in {len(found.table.segments):,} stretches"),
            ("series", f"{len(found.series):,}"),
            ("columns", ", ".join(found.table.columns)),
            ("target", ", ".join(found.roles.target)),
            ("step", str(found.frequency)),
            (
                "stored as",
                f"{found.table.values.dtype.name}, {counted(found.table.values.nbytes, 'byte')}",
            ),
            *(("note", in_flags(note)) for note in found.notes),
            (
                "time",
                f"{found.seconds:.2f} s, found in the cache"
                if found.from_cache
                else f"{found.seconds:.2f} s, {rate / 1e6:.2f} M rows/s",
            ),
        ]
    )
    return EXIT_OK


def _progress(done: int, total: int | None) -> dict[str, Any]:
    return {"event": "prepare", "done_bytes": done, "total_bytes": total}


def facts(found: SeriesDataset) -> dict[str, Any]:
    """Returns what --json prints."""
    return {
        "rows": found.table.num_rows,
        "segments": len(found.table.segments),
        "series": len(found.series),
        "columns": list(found.table.columns),
        "target": list(found.roles.target),
        "step": str(found.frequency),
        "dtype": found.table.values.dtype.name,
        "bytes": found.table.values.nbytes,
        "notes": [in_flags(note) for note in found.notes],
        "from_cache": found.from_cache,
        "seconds": found.seconds,
        "key": found.key,
    }
