"""`fastlstm prepare DATA`: reads a table of time series into the cache and says what it holds."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

from fastlstm.cli.command import Command, Option, Positional
from fastlstm.cli.parser import parse
from fastlstm.cli.table import print_json, print_rows
from fastlstm.errors import EXIT_OK

if TYPE_CHECKING:
    from fastlstm.series.dataset import SeriesDataset

Dtype = Literal["auto", "float32", "float16", "int16"]

COMMAND = Command(
    verb="prepare",
    summary="Read a table of time series into the cache, checked, and say what it holds.",
    positionals=(
        Positional(
            "DATA",
            "CSV (.gz, .zst), Parquet, Arrow or .npy files, or directories of them",
            is_many=True,
        ),
    ),
    options=(
        Option("target", str | None, None, "columns to forecast, with commas", "columns"),
        Option("time", str | None, None, "the column of times", "columns"),
        Option("series", str | None, None, "the column that tells series apart", "columns"),
        Option("past", str | None, None, "columns known up to now only", "columns"),
        Option("future", str | None, None, "columns known ahead", "columns"),
        Option("static", str | None, None, "columns with one value per series", "columns"),
        Option("categorical", str | None, None, "columns that hold names", "columns"),
        Option("ignore", str | None, None, "columns left out", "columns"),
        Option(
            "disorder",
            Literal["error", "sort"],
            "error",
            "what to do with rows that go back in time",
            "times",
        ),
        Option(
            "duplicates",
            Literal["error", "first", "last"],
            "error",
            "which of two rows of one time counts",
            "times",
        ),
        Option(
            "gaps",
            Literal["split", "fill"],
            "split",
            "no window crosses them, or empty rows are put in",
            "times",
        ),
        Option("time_format", str | None, None, "how times are written (strptime)", "times"),
        Option("dtype", Dtype, "auto", "how values are stored", "values"),
        Option("missing_value", float | None, None, "a number that stands for none", "values"),
        Option("cache_dir", str | None, None, "where it is kept (default ~/.cache/fastlstm)"),
        Option("json", bool, False, "print one JSON object", is_switch=True),
    ),
    examples=(
        "fastlstm prepare ETTh1.csv",
        "fastlstm prepare sales/ --target units --series store --gaps fill",
    ),
)
_LISTS = ("target", "past", "future", "static", "categorical", "ignore")


def run(argv: list[str]) -> int:
    """Prepares, showing how far it is on a terminal; returns the exit code."""
    parsed = parse(COMMAND, argv)
    options = read_options({o.name: parsed.get(COMMAND, o.name) for o in COMMAND.options})

    from fastlstm.report.progress import default_output
    from fastlstm.series.dataset import prepare_table

    paths, cache = parsed.positionals, parsed.values.get("cache_dir")
    use_json = bool(parsed.values.get("json"))
    with nullcontext() if use_json else default_output(use_json=False) as output:
        found = prepare_table(
            paths[0] if len(paths) == 1 else paths,
            options,
            cache,
            None if output is None else lambda done, total: output(_progress(done, total)),
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
            ("stored as", f"{found.table.values.dtype.name}, {found.table.values.nbytes:,} bytes"),
            *(("note", note) for note in found.notes),
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


def read_options(given: dict[str, Any]) -> Any:
    """Returns PrepareOptions of the flags."""
    from fastlstm.series.arrange import Policy
    from fastlstm.series.dataset import PrepareOptions
    from fastlstm.series.roles import RoleRequest

    lists = {
        name: tuple(part.strip() for part in given[name].split(",") if part.strip())
        for name in _LISTS
        if given[name] is not None
    }
    roles = RoleRequest(time=given["time"], series=given["series"], **lists)
    policy = Policy(given["disorder"], given["duplicates"], given["gaps"])
    return PrepareOptions(
        roles, policy, given["dtype"], given["time_format"], given["missing_value"]
    )


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
        "notes": list(found.notes),
        "from_cache": found.from_cache,
        "seconds": found.seconds,
        "key": found.key,
    }
