"""`fastlstm forecast RUN DATA --out FILE`: the steps after the end of every series, as a table."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from fastlstm.cli.command import Command, Option, Positional, parse, switch
from fastlstm.cli.inputs import one_or_many, open_forecaster, refuse_swapped
from fastlstm.cli.options import READ_OPTIONS, device_option, levels_of
from fastlstm.errors import EXIT_OK, ConfigError, counted
from fastlstm.report.drawing import form_of
from fastlstm.system.object_store import is_url, write_whole

if TYPE_CHECKING:
    from fastlstm.forecast.forecast_table import Forecasts

_SUFFIXES = (".parquet", ".csv", ".arrow")
"""The suffixes of forecast files, as `forecast_file.SUFFIXES`, without loading pyarrow."""
_OUT = "a .parquet, .csv or .arrow file; default is CSV on standard output"
_FUTURE = "a table with the future covariates of the steps to forecast"
_RECALIBRATE = "fit the intervals to the last steps of DATA, as many as RUN has for validation"
COMMAND = Command(
    verb="forecast",
    summary="Forecast every series of a table over the horizon of RUN.",
    positionals=(
        Positional("RUN", "a run directory of a forecaster"),
        Positional("DATA", "the past of the series, in any form that train takes", is_many=True),
    ),
    options=(
        Option("out", _OUT, value="FILE"),
        Option("quantiles", "comma-separated levels, such as 0.1,0.5,0.9"),
        Option("future", _FUTURE, value="FILE"),
        Option("plot", "also draw the forecasts: a .svg or .png file", value="FILE"),
        switch("recalibrate", _RECALIBRATE),
        device_option("auto uses a GPU for 64 windows or more"),
        *READ_OPTIONS,
    ),
    examples=(
        "fastlstm forecast runs/etth1 ETTh1.csv --out pred.parquet",
        "fastlstm forecast runs/sales s3://shop/sales/ --out s3://shop/next.parquet",
        "fastlstm forecast runs/sales sales.csv --future plan.csv --quantiles 0.1,0.9",
    ),
)


def run(argv: list[str]) -> int:
    """Forecasts and writes; returns the exit code."""
    parsed = parse(COMMAND, argv)
    path, *data = parsed.positionals
    out, future = parsed["out"], parsed["future"]
    levels = levels_of(parsed["quantiles"])
    tables = data if future is None else [*data, future]
    refuse_swapped("forecast", path, data)
    suffix = ".csv" if out is None else _suffix_of(out)
    if parsed["plot"] is not None:
        form_of(parsed["plot"])
    if parsed["recalibrate"] and not levels and parsed["plot"] is None:
        raise ConfigError(
            "--recalibrate changes intervals, and these forecasts have none; add"
            " --quantiles 0.1,0.9 or --plot FILE"
        )
    model = open_forecaster(parsed, tables)
    if parsed["recalibrate"]:
        model.recalibrate(one_or_many(data))
    forecasts = model.forecasts(one_or_many(data), levels, future)
    _write(forecasts, out, suffix)
    if parsed["plot"] is not None:
        forecasts.plot().save(parsed["plot"])
    return EXIT_OK


def _suffix_of(out: str) -> str:
    """Returns the suffix of --out; raises ConfigError for an unknown one."""
    name = out.partition("?")[0] if is_url(out) else out
    for suffix in _SUFFIXES:
        if name.endswith(suffix):
            return suffix
    raise ConfigError(f"--out is {out!r}, expected a file name ending in {', '.join(_SUFFIXES)}")


def _write(forecasts: Forecasts, out: str | None, suffix: str) -> None:
    import pyarrow as pa

    from fastlstm.forecast.forecast_file import write_rows

    schema, whole = forecasts.schema, forecasts.has_whole_seconds

    def produce(file: Any) -> None:
        write_rows(file, suffix, schema, forecasts.blocks(), whole)

    if out is None:
        produce(pa.PythonFile(sys.stdout.buffer, mode="w"))
        return
    write_whole(out, produce)
    print(f"{out}: {counted(forecasts.num_rows, 'row')} of {', '.join(schema.names)}")
