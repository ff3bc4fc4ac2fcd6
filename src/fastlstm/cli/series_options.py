"""The flags of verbs that work on tables: fields of ForecastConfig, columns with commas."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastlstm.cli.command import Option, options_from_dataclass
from fastlstm.cli.parser import Parsed
from fastlstm.forecast.config import READING, ForecastConfig

GROUPS: dict[str, tuple[str, ...]] = {
    "forecast": ("horizon", "input_size", "patch", "split"),
    "columns": (
        *("target", "time", "series", "past", "future", "static", "categorical", "ignore"),
    ),
    "table": (*READING, "cache_dir"),
    "model": (
        *("hidden_size", "num_layers", "channels", "decoder", "bidirectional"),
        *("normalize", "dropout", "output", "loss"),
    ),
    "training": (
        *("budget", "steps", "epochs", "patience", "evaluations", "batch_size"),
        *("accumulate", "tbptt", "balance", "optimizer", "learning_rate", "weight_decay"),
        *("warmup", "cooldown", "grad_clip", "ema", "seed"),
    ),
    "machine": ("device", "precision", "threads", "memory_limit_gb", "strict_kernels"),
    "output": (
        *("eval_every", "checkpoint_every", "keep_checkpoints", "log_every", "tensorboard"),
    ),
}
"""Headings of the help text and the fields under them."""


def _as_flag(option: Option) -> Option:
    """Column names are one text on the command line and in YAML; the horizon has no default."""
    if option.name == "horizon":
        return dataclasses.replace(option, default=None)
    if "tuple" not in str(option.type):
        return option
    return dataclasses.replace(option, type=str | None, default=None)


CONFIG_OPTIONS = tuple(
    _as_flag(option) for option in options_from_dataclass(ForecastConfig, GROUPS)
)
READ_OPTIONS = tuple(option for option in CONFIG_OPTIONS if option.name in READING)
TABLE_OPTIONS = tuple(option for option in CONFIG_OPTIONS if option.group in ("columns", "table"))


def read_settings(parsed: Parsed) -> dict[str, Any]:
    """Returns what a command line says of how a table is read."""
    return {o.name: parsed.values[o.name] for o in READ_OPTIONS if o.name in parsed.values}
