"""`fastlstm prepare DATA`: reads a table of time series into the cache and describes it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from fastlstm.cli.command import Command, parse
from fastlstm.cli.inputs import one_or_many, require_tables
from fastlstm.cli.options import JSON, TABLE_OPTIONS, TABLES
from fastlstm.cli.output import print_result, with_flags
from fastlstm.errors import EXIT_OK, counted
from fastlstm.forecast.config import ForecastConfig
from fastlstm.system.fields import built

if TYPE_CHECKING:
    from fastlstm.forecast.data.dataset import SeriesDataset

COMMAND = Command(
    verb="prepare",
    summary="Read a table of time series into the cache, check it and describe it.",
    positionals=(TABLES,),
    options=(*TABLE_OPTIONS, JSON),
    examples=(
        "fastlstm prepare ETTh1.csv",
        "fastlstm prepare sales/ --target units --series store --gaps fill",
    ),
)


def run(argv: list[str]) -> int:
    """Prepares, showing progress on a terminal; returns the exit code."""
    parsed = parse(COMMAND, argv)
    config = built(ForecastConfig, parsed.given(TABLE_OPTIONS), "command line")

    from fastlstm.forecast.data.preparation import prepare
    from fastlstm.report.progress import default_output

    require_tables(parsed.positionals)
    with nullcontext() if parsed["json"] else default_output(use_json=False) as output:

        def show(done: int, total: int | None) -> None:
            if output is not None:
                output({"event": "prepare", "done_bytes": done, "total_bytes": total})

        dataset = prepare(one_or_many(parsed.positionals), config, show)
    print_result(*_described(dataset), parsed["json"])
    return EXIT_OK


def _described(dataset: SeriesDataset) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    table, seconds, step = dataset.table, dataset.seconds, str(dataset.frequency)
    notes, dtype = list(dataset.notes), table.values.dtype.name
    speed = f"{table.num_rows / max(seconds, 1e-9) / 1e6:.2f} M rows/s"
    facts = {
        **{"rows": table.num_rows, "segments": len(table.segments), "series": len(dataset.series)},
        **{"columns": list(table.columns), "target": list(dataset.roles.target), "step": step},
        **{"dtype": dtype, "bytes": table.values.nbytes, "notes": notes},
        **{"from_cache": dataset.from_cache, "seconds": seconds, "key": dataset.key},
    }
    return facts, [
        ("rows", f"{table.num_rows:,} in {counted(len(table.segments), 'segment')} without gaps"),
        ("series", f"{len(dataset.series):,}"),
        ("columns", ", ".join(table.columns)),
        ("target", ", ".join(dataset.roles.target)),
        ("step", step),
        ("stored as", f"{dtype}, {counted(table.values.nbytes, 'byte')}"),
        *(("note", with_flags(note)) for note in notes),
        ("time", f"{seconds:.2f} s, {'found in the cache' if dataset.from_cache else speed}"),
    ]
