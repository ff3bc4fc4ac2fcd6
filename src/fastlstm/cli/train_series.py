"""`fastlstm train DATA --horizon N --out RUN`: flags and YAML become a ForecastConfig."""

from __future__ import annotations

import time

from fastlstm.cli.command import Command, Positional
from fastlstm.cli.kind import require_tables
from fastlstm.cli.parser import parse
from fastlstm.cli.run_options import RUN_OPTIONS, Shown, resolve_config
from fastlstm.cli.series_options import CONFIG_OPTIONS
from fastlstm.errors import EXIT_OK, UsageError
from fastlstm.forecast.config import ForecastConfig
from fastlstm.runs.run_directory import kind_of_run
from fastlstm.text.data.source_kind import few, files_of

COMMAND = Command(
    verb="train",
    summary="Train a forecaster on a table of time series, until --budget, --steps or --epochs.",
    positionals=(
        Positional(
            "DATA",
            "CSV (.gz, .zst), Parquet, Arrow or .npy files, directories or globs of them",
            is_many=True,
        ),
    ),
    options=(
        *RUN_OPTIONS,
        *CONFIG_OPTIONS,
    ),
    required=("out",),
    examples=(
        "fastlstm train ETTh1.csv --horizon 96 --out runs/etth1 --budget 2m",
        "fastlstm train sales.parquet --target units --horizon 28 --out runs/sales",
    ),
)


def run(argv: list[str]) -> int:
    """Trains, showing progress on standard output; returns the exit code."""
    began = time.perf_counter()  # a budget counts from here: torch is not loaded yet
    parsed = parse(COMMAND, argv)
    config, given = resolve_config(parsed, CONFIG_OPTIONS, ForecastConfig)
    require_tables(parsed.positionals)
    if "horizon" not in given and kind_of_run(parsed.values["out"]) != "forecaster":
        table = ", ".join(parsed.positionals)
        raise UsageError(
            f"--horizon is missing: give --horizon N to train a forecaster of the next N rows of"
            f" {table}"
        )

    from fastlstm.report.progress import default_output
    from fastlstm.training.signals import StopFlag

    sources = parsed.positionals
    # The flag is up before torch is loaded: a signal in those seconds must not be lost.
    use_json = bool(parsed.values.get("json"))
    with (
        StopFlag() as stop,
        default_output(use_json=use_json) as output,
        Shown(output, use_json) as shown,
    ):
        from fastlstm.forecast.train import train_forecaster

        for source in sources:
            tables, texts = files_of(source)
            if tables and texts:
                text = f"{source} holds tables and texts: {few(texts)} left out"
                shown({"event": "message", "level": "warning", "text": text})
        train_forecaster(
            sources[0] if len(sources) == 1 else sources,
            config,
            out=parsed.values["out"],
            resume=bool(parsed.values.get("resume")),
            given=given,
            observers=[shown],
            stop=stop,
            began=began,
        )
    return EXIT_OK
