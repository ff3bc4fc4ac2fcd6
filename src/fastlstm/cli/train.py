"""`fastlstm train SOURCE [SOURCE ...] --out RUN`: flags and YAML become a TrainConfig."""

from __future__ import annotations

import time

from fastlstm.cli.command import Command, Option, Positional, options_from_dataclass
from fastlstm.cli.kind import refuse_runs
from fastlstm.cli.parser import parse
from fastlstm.cli.run_options import RUN_OPTIONS, Shown, resolve_config
from fastlstm.errors import EXIT_OK
from fastlstm.text.config import TrainConfig
from fastlstm.text.data.sources import open_source

GROUPS: dict[str, tuple[str, ...]] = {
    "data": (
        "vocab",
        "vocab_size",
        "text_field",
        "keep_crlf",
        "invalid_utf8",
        "split",
        "valid",
        "test",
        "cache_dir",
    ),
    "model": (
        "preset",
        "rnn_size",
        "num_layers",
        "embed_size",
        "dropout",
        "dropout_kind",
        "recurrent_dropout",
        "layer_norm",
        "residual",
        "tie_weights",
    ),
    "training": (
        "budget",
        "steps",
        "epochs",
        "patience",
        "batch_size",
        "seq_length",
        "accumulate",
        "order",
        "lane_reset",
        "optimizer",
        "learning_rate",
        "weight_decay",
        "warmup",
        "cooldown",
        "grad_clip",
        "ema",
        "seed",
    ),
    "machine": ("device", "precision", "threads", "memory_limit_gb", "strict_kernels"),
    "output": (
        "eval_every",
        "checkpoint_every",
        "keep_checkpoints",
        "sample_every",
        "log_every",
        "tensorboard",
    ),
}
"""Headings of the help text and the fields under them."""

CONFIG_OPTIONS = options_from_dataclass(TrainConfig, GROUPS)

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
        *RUN_OPTIONS,
        Option(
            "as_text",
            bool,
            False,
            "train on the characters of SOURCE, though it holds a table",
            "run",
            is_switch=True,
        ),
        *CONFIG_OPTIONS,
    ),
    required=("out",),
    examples=(
        "fastlstm train book.txt --out runs/book --budget 5m",
        "fastlstm train python-docs --out runs/docs --preset medium --steps 5000",
    ),
)


def run(argv: list[str]) -> int:
    """Trains, showing progress on standard output; returns the exit code."""
    began = time.perf_counter()  # a budget counts from here: torch is not loaded yet
    parsed = parse(COMMAND, argv)
    config, given = resolve_config(parsed, CONFIG_OPTIONS, TrainConfig)
    refuse_runs([*parsed.positionals, *filter(None, (config.valid, config.test))])
    open_source(parsed.positionals)  # a misspelt name is said at once

    from fastlstm.report.progress import default_output
    from fastlstm.training.signals import StopFlag

    sources = parsed.positionals
    use_json = bool(parsed.values.get("json"))
    # The flag is up before torch is loaded: a signal in those seconds must not be lost.
    with (
        StopFlag() as stop,
        default_output(use_json=use_json) as output,
        Shown(output, use_json) as shown,
    ):
        from fastlstm.text.train import train

        train(
            sources[0] if len(sources) == 1 else sources,
            out=parsed.values["out"],
            resume=bool(parsed.values.get("resume")),
            config=config,
            given=given,
            observers=[shown],
            stop=stop,
            began=began,
            as_text=True,  # a table was refused before, or --as-text was given
        )
    return EXIT_OK
