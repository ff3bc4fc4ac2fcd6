"""`fastlstm compress RUN --out NEW`: a smaller, faster model, measured beside its source."""

from __future__ import annotations

import time
from typing import Any

from fastlstm.cli.command import Command, Option, Positional, options_from_dataclass, switch
from fastlstm.cli.inputs import refuse_runs, require_run, require_tables, warn_of_table
from fastlstm.cli.output import print_json, print_result
from fastlstm.cli.train import observed
from fastlstm.cli.training import parse_for_run
from fastlstm.compression.options import OF_FORECASTERS, OF_TEXTS, CompressConfig
from fastlstm.errors import EXIT_OK, QualityError
from fastlstm.report.compression import compression_rows
from fastlstm.runs.run_directory import Kind
from fastlstm.system.fields import built

_GROUPS = {
    "weights": "to prune structured schedule output_rank",
    "student": "rnn_size hidden_size embed_size num_layers distil temperature alpha",
    "goal": "target max_bytes streams",
    "quality": "max_loss",
    "training": "budget steps epochs patience batch_size seq_length learning_rate dropout seed",
    "machine": "device precision threads",
    "output": "eval_every checkpoint_every keep_checkpoints log_every tensorboard",
}
_ALL = options_from_dataclass(CompressConfig, _GROUPS)
_RESUME = "continue from the newest checkpoint in NEW; start anew without one"


def _options(data: str, not_of: tuple[str, ...]) -> tuple[Option, ...]:
    return (
        Option("out", "run directory to write", group="run", value="NEW", is_required=True),
        Option("data", f"{data}; default is RUN's own", group="run", value="SRC"),
        switch("resume", _RESUME, "run"),
        switch("json", "print one JSON object per event, then the report", "run"),
        *(option for option in _ALL if option.name not in not_of),
    )


COMMAND = Command(
    verb="compress",
    summary="Make a trained text model smaller and faster, and measure what that costs.",
    positionals=(Positional("RUN", "the run to compress, or one of its checkpoints"),),
    options=_options("text to train and measure on", OF_FORECASTERS),
    examples=(
        "fastlstm compress runs/book --out runs/book8 --to int8",
        "fastlstm compress runs/book --out runs/half --prune 0.5 --structured units",
        "fastlstm compress runs/book --out runs/student --rnn-size 128 --budget 5m",
        "fastlstm compress runs/book --out runs/fast --target 200000/s --budget 10m",
    ),
    other="Other kinds of RUN have other options: fastlstm compress RUN --help",
)
TABLE_COMMAND = Command(
    verb="compress",
    summary="Make a trained forecaster smaller and faster, and measure what that costs.",
    positionals=(Positional("RUN", "the run to compress"),),
    options=_options("table to train and measure on", OF_TEXTS),
    examples=(
        "fastlstm compress runs/etth1 --out runs/etth1-8 --to int8 --data ETTh1.csv",
        "fastlstm compress runs/etth1 --out runs/small --hidden-size 32 --budget 2m",
    ),
)
COMMANDS: dict[Kind, Command] = {"text": COMMAND, "forecaster": TABLE_COMMAND}


def run(argv: list[str]) -> int:
    """Compresses, showing progress on standard output, then the report; returns the exit code."""
    started = time.perf_counter()  # a budget counts from here: torch is not loaded yet
    kind, parsed = parse_for_run(argv, COMMANDS)
    (path,), data, use_json = parsed.positionals, parsed["data"], parsed["json"]
    given = parsed.given(_ALL)
    config = built(CompressConfig, given, "command line")
    require_run(path, verb="compress")
    if data is not None and kind == "text":
        refuse_runs([data])
        warn_of_table(data)
    elif data is not None:
        require_tables([data])
    with observed(use_json) as (stop, show):
        from fastlstm.compression.session import compress

        try:
            report = compress(
                path, out=parsed["out"], data=data, resume=parsed["resume"], config=config,
                observers=[show], stop=stop, given=given, started=started,
            )  # fmt: skip
        except QualityError as error:
            _show(error.report, use_json)
            raise
    _show(report.to_dict(), use_json)
    return EXIT_OK


def _show(report: dict[str, Any], use_json: bool) -> None:
    if use_json:
        print_json({"event": "compression", **report})
    else:
        print_result(report, compression_rows(report), use_json=False)
