"""`fastlstm train DATA --horizon N --out RUN`: flags and YAML become a ForecastConfig."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastlstm.cli.command import Command, Option, Positional
from fastlstm.cli.config_file import read_config_file
from fastlstm.cli.parser import Parsed, parse
from fastlstm.cli.series_options import CONFIG_OPTIONS
from fastlstm.config import built
from fastlstm.errors import EXIT_OK
from fastlstm.forecast_config import ForecastConfig

_ENDS = ("steps", "epochs", "budget")

COMMAND = Command(
    verb="train",
    summary="Train a forecaster on a table of time series, until --budget, --steps or --epochs.",
    positionals=(
        Positional(
            "DATA",
            "CSV (.gz, .zst), Parquet, Arrow or .npy files, or directories of them",
            is_many=True,
        ),
    ),
    options=(
        Option("out", str, None, "run directory to write", "run"),
        Option(
            "resume",
            bool,
            False,
            "go on from the newest checkpoint in RUN if there is one, else start",
            "run",
            is_switch=True,
        ),
        Option(
            "config",
            str,
            None,
            "YAML file whose keys are the options below, or a run's config.json; flags win",
            "run",
        ),
        Option(
            "json", bool, False, "print one JSON object per event instead", "run", is_switch=True
        ),
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
    parsed = parse(COMMAND, argv)
    file = _file_values(parsed)
    config = resolve_config(parsed, file)

    from fastlstm.report.progress import default_output
    from fastlstm.training.signals import StopFlag

    sources = parsed.positionals
    names = {option.name for option in CONFIG_OPTIONS}
    # The flag is up before torch is loaded: a signal in those seconds must not be lost.
    with StopFlag() as stop, default_output(use_json=bool(parsed.values.get("json"))) as output:
        from fastlstm.forecast_run import train_forecaster

        train_forecaster(
            sources[0] if len(sources) == 1 else sources,
            config,
            out=parsed.values["out"],
            resume=bool(parsed.values.get("resume")),
            given=(set(parsed.values) & names) | set(file),
            observers=[output],
            stop=stop,
        )
    return EXIT_OK


def _file_values(parsed: Parsed) -> dict[str, Any]:
    path = parsed.values.get("config")
    return {} if path is None else read_config_file(Path(path), CONFIG_OPTIONS)


def resolve_config(parsed: Parsed, file: dict[str, Any]) -> ForecastConfig:
    """Returns the configuration: defaults, then the file of --config, then flags."""
    values = dict(file)
    names = {option.name for option in CONFIG_OPTIONS}
    flags = {name: value for name, value in parsed.values.items() if name in names}
    if set(_ENDS) & set(flags):
        # An end on the command line replaces the file's; two flags still contradict each other.
        for name in _ENDS:
            values.pop(name, None)
    origin = str(parsed.values.get("config") or "command line")
    return built(ForecastConfig, {**values, **flags}, origin)
