"""Options that several verbs share, most of them drawn from the configurations of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_origin

from fastlstm.cli.command import (
    Command,
    Option,
    Positional,
    options_from_dataclass,
    switch,
    unwrap_optional,
)
from fastlstm.errors import ConfigError
from fastlstm.forecast.config import READING, ForecastConfig, Numbers
from fastlstm.ops.cell_options import OPTION_NAMES
from fastlstm.text.config import TrainConfig

_MACHINE = "device | precision threads wire sync_every memory_limit_gb strict_kernels"
_TEXT_GROUPS = {
    "data": "vocab valid | vocab_size encoding split test"
    " text_field missing_text keep_crlf invalid_utf8 cache_dir",
    "model": "preset rnn_size | num_layers embed_size dropout"
    " dropout_kind weight_drop output_norm residual tie_weights output_rank",
    "cell": "| " + " ".join(OPTION_NAMES),
    "training": "budget steps | epochs patience batch_size seq_length optimizer learning_rate"
    " weight_decay seed accumulate order lane_reset warmup cooldown grad_clip ema",
    "machine": f"{_MACHINE} pipeline",
    "output": "| eval_every checkpoint_every keep_checkpoints sample_every log_every tensorboard",
}
_TABLE_GROUPS = {
    "forecast": "horizon | input_size pad_start split patch",
    "columns": "target time series future | past static calendar categorical ignore",
    "table": f"| {' '.join(READING)} cache_dir",
    "model": "| hidden_size num_layers dropout output"
    " channels linear effects bidirectional normalize non_negative loss",
    "training": "budget | steps epochs patience batch_size learning_rate seed evaluations"
    " accumulate tbptt balance optimizer weight_decay warmup cooldown grad_clip ema",
    "machine": _MACHINE,
    "output": "| checkpoint_every eval_every keep_checkpoints log_every tensorboard",
}


JSON = switch("json", "print one JSON object")
CONFIG = Option("config", "YAML file of these options, or config.json of a run", group="run")


def device_option(auto: str) -> Option:
    """Returns the option that says where a verb computes; `auto` is what auto does."""
    choices = Literal["auto", "cpu", "cuda"]
    return Option("device", f"cuda is an NVIDIA GPU; {auto}", choices, "auto")


def _fields(cls: type, groups: dict[str, str]) -> tuple[Option, ...]:
    return tuple(map(_as_flag, options_from_dataclass(cls, groups)))


def _as_flag(option: Option) -> Option:
    """Lists are one text on the command line and in YAML (codes also a mapping); the horizon has no
    default."""
    if option.name == "horizon":
        return replace(option, default=None)
    if get_origin(unwrap_optional(option.type)) is not tuple:
        return option
    kind = str | dict[str, Any] | None if option.type == Numbers else str | None
    return replace(option, type=kind, default=None, is_list=True)


TEXT_OPTIONS = _fields(TrainConfig, _TEXT_GROUPS)
FORECAST_OPTIONS = _fields(ForecastConfig, _TABLE_GROUPS)
TABLE_OPTIONS = tuple(o for o in FORECAST_OPTIONS if o.group in ("columns", "table"))
TABLES = Positional(
    "DATA",
    "CSV (.gz, .zst), Parquet, Arrow or .npy files, directories or globs of them",
    is_many=True,
)


def of_training_runs(
    command: Command, texts: Sequence[Option] = (), tables: Sequence[Option] = ()
) -> tuple[Command, Command]:
    """Returns the commands, for texts and for tables, of a verb with the options of `train`."""
    takes = f"{command.other}Takes the options of fastlstm train for a"
    hint = f"For a table of time series: fastlstm {command.verb} --horizon N --help"
    own = command.options
    return (
        replace(command, options=(*own, *texts, *TEXT_OPTIONS), other=f"{takes} text.\n{hint}"),
        replace(command, options=(*own, *tables, *FORECAST_OPTIONS), other=f"{takes} table."),
    )


READ_OPTIONS = tuple(option for option in FORECAST_OPTIONS if option.name in READING)


def levels_of(text: str | None) -> tuple[float, ...]:
    """Returns the levels of quantiles in the value of --quantiles; none without one."""
    try:
        levels = tuple(float(part) for part in (text or "").split(",") if part.strip())
    except ValueError:
        levels = (2.0,)
    if text is not None and (not levels or not all(0 < level < 1 for level in levels)):
        raise ConfigError(
            f"--quantiles is {text!r}, expected numbers between 0 and 1, such as 0.1,0.5,0.9"
        )
    return levels
