"""`fastlstm forecast RUN DATA --out FILE`: the next steps of series, answers to sequences."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from fastlstm.cli.command import Command, Option, Parsed, Positional, switch
from fastlstm.cli.inputs import one_or_many, open_forecaster, read_sequences, refuse_swapped
from fastlstm.cli.options import READ_OPTIONS, device_option, levels_of
from fastlstm.cli.training import parse_for_run
from fastlstm.errors import EXIT_OK, ConfigError, counted
from fastlstm.report.drawing import form_of
from fastlstm.report.markup import visible
from fastlstm.runs.run_directory import Kind
from fastlstm.system.object_store import is_url, write_whole

_SUFFIXES = (".parquet", ".csv", ".arrow")
"""The suffixes of forecast files, as `forecast_table` writes them, without loading pyarrow."""
_OUT = "a .parquet, .csv or .arrow file; default is CSV on standard output"
_FUTURE = (
    "a table with the future covariates of the steps to forecast, read with the same options of"
    " tables (--time-format, --decimal …) as DATA"
)
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
    other="Other kinds of RUN have other options: fastlstm forecast RUN --help",
)


SEQUENCE_COMMAND = Command(
    verb="forecast",
    summary="Answer sequences with a sequence model: numbers, or labels and probabilities.",
    positionals=(
        Positional("RUN", "a run directory of a sequence model"),
        Positional("DATA", "a .npy file (N, T, C), or .npz: X, and lengths of padded sequences"),
    ),
    options=(Option("out", _OUT, value="FILE"),),
    examples=("fastlstm forecast runs/gestures new.npy --out answers.csv",),
)
COMMANDS: dict[Kind, Command] = {"forecaster": COMMAND, "sequence": SEQUENCE_COMMAND}


def run(argv: list[str]) -> int:
    """Forecasts and writes; returns the exit code."""
    kind, parsed = parse_for_run(argv, COMMANDS)
    path, *data = parsed.positionals
    refuse_swapped("forecast", path, data)
    suffix = ".csv" if parsed["out"] is None else _suffix_of(parsed["out"])
    {"forecaster": _forecast, "sequence": _answer}[kind](parsed, data, suffix)
    return EXIT_OK


def _forecast(parsed: Parsed, data: list[str], suffix: str) -> None:
    future, levels = parsed["future"], levels_of(parsed["quantiles"])
    tables = data if future is None else [*data, future]
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
    schema = forecasts.csv_schema if suffix == ".csv" else forecasts.schema
    _write(parsed["out"], suffix, schema, forecasts.num_rows, forecasts.blocks())
    if parsed["plot"] is not None:
        forecasts.plot().save(parsed["plot"])


def _answer(parsed: Parsed, data: list[str], suffix: str) -> None:
    sequences, _ = read_sequences(data[0], needs_answers=False)

    import fastlstm.forecast.data  # noqa: F401 - its error names the extra of pyarrow
    from fastlstm.sequence.estimators import SequenceClassifier, model_of
    from fastlstm.sequence.files import read_sequence_model

    model = model_of(read_sequence_model(parsed.positionals[0]))
    columns: dict[str, Any] = {}
    if isinstance(model, SequenceClassifier):
        shares, names = model.predict_proba(sequences), model.classes_.tolist()
        if model.classes_.dtype == object:
            are_alike = len({*map(str, names)}) < len(names)  # such as 1 and '1'
            names = list(map(repr if are_alike else str, names))
        columns["label"] = [names[place] for place in shares.argmax(-1)]
        columns |= {f"p-{name}": share for name, share in zip(names, shares.T, strict=True)}
    else:
        answers = model.predict(sequences).reshape(len(sequences), -1).T
        one = ["answer"] if len(answers) == 1 else []
        names = one or [f"answer-{place}" for place in range(len(answers))]
        columns |= dict(zip(names, answers, strict=True))

    import pyarrow as pa

    table = pa.table(columns)
    _write(parsed["out"], suffix, table.schema, table.num_rows, [table])


def _suffix_of(out: str) -> str:
    """Returns the suffix of --out; raises ConfigError for an unknown one."""
    name = out.partition("?")[0] if is_url(out) else out
    for suffix in _SUFFIXES:
        if name.endswith(suffix):
            return suffix
    raise ConfigError(f"--out is {out!r}, expected a file name ending in {', '.join(_SUFFIXES)}")


def _write(out: str | None, suffix: str, schema: Any, num_rows: int, blocks: Iterable[Any]) -> None:
    """Writes the blocks of a table."""
    import pyarrow as pa

    from fastlstm.forecast.forecast_table import write_rows

    def produce(file: Any) -> None:
        write_rows(file, suffix, schema, blocks)

    if out is None:
        produce(pa.PythonFile(sys.stdout.buffer, mode="w"))
        return
    write_whole(out, produce)
    print(visible(f"{out}: {counted(num_rows, 'row')} of {', '.join(schema.names)}"))
