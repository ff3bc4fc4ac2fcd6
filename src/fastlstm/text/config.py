"""The configuration of a language model and its training: flags, YAML and config.json."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fastlstm.errors import ConfigError, Setting
from fastlstm.system.fields import built, check_fields, parse_split
from fastlstm.training.options import BOUNDS, CHOICES, OptimizerName, TrainingOptions

Vocab = Literal["char", "byte", "bpe"]
Preset = Literal["tiny", "small", "medium", "large"]
Order = Literal["lanes", "windows"]

PARTS = {"valid": "validation", "test": "test"}
"""Parts that are shares of the text, or texts of their own in the options of these names."""

OPTIONS_OF_TABLES = frozenset(
    {
        *("balance", "bidirectional", "categorical", "channels", "decoder", "disorder"),
        *("duplicates", "evaluations", "future", "gaps", "hidden_size", "horizon", "ignore"),
        *("input_size", "keep_value", "loss", "missing_value", "normalize", "output", "past"),
        *("segment", "series", "static", "target", "tbptt", "time", "time_format"),
    }
)
"""Fields of ForecastConfig that TrainConfig lacks: who gives one of them wants a forecaster."""

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


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainingOptions):
    """Options of `fastlstm train` for a text. `None` means: decided at the start and said.

    Attributes:
        vocab: unit of text the model predicts: char, byte or bpe.
        vocab_size: number of BPE tokens to learn (bpe only).
        text_field: name of the text field in JSON-lines sources.
        keep_crlf: keep CRLF line ends instead of turning them into LF.
        invalid_utf8: error stops at the first bad byte and names it; replace puts U+FFFD there.
        split: train/validation/test shares of the text, contiguous, in percent.
        valid: text to validate on instead of a share of SOURCE, in any form that SOURCE has; its
            share of --split is trained on.
        test: text that the best model is scored on at the end, instead of a share of SOURCE.
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
        budget: end this much wall clock after the start of the command, e.g. 90s, 5m, 1h30m:
            set-up, evaluations and the report are within it; default 5m without another end.
        seq_length: steps of truncated backpropagation, T; default is 128, and 64 for a short run,
            where more steps count for more than longer ones.
        order: lanes carries the state through contiguous text, windows shuffles (for comparison).
        lane_reset: probability per lane and step of starting again from a zero state.
        optimizer: muon (recurrent matrices; Adam for the rest), adam, adamw, nadam or sgd.
        learning_rate: peak learning rate; default depends on the optimizer.
        eval_every: steps between evaluations; default keeps them under 5 % of the time.
        sample_every: evaluations between text samples; 0 switches samples off.
    """

    vocab: Vocab = "char"
    vocab_size: int = 4096
    text_field: str = "text"
    keep_crlf: bool = False
    invalid_utf8: Literal["error", "replace"] = "error"
    split: str = "90/5/5"
    valid: str | None = None
    test: str | None = None
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

    seq_length: int | None = None
    order: Order = "lanes"
    lane_reset: float = 0.0
    optimizer: OptimizerName = "muon"
    sample_every: int = 1

    def __post_init__(self) -> None:
        for name in PARTS:
            if isinstance(path := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(path))
        check_fields(self, _BOUNDS, _CHOICES)
        parse_split(self.split)
        self.check_schedule()
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
    **BOUNDS,
    "batch_size": (1, 65_536),
    "vocab_size": (257, 1_000_000),
    "rnn_size": (1, 65_536),
    "num_layers": (1, 64),
    "embed_size": (1, 65_536),
    "dropout": (0.0, 0.95),
    "recurrent_dropout": (0.0, 0.95),
    "seq_length": (1, 65_536),
    "lane_reset": (0.0, 1.0),
    "sample_every": (0, 10**9),
}


_CHOICES: dict[str, tuple[str, ...]] = {
    **CHOICES,
    "vocab": get_args(Vocab),
    "invalid_utf8": ("error", "replace"),
    "preset": get_args(Preset),
    "dropout_kind": ("variational", "plain"),
    "order": get_args(Order),
}


def from_dict(values: dict[str, Any], origin: str) -> TrainConfig:
    """Builds a TrainConfig from plain values; see `built`."""
    return built(TrainConfig, values, origin)
