"""`fastlstm train SOURCE [SOURCE ...] --out RUN`: flags and YAML become a configuration."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastlstm.cli.command import Command, Option, Parsed, Positional, switch
from fastlstm.cli.inputs import require_run
from fastlstm.cli.options import CONFIG, FORECAST_OPTIONS, TABLES, TEXT_OPTIONS
from fastlstm.cli.output import with_flags
from fastlstm.cli.training import TrainingRun, read_training
from fastlstm.distributed.launch import is_started_by_torchrun, launch
from fastlstm.errors import EXIT_OK, ConfigError, Stopped, counted
from fastlstm.runs.events import SPELLING, Observer
from fastlstm.text.data.source_kind import few, files_of

if TYPE_CHECKING:
    from fastlstm.training.callbacks import Callback
    from fastlstm.training.signals import StopFlag

_TRACKER = Literal["wandb", "mlflow", "trackio"]
_RUN_OPTIONS = (
    Option("out", "run directory to write", group="run", is_required=True),
    switch("resume", "continue from the newest checkpoint in RUN; start anew without one", "run"),
)
_ALERT = "run a command when something is wrong: NaN, a later end, a stall"
_AS_TEXT = switch("as_text", "train on the characters of SOURCE even if it is a table", "run")
_RARE_OPTIONS = (
    CONFIG,
    switch("json", "print one JSON object per event", "run"),
    Option("nproc", "processes on this machine that train together", int, 1, "run"),
    Option("log", "also log the run to this tracker", _TRACKER, (), "run", is_repeatable=True),
    Option("alert", _ALERT, group="run", value="CMD"),
)


def _run_options(kept: str, *more: Option) -> tuple[Option, ...]:
    """Returns the options of a run that are no fields of a configuration; `kept` is what the run of
    --start gives to this one."""
    start = Option("start", f"run to train on: its {kept}", group="run", value="RUN")
    rare = (replace(option, is_common=False) for option in (*_RARE_OPTIONS, start, *more))
    return (*_RUN_OPTIONS, *rare)


COMMAND = Command(
    verb="train",
    summary="Train a language model on a text, until --budget, --steps or --epochs.",
    positionals=(
        Positional(
            "SOURCE",
            "a text file, directory, glob, '-' for stdin, .gz, .zst, .jsonl, .parquet, or a"
            " built-in corpus: python-docs, python-stdlib",
            is_many=True,
        ),
    ),
    options=(*_run_options("vocabulary, sizes and weights", _AS_TEXT), *TEXT_OPTIONS),
    examples=(
        "fastlstm train book.txt --out runs/book --budget 5m",
        "fastlstm train python-docs --out runs/docs --preset medium --steps 5000",
    ),
    other="For a table of time series: fastlstm train --horizon N --help",
)
TABLE_COMMAND = Command(
    verb="train",
    summary="Train a forecaster on a table, until --budget, --steps or --epochs.",
    positionals=(TABLES,),
    options=(*_run_options("columns, scales, sizes and weights"), *FORECAST_OPTIONS),
    examples=(
        "fastlstm train ETTh1.csv --horizon 96 --out runs/etth1 --budget 2m",
        "fastlstm train sales.parquet --target units --horizon 28 --out runs/sales",
        "fastlstm train new.csv --start runs/etth1 --out runs/etth2 --budget 1m",
    ),
)


def run(argv: list[str]) -> int:
    """Trains, showing progress on standard output; returns the exit code."""
    started = time.perf_counter()  # a budget counts from here: torch is not loaded yet
    job = read_training(argv, COMMAND, TABLE_COMMAND, _require_several)
    parsed, nproc = job.parsed, job.parsed["nproc"]
    start = parsed["start"]
    if start is not None and not parsed["resume"]:
        require_run(start, "forecaster" if job.is_table else "text", "train --start")
    if nproc > 1 and not is_started_by_torchrun():
        if start is not None and job.is_table:
            raise ConfigError(
                f"`nproc={nproc!r}`: training on from a forecaster runs in one process; leave out"
                " --nproc or --start"
            )
        _require_rows(job)
        _require_gpus(nproc, job.config.device)
        return launch(["train", *argv], nproc)
    with observed(parsed["json"]) as (stop, show):
        shared: dict[str, Any] = {
            **{"out": parsed["out"], "resume": parsed["resume"], "given": job.names},
            **{"config": job.config, "observers": [show], "stop": stop, "began": started},
            **{"callbacks": _observing(parsed), "start": start},
        }
        if job.is_table:
            from fastlstm.forecast.train import train_forecaster

            _warn_of_texts(parsed.positionals, show)
            train_forecaster(job.source, ends_early=True, **shared)
        else:
            from fastlstm.text.train import train

            # A table without --as-text was refused above.
            train(job.source, as_text=True, **shared)
    return EXIT_OK


@contextmanager
def observed(use_json: bool) -> Iterator[tuple[StopFlag, Observer]]:
    """Yields the flag of signals and an observer that shows events on standard output.

    Signals are handled before torch is loaded, which takes seconds. A stop after the end event is
    not reported again if standard output and standard error go to the same place.
    """
    from fastlstm.report.progress import default_output
    from fastlstm.training.signals import StopFlag

    has_ended = False
    with StopFlag() as stop, default_output(use_json=use_json) as output:

        def show(event: dict[str, Any]) -> None:
            nonlocal has_ended
            has_ended |= event.get("event") == "end"
            output(event)

        before = SPELLING.set(with_flags)
        try:
            yield stop, show
        except Stopped as error:
            if has_ended and not use_json:
                error.is_shown = _is_one_stream()
            raise
        finally:
            SPELLING.reset(before)


def _is_one_stream() -> bool:
    """Returns whether standard output and standard error go to the same place."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return False


def _observing(parsed: Parsed) -> list[Callback]:
    from fastlstm.training.alerts import Alerts
    from fastlstm.training.loggers import LOGGERS

    found: list[Callback] = [LOGGERS[name]() for name in dict.fromkeys(parsed["log"])]
    return found if parsed["alert"] is None else [*found, Alerts(parsed["alert"])]


def _require_several(parsed: Parsed) -> None:
    """Raises ConfigError for a wrong --nproc, and for a source that several cannot read."""
    nproc = parsed["nproc"]
    if nproc == 1 and not is_started_by_torchrun():
        return
    if nproc < 1:
        raise ConfigError(f"`nproc={nproc!r}`: expected 1 or more")
    for source in parsed.positionals:
        path = Path(source)
        if source == "-" or (path.exists() and not path.is_file() and not path.is_dir()):
            name = "standard input" if source == "-" else "pipe"
            raise ConfigError(
                f"several processes cannot read one {name}; give a file in place of {source}"
            )


def _require_rows(job: TrainingRun) -> None:
    config, nproc = job.config, job.parsed["nproc"]
    if not config.divides_batch or job.parsed["resume"]:  # a resumed run may have more rows
        return
    if nproc > (rows := config.batch_size * config.accumulate):
        raise ConfigError(
            f"`nproc={nproc!r}`: a step has only {counted(rows, 'row')}; start fewer, or give"
            f" `batch_size={-(-nproc // config.accumulate)!r}` or more"
        )


def _require_gpus(nproc: int, device: str) -> None:
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return
    if nproc > (num := torch.cuda.device_count()):
        raise ConfigError(
            f"`nproc={nproc!r}`: each process needs a GPU, and there is {counted(num, 'GPU')};"
            f" start {num}, or give `device='cpu'`"
        )


def _warn_of_texts(sources: list[str], show: Observer) -> None:
    for source in sources:
        tables, texts = files_of(source)
        if tables and texts:
            text = f"{source} has tables and texts; {few(texts)} not used"
            show({"event": "message", "level": "warning", "text": text})
