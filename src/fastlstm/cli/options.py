"""Options that several verbs share, most of them drawn from the configurations of training."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_origin

from fastlstm.cli.command import Option, Positional, options_from_dataclass, unwrap_optional
from fastlstm.cli.parser import Parsed
from fastlstm.errors import ConfigError
from fastlstm.forecast.config import READING, ForecastConfig
from fastlstm.ops.cell_options import OPTION_NAMES
from fastlstm.text.config import TrainConfig

_MACHINE = "device precision threads wire sync_every memory_limit_gb strict_kernels"
_TEXT_GROUPS = {
    "data": "vocab vocab_size text_field missing_text keep_crlf encoding invalid_utf8 split valid"
    " test cache_dir",
    "model": "preset rnn_size num_layers embed_size dropout dropout_kind weight_drop output_norm"
    " residual tie_weights output_rank initializer",
    "cell": " ".join(OPTION_NAMES),
    "training": "budget steps epochs patience batch_size seq_length accumulate order lane_reset"
    " optimizer learning_rate weight_decay warmup cooldown grad_clip ema seed",
    "machine": f"{_MACHINE} pipeline",
    "output": "eval_every checkpoint_every keep_checkpoints sample_every log_every tensorboard",
}
_TABLE_GROUPS = {
    "forecast": "horizon input_size patch split",
    "columns": "target time series past future calendar static categorical ignore",
    "table": " ".join((*READING, "cache_dir")),
    "model": "hidden_size num_layers channels linear decoder bidirectional normalize dropout output"
    " loss",
    "training": "budget steps epochs patience evaluations batch_size accumulate tbptt balance"
    " optimizer learning_rate weight_decay warmup cooldown grad_clip ema seed",
    "machine": _MACHINE,
    "output": "eval_every checkpoint_every keep_checkpoints log_every tensorboard",
}


def json_option(shown: str = "one JSON object") -> Option:
    """Returns the switch that has a verb print JSON."""
    return Option("json", bool, False, f"print {shown}", is_switch=True)


def device_option(auto: str) -> Option:
    """Returns the option that says where a verb computes; `auto` is what auto does."""
    return Option(
        "device", Literal["auto", "cpu", "cuda"], "auto", f"cuda is an NVIDIA GPU; {auto}"
    )


def config_option() -> Option:
    """Returns the file of options of a verb that takes those of train."""
    return Option(
        "config", str, None, "YAML file of the options below, or config.json of a run", "run"
    )


def measure_option(what: str) -> Option:
    """Returns the time that predict measures for; `what` is the length of what it trains."""
    text = f"{what}; default is a tenth of the budget,\n5s to 2m"
    return Option("measure", str, None, text, value="TIME")


def _fields(cls: type, groups: dict[str, str]) -> tuple[Option, ...]:
    options = options_from_dataclass(cls, {name: text.split() for name, text in groups.items()})
    return tuple(map(_as_flag, options))


def _as_flag(option: Option) -> Option:
    """Lists are one text on the command line and in YAML; the horizon has no default."""
    if option.name == "horizon":
        return dataclasses.replace(option, default=None)
    if get_origin(unwrap_optional(option.type)) is not tuple:
        return option
    return dataclasses.replace(option, type=str | None, default=None, is_list=True)


TEXT_OPTIONS = _fields(TrainConfig, _TEXT_GROUPS)
FORECAST_OPTIONS = _fields(ForecastConfig, _TABLE_GROUPS)
TABLE_OPTIONS = tuple(o for o in FORECAST_OPTIONS if o.group in ("columns", "table"))
TABLES = Positional(
    "DATA",
    "CSV (.gz, .zst), Parquet, Arrow or .npy files, directories or globs of them",
    is_many=True,
)
READ_OPTIONS = tuple(option for option in FORECAST_OPTIONS if option.name in READING)


def given_options(parsed: Parsed, options: tuple[Option, ...]) -> dict[str, Any]:
    """Returns the values that a command line gives to some options."""
    return {o.name: parsed.values[o.name] for o in options if o.name in parsed.values}


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
