"""`fastlstm forecast RUN DATA --out FILE`: the steps after the end of every series, as a table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fastlstm.cli.command import Command, Option, Positional
from fastlstm.cli.inputs import one_or_many, open_forecaster, refuse_swapped
from fastlstm.cli.options import READ_OPTIONS, levels_of
from fastlstm.cli.parser import parse
from fastlstm.errors import EXIT_OK, ConfigError, StorageError, counted
from fastlstm.system.storage import temporary_name

if TYPE_CHECKING:
    import pyarrow as pa

_SUFFIXES = (".parquet", ".csv", ".arrow")

COMMAND = Command(
    verb="forecast",
    summary="Forecast the next steps of every series of a table: the horizon RUN has.",
    positionals=(
        Positional("RUN", "a run directory of a forecaster"),
        Positional("DATA", "the past of the series, in any form that train takes", is_many=True),
    ),
    options=(
        Option(
            "out",
            str | None,
            None,
            "a .parquet, .csv or .arrow file; default is CSV on standard output",
            value="FILE",
        ),
        Option("quantiles", str | None, None, "comma-separated levels, such as 0.1,0.5,0.9"),
        Option(
            "future",
            str | None,
            None,
            "a table with the future covariates of the steps to forecast",
            value="FILE",
        ),
        *READ_OPTIONS,
    ),
    examples=(
        "fastlstm forecast runs/etth1 ETTh1.csv --out pred.parquet",
        "fastlstm forecast runs/sales sales.csv --future plan.csv --quantiles 0.1,0.9",
    ),
)


def run(argv: list[str]) -> int:
    """Forecasts and writes; returns the exit code."""
    parsed = parse(COMMAND, argv)
    path, *data = parsed.positionals
    out, future = parsed["out"], parsed["future"]
    if out is not None and not out.endswith(_SUFFIXES):
        raise ConfigError(
            f"--out is {out!r}, expected a file name ending in {', '.join(_SUFFIXES)}"
        )
    levels = levels_of(parsed["quantiles"])
    refuse_swapped("forecast", path, data)
    model = open_forecaster(parsed, data if future is None else [*data, future])
    frame = one_or_many(data)
    _write(
        model.predict_quantiles(frame, levels, future) if levels else model.predict(frame, future),
        out,
    )
    return EXIT_OK


def _write(table: pa.Table, out: str | None) -> None:
    import pyarrow as pa
    from pyarrow import csv, ipc, parquet

    if out is None:
        csv.write_csv(_in_seconds(table), pa.PythonFile(sys.stdout.buffer, mode="w"))
        return
    temporary = temporary_name(Path(out))
    try:
        with temporary.open("wb") as file:
            if out.endswith(".parquet"):
                parquet.write_table(table, file)
            elif out.endswith(".csv"):
                csv.write_csv(_in_seconds(table), file)
            else:
                with ipc.new_file(file, table.schema) as writer:
                    writer.write_table(table)
        temporary.replace(out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(
            f"{out} cannot be written ({error.strerror or error}); give another --out"
        ) from None
    print(f"{out}: {counted(table.num_rows, 'row')} of {', '.join(table.column_names)}")


def _in_seconds(table: pa.Table) -> pa.Table:
    """Returns a table with times in whole seconds, where no time has a fraction."""
    import pyarrow as pa

    for number, field in enumerate(table.schema):
        if pa.types.is_timestamp(field.type):
            try:
                times = table.column(number).cast(pa.timestamp("s", field.type.tz))
            except pa.ArrowInvalid:
                continue
            table = table.set_column(number, field.name, times)
    return table
