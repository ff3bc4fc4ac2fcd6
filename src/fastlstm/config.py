"""The typed configuration: one flat frozen dataclass; flags, YAML and config.json come from it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from fastlstm.errors import ConfigError, Setting, nearest_hint

Vocab = Literal["char", "byte", "bpe"]
Preset = Literal["tiny", "small", "medium", "large"]
Optimizer = Literal["muon", "adam", "adamw", "nadam", "sgd"]
Precision = Literal["auto", "fp32", "bf16", "fp16", "tf32"]
Device = Literal["auto", "cpu", "cuda"]
Order = Literal["lanes", "windows"]

ConfigT = TypeVar("ConfigT")

PRESETS: dict[str, dict[str, int]] = {
    "tiny": {"rnn_size": 128, "embed_size": 64, "num_layers": 1},
    "small": {"rnn_size": 512, "embed_size": 128, "num_layers": 1},
    "medium": {"rnn_size": 1024, "embed_size": 256, "num_layers": 1},
    "large": {"rnn_size": 1024, "embed_size": 256, "num_layers": 2},
}


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a language model; stored in config.json beside the weights.

    Attributes:
        vocab_size: V, number of tokens.
        embed_size: E, width of the embedding.
        rnn_size: H, hidden units per layer.
        num_layers: L.
        dropout: probability between layers and before the output; a third of it on embeddings.
        dropout_kind: "variational" (one mask per sequence) or "plain" (a new mask per step).
        recurrent_dropout: DropConnect probability on the recurrent weights.
        layer_norm: normalise the output of every layer.
        residual: add a layer's input to its output where widths agree.
        tie_weights: share embedding and output matrix (needs embed_size == rnn_size).
    """

    vocab_size: int
    embed_size: int = 128
    rnn_size: int = 512
    num_layers: int = 1
    dropout: float = 0.0
    dropout_kind: Literal["variational", "plain"] = "variational"
    recurrent_dropout: float = 0.0
    layer_norm: bool = False
    residual: bool = False
    tie_weights: bool = False


@dataclass(frozen=True)
class TrainConfig:
    """Everything `fastlstm train` can be told. `None` means: decided at start and said aloud.

    Attributes:
        vocab: unit of text the model predicts: char, byte or bpe.
        vocab_size: number of BPE tokens to learn (bpe only).
        text_field: name of the text field in JSON-lines sources.
        keep_crlf: keep CRLF line ends instead of turning them into LF.
        invalid_utf8: error stops at the first bad byte and names it; replace puts U+FFFD there.
        split: train/validation/test shares of the text, contiguous, in percent.
        cache_dir: where encoded text is kept (default ~/.cache/fastlstm).
        preset: model size: tiny, small, medium or large.
        rnn_size: hidden units per layer, H.
        num_layers: number of LSTM layers.
        embed_size: width of the token embedding, E.
        dropout: probability between layers and before the output, a third of it on embeddings;
            default is chosen from how often the text will be seen.
        dropout_kind: variational keeps one mask per sequence, plain draws one per step.
        recurrent_dropout: DropConnect probability on the recurrent weights.
        layer_norm: normalise the output of every layer.
        residual: add a layer's input to its output where the widths agree.
        tie_weights: share the embedding with the output projection.
        steps: stop after this many optimizer steps.
        epochs: stop after this many passes over the training split.
        budget: end this much wall clock after the start of the command, e.g. 90s, 5m, 1h30m:
            set-up, evaluations and the report are within it; default 5m without another end.
        batch_size: lanes per forward pass, B.
        seq_length: steps of truncated backpropagation, T; default is 128, and 64 for a short run,
            where more steps count for more than longer ones.
        accumulate: forward passes per optimizer step; the loss is normalised by token count.
        order: lanes carries the state through contiguous text, windows shuffles (for comparison).
        lane_reset: probability per lane and step of starting again from a zero state.
        optimizer: muon (recurrent matrices; Adam for the rest), adam, adamw, nadam or sgd.
        learning_rate: peak learning rate; default depends on the optimizer.
        weight_decay: weight decay, decoupled (adam and sgd add it to the gradient).
        warmup: share of the run that raises the learning rate from zero.
        cooldown: share of the run, at its end, that lowers it to zero.
        grad_clip: largest global gradient norm.
        ema: decay of the averaged weights used for evaluation; 0 switches them off.
        patience: stop early after this many evaluations without improvement; 0 never does.
        eval_every: steps between evaluations; default keeps them under 5 % of the time.
        checkpoint_every: steps between checkpoints; default is one after 15 s, then one a minute.
        keep_checkpoints: how many checkpoints to keep.
        sample_every: evaluations between text samples; 0 switches samples off.
        log_every: steps between progress lines; default is about one a second.
        tensorboard: write TensorBoard event files.
        device: auto takes the GPU when there is one.
        precision: auto measures which of the machine's precisions is fastest.
        threads: CPU threads; default is every core this process may use.
        memory_limit_gb: upper bound on GPU memory.
        strict_kernels: make a slow path an error.
        seed: of initialisation, order and dropout.
    """

    vocab: Vocab = "char"
    vocab_size: int = 4096
    text_field: str = "text"
    keep_crlf: bool = False
    invalid_utf8: Literal["error", "replace"] = "error"
    split: str = "90/5/5"
    cache_dir: str | None = None

    preset: Preset = "small"
    rnn_size: int | None = None
    num_layers: int | None = None
    embed_size: int | None = None
    dropout: float | None = None
    dropout_kind: Literal["variational", "plain"] = "variational"
    recurrent_dropout: float = 0.0
    layer_norm: bool = False
    residual: bool = False
    tie_weights: bool = False

    steps: int | None = None
    epochs: float | None = None
    budget: str | None = None
    batch_size: int = 32
    seq_length: int | None = None
    accumulate: int = 1
    order: Order = "lanes"
    lane_reset: float = 0.0
    optimizer: Optimizer = "muon"
    learning_rate: float | None = None
    weight_decay: float = 0.0
    warmup: float = 0.02
    cooldown: float = 0.7
    grad_clip: float = 1.0
    ema: float = 0.0
    patience: int = 0

    eval_every: int | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    sample_every: int = 1
    log_every: int | None = None
    tensorboard: bool = True
    device: Device = "auto"
    precision: Precision = "auto"
    threads: int | None = None
    memory_limit_gb: float | None = None
    strict_kernels: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, _BOUNDS, _CHOICES)
        parse_split(self.split)
        if self.warmup + self.cooldown > 1:
            raise ConfigError(
                Setting("warmup", self.warmup),
                " plus ",
                Setting("cooldown", self.cooldown),
                " is more than the whole run; their sum must be at most 1",
            )
        if self.order == "windows" and self.lane_reset > 0:
            raise ConfigError(
                Setting("lane_reset"), " works on lanes; with ", Setting("order", "windows"),
                " leave it out",
            )  # fmt: skip

    def model_config(self, vocab_size: int, dropout: float) -> ModelConfig:
        """Returns the architecture: the preset, with every field given here laid over it."""
        size = dict(PRESETS[self.preset])
        for name in size:
            if getattr(self, name) is not None:
                size[name] = getattr(self, name)
        if self.tie_weights:
            size["embed_size"] = size["rnn_size"] if self.embed_size is None else self.embed_size
            if size["embed_size"] != size["rnn_size"]:
                raise ConfigError(
                    Setting("tie_weights"),
                    " needs ",
                    Setting("embed_size"),
                    " equal to ",
                    Setting("rnn_size"),
                    f", got {size['embed_size']} and {size['rnn_size']}",
                )
        return ModelConfig(
            vocab_size=vocab_size,
            dropout=dropout,
            dropout_kind=self.dropout_kind,
            recurrent_dropout=self.recurrent_dropout,
            layer_norm=self.layer_norm,
            residual=self.residual,
            tie_weights=self.tie_weights,
            **size,
        )


_BOUNDS: dict[str, tuple[float, float]] = {
    "vocab_size": (257, 1_000_000),
    "rnn_size": (1, 65_536),
    "num_layers": (1, 64),
    "embed_size": (1, 65_536),
    "dropout": (0.0, 0.95),
    "recurrent_dropout": (0.0, 0.95),
    "steps": (1, 10**12),
    "epochs": (1e-6, 10**6),
    "batch_size": (1, 65_536),
    "seq_length": (1, 65_536),
    "accumulate": (1, 65_536),
    "lane_reset": (0.0, 1.0),
    "learning_rate": (0.0, 100.0),
    "weight_decay": (0.0, 10.0),
    "warmup": (0.0, 1.0),
    "cooldown": (0.0, 1.0),
    "grad_clip": (1e-9, 1e9),
    "ema": (0.0, 0.999999),
    "patience": (0, 10**9),
    "eval_every": (1, 10**12),
    "checkpoint_every": (1, 10**12),
    "keep_checkpoints": (1, 10_000),
    "sample_every": (0, 10**9),
    "log_every": (1, 10**9),
    "threads": (1, 4096),
    "memory_limit_gb": (0.1, 10_000),
    "seed": (0, 2**63 - 1),
}


_KINDS: dict[str, tuple[Any, str]] = {
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "bool": (bool, "True or False"),
    "str": (str, "a text"),
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "vocab": get_args(Vocab),
    "invalid_utf8": ("error", "replace"),
    "preset": get_args(Preset),
    "dropout_kind": ("variational", "plain"),
    "order": get_args(Order),
    "optimizer": get_args(Optimizer),
    "device": get_args(Device),
    "precision": get_args(Precision),
}


def check_fields(
    config: Any, bounds: Mapping[str, tuple[float, float]], choices: Mapping[str, tuple[str, ...]]
) -> None:
    """Checks the fields of a frozen dataclass, and that at most one end of a run is given.

    Args:
        config: the dataclass; a budget given as a number becomes text.
        bounds: least and largest value by field.
        choices: by field.

    Raises:
        ConfigError: names the flag, what came and what was expected.
    """
    for field in dataclasses.fields(config):
        _check_kind(config, field.name, str(field.type))
    for name, (low, high) in bounds.items():
        value = getattr(config, name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            raise ConfigError(
                Setting(name), f" is {value!r}, expected a number from {low} to {high}"
            )
    for name, known in choices.items():
        value = getattr(config, name)
        if value not in known:
            raise ConfigError(Setting(name), f" is {value!r}, expected one of {', '.join(known)}")
    ends = [name for name in ("steps", "epochs", "budget") if getattr(config, name) is not None]
    if len(ends) > 1:
        first, *others = map(Setting, ends)
        listed = [part for other in others for part in (" and ", other)]
        raise ConfigError(first, *listed, " contradict each other; give one way to end the run")
    if config.budget is not None:
        parse_duration(config.budget)


def _check_kind(config: Any, name: str, annotation: str) -> None:
    value, kind = getattr(config, name), annotation.removesuffix(" | None")
    if value is None and annotation.endswith("None"):
        return
    if kind == "str" and isinstance(value, int | float) and name == "budget":
        object.__setattr__(config, name, f"{value}s")
    elif kind in _KINDS and (
        not isinstance(value, _KINDS[kind][0]) or (isinstance(value, bool) != (kind == "bool"))
    ):
        raise ConfigError(Setting(name), f" is {value!r}, expected {_KINDS[kind][1]}")


def parse_duration(text: str) -> float:
    """Returns the seconds in ``"90s"``, ``"5m"``, ``"1h30m"`` or a plain number of seconds."""
    clean = text.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", clean):
        seconds = float(clean)
    else:
        match = re.fullmatch(
            r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?", clean
        )
        if not clean or match is None:
            raise ConfigError(
                Setting("budget"), f" is {text!r}, expected a duration such as 90s, 5m or 1h30m"
            )
        hours, minutes, rest = (float(part or 0) for part in match.groups())
        seconds = hours * 3600 + minutes * 60 + rest
    if not 1 <= seconds <= 10**8:
        raise ConfigError(Setting("budget"), f" is {text!r}, expected at least 1s")
    return seconds


def parse_split(text: str) -> tuple[float, float, float]:
    """Returns the train, validation and test shares of ``"90/5/5"``; they sum to 1."""
    try:
        parts = [float(part) for part in text.split("/")]
    except ValueError:
        parts = []
    parts += [0.0] * (3 - len(parts))
    good = len(parts) == 3 and all(math.isfinite(p) and p >= 0 for p in parts)
    if not good or abs(sum(parts) - 100) > 1e-6 or parts[0] == 0 or parts[1] == 0:
        raise ConfigError(
            Setting("split"),
            f" is {text!r}, expected train/validation/test in percent that add up to 100,"
            " such as 90/5/5 or 90/10/0",
        )
    return parts[0] / 100, parts[1] / 100, parts[2] / 100


def from_dict(values: dict[str, Any], origin: str) -> TrainConfig:
    """Builds a TrainConfig from plain values; see `built`."""
    return built(TrainConfig, values, origin)


def built(kind: type[ConfigT], values: dict[str, Any], origin: str) -> ConfigT:
    """Builds a configuration from plain values; an unknown key names the nearest known one.

    Raises:
        ConfigError: an unknown key, or a value outside its range; `origin` is named.
    """
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise ConfigError(f"{origin}: unknown key '{key}'{nearest_hint(key, known)}")
    return kind(**values)
