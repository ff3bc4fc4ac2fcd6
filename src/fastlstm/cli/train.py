"""`fastlstm train SOURCE [SOURCE ...] --out RUN`: flags and YAML become a configuration."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastlstm.cli.command import Command, Option, Positional
from fastlstm.cli.config_file import resolve_config
from fastlstm.cli.inputs import (
    one_or_many,
    refuse_runs,
    require_horizon,
    require_run,
    require_tables,
)
from fastlstm.cli.kind import command_for
from fastlstm.cli.options import FORECAST_OPTIONS, TABLES, TEXT_OPTIONS, config_option
from fastlstm.cli.parser import Parsed, parse
from fastlstm.distributed.launch import is_started_by_torchrun, launch
from fastlstm.errors import EXIT_OK, ConfigError, Stopped, counted
from fastlstm.forecast.config import ForecastConfig
from fastlstm.runs.run_directory import kind_of_run
from fastlstm.text.config import PARTS, TrainConfig
from fastlstm.text.data.source_kind import few, files_of
from fastlstm.text.data.sources import open_source

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastlstm.training.callbacks import Callback

    Observer = Callable[[dict[str, Any]], None]


def _switch(name: str, text: str) -> Option:
    return Option(name, bool, False, text, "run", is_switch=True)


_RUN_OPTIONS = (
    Option("out", str, None, "run directory to write", "run"),
    _switch("resume", "continue from the newest checkpoint in RUN; start anew without one"),
    config_option(),
    _switch("json", "print one JSON object per event"),
    Option("nproc", int, 1, "processes on this machine that train together", "run"),
    Option(
        "log", Literal["wandb", "mlflow", "trackio"], (), "also log the run to this tracker", "run",
        is_repeatable=True,
    ),
    Option(
        "alert", str, None, "run a command when something is wrong: NaN, a loss that jumps or"
        " rises, a later end, a stall", "run", value="CMD",
    ),
)  # fmt: skip
COMMAND = Command(
    verb="train",
    summary="Train a language model on a text, until --budget, --steps or --epochs.",
    positionals=(
        Positional(
            "SOURCE",
            "a text file, directory, glob, '-' for stdin, .gz, .zst, .jsonl, or a built-in corpus:"
            " python-docs, python-stdlib",
            is_many=True,
        ),
    ),
    options=(
        *_RUN_OPTIONS,
        Option(
            "start",
            str | None,
            None,
            "run to train on: its vocabulary, sizes and weights",
            "run",
            value="RUN",
        ),
        _switch("as_text", "train on the characters of SOURCE even if it is a table"),
        *TEXT_OPTIONS,
    ),
    required=("out",),
    examples=(
        "fastlstm train book.txt --out runs/book --budget 5m",
        "fastlstm train python-docs --out runs/docs --preset medium --steps 5000",
    ),
    other="For a table of time series: fastlstm train --horizon N --help",
)
TABLE_COMMAND = Command(
    verb="train",
    summary="Train a forecaster on a table of time series, until --budget, --steps or --epochs.",
    positionals=(TABLES,),
    options=(*_RUN_OPTIONS, *FORECAST_OPTIONS),
    required=("out",),
    examples=(
        "fastlstm train ETTh1.csv --horizon 96 --out runs/etth1 --budget 2m",
        "fastlstm train sales.parquet --target units --horizon 28 --out runs/sales",
    ),
)


def run(argv: list[str], callbacks: Sequence[Callback] = ()) -> int:
    """Trains, showing progress on standard output; returns the exit code."""
    started = time.perf_counter()  # a budget counts from here: torch is not loaded yet
    command = command_for(argv, COMMAND, TABLE_COMMAND)
    parsed = parse(command, argv)
    sources, out = parsed.positionals, parsed["out"]
    nproc = parsed["nproc"]
    if nproc != 1 or is_started_by_torchrun():
        _require_several(nproc, sources)
    config: TrainConfig | ForecastConfig
    if command is COMMAND:
        config, names = resolve_config(parsed, TEXT_OPTIONS, TrainConfig)
        refuse_runs([*sources, *filter(None, (getattr(config, part) for part in PARTS))])
        if (start := parsed["start"]) is not None and not parsed["resume"]:
            require_run(start, "text")
        if not is_started_by_torchrun():  # there rank 0 says what another machine has not
            open_source(sources)  # a misspelt name is an error before torch is loaded
    else:
        config, names = resolve_config(parsed, FORECAST_OPTIONS, ForecastConfig)
        require_tables(sources)
        if kind_of_run(out) != "forecaster":
            require_horizon(names, sources)
    if nproc > 1 and not is_started_by_torchrun():
        _require_rows(nproc, config, parsed["resume"])
        _require_gpus(nproc, config.device)
        return launch(["train", *argv], nproc)

    from fastlstm.report.progress import default_output
    from fastlstm.training.signals import StopFlag

    # The flag is up before torch is loaded: a signal in those seconds must not be lost.
    with (
        StopFlag() as stop,
        default_output(use_json=parsed["json"]) as output,
        Shown(output, parsed["json"]) as shown,
    ):
        shared: dict[str, Any] = {"out": out, "resume": parsed["resume"], "given": names}
        shared |= {"config": config, "observers": [shown], "stop": stop, "began": started}
        shared["callbacks"] = [*callbacks, *_observing(parsed)]
        if command is COMMAND:
            from fastlstm.text.train import train

            # A table without --as-text was refused above.
            train(one_or_many(sources), as_text=True, start=start, **shared)
        else:
            from fastlstm.forecast.train import train_forecaster

            _warn_of_texts(sources, shown)
            train_forecaster(one_or_many(sources), ends_early=True, **shared)
    return EXIT_OK


def _observing(parsed: Parsed) -> list[Callback]:
    """Returns the trackers of --log, and the alerts of --alert."""
    from fastlstm.training.alerts import Alerts
    from fastlstm.training.loggers import LOGGERS

    found: list[Callback] = [LOGGERS[name]() for name in dict.fromkeys(parsed["log"])]
    return found if parsed["alert"] is None else [*found, Alerts(parsed["alert"])]


def _require_several(nproc: int, sources: list[str]) -> None:
    """Raises ConfigError for no processes, and for what several cannot read."""
    if nproc < 1:
        raise ConfigError(f"`nproc={nproc!r}`: expected 1 or more")
    for source in sources:
        path = Path(source)
        if source == "-" or (path.exists() and not path.is_file() and not path.is_dir()):
            name = "standard input" if source == "-" else "pipe"
            raise ConfigError(
                f"several processes cannot read one {name}; give a file in place of {source}"
            )


def _require_rows(nproc: int, config: TrainConfig | ForecastConfig, is_resumed: bool) -> None:
    """Raises ConfigError before processes start that cannot share the rows of a step."""
    if not config.divides_batch:
        return
    rows = config.batch_size * config.accumulate
    if nproc > rows and not is_resumed:  # else the run may have more
        raise ConfigError(
            f"`nproc={nproc!r}`: a step has only {counted(rows, 'row')}; start fewer, or give"
            f" `batch_size={-(-nproc // config.accumulate)!r}` or more"
        )


def _require_gpus(nproc: int, device: str) -> None:
    """Raises ConfigError before processes start that would share a GPU."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return
    if nproc > (num := torch.cuda.device_count()):
        raise ConfigError(
            f"`nproc={nproc!r}`: there is {counted(num, 'GPU')}, and each process needs one of its"
            f" own; start {num}, or give `device='cpu'`"
        )


def _warn_of_texts(sources: list[str], show: Observer) -> None:
    for source in sources:
        tables, texts = files_of(source)
        if tables and texts:
            text = f"{source} has tables and texts; {few(texts)} not used"
            show({"event": "message", "level": "warning", "text": text})


class Shown:
    """An observer that knows whether the end event was shown.

    Args:
        output: shows events.
        use_json: whether `output` writes JSON.

    As a context manager it keeps a stop from being reported twice: an error after the end event
    needs no line of its own where standard output and standard error go to the same place.
    """

    def __init__(self, output: Observer, use_json: bool) -> None:
        self._output, self._use_json, self._has_ended = output, use_json, False

    def __call__(self, event: dict[str, Any]) -> None:
        self._has_ended |= event.get("event") == "end"
        self._output(event)

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Stopped) and self._has_ended and not self._use_json:
            error.is_shown = _is_one_stream()


def _is_one_stream() -> bool:
    """Returns whether standard output and standard error go to the same place."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return False
