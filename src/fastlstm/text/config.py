"""The configuration of a language model and its training: flags, YAML and config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from fastlstm.errors import ConfigError, Setting
from fastlstm.system.fields import Precision, built, check_fields, parse_split

Vocab = Literal["char", "byte", "bpe"]
Preset = Literal["tiny", "small", "medium", "large"]
Optimizer = Literal["muon", "adam", "adamw", "nadam", "sgd"]
Device = Literal["auto", "cpu", "cuda"]
Order = Literal["lanes", "windows"]

OPTIONS_OF_TABLES = frozenset(
    {
        *("balance", "bidirectional", "categorical", "channels", "decoder", "disorder"),
        *("duplicates", "evaluations", "future", "gaps", "hidden_size", "horizon", "ignore"),
        *("input_size", "keep_value", "loss", "missing_value", "normalize", "output", "past"),
        *("patch", "series", "static", "target", "tbptt", "time", "time_format"),
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


def from_dict(values: dict[str, Any], origin: str) -> TrainConfig:
    """Builds a TrainConfig from plain values; see `built`."""
    return built(TrainConfig, values, origin)
