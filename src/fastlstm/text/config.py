"""The configuration of a language model and its training: flags, YAML and config.json."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any, Literal

from fastlstm.errors import ConfigError, FormatError
from fastlstm.ops.cell_options import CellOptions
from fastlstm.system.fields import BELOW_1, check_encoding, check_fields, parse_split
from fastlstm.training.options import BOUNDS, OptimizerName, TrainingOptions

Vocab = Literal["char", "byte", "bpe"]
Preset = Literal["tiny", "small", "medium", "large"]
Order = Literal["lanes", "windows"]

PARTS = {"valid": "validation", "test": "test"}
"""Parts of the data: shares of the text, unless the option of this name gives a text."""

FORMAT_VERSION = 2
"""Format of config.json."""
COMPRESSED_VERSION = FORMAT_VERSION + 1
"""Format of the config.json of a compressed run, which has the key "compression"."""
_OF_TABLES = """
    balance bidirectional calendar categorical channels disorder duplicates effects evaluations
    future gaps hidden_size horizon ignore input_size keep_value linear loss missing_value
    non_negative normalize output pad_start past patch series static target tbptt time time_format
    tz snap delimiter decimal thousands header skip_rows skip_footer skip_below skip_headers na look
    wide quotes escape units
"""
OPTIONS_OF_TABLES = frozenset(_OF_TABLES.split())
"""Fields of ForecastConfig that TrainConfig lacks: they ask for a forecaster."""
WHY_NOT_OF_TEXTS = {
    "bidirectional": "a language model reads forward only: backward it would see what comes next"
}
"""Why some of these options mean nothing for a text."""

PRESETS: dict[str, dict[str, int]] = {
    "tiny": {"rnn_size": 128, "embed_size": 64, "num_layers": 1},
    "small": {"rnn_size": 512, "embed_size": 128, "num_layers": 1},
    "medium": {"rnn_size": 1024, "embed_size": 256, "num_layers": 1},
    "large": {"rnn_size": 1024, "embed_size": 256, "num_layers": 2},
}


@dataclass(frozen=True)
class ModelConfig(CellOptions):
    """Architecture of a language model, with the options of its cells; stored in config.json.

    Fields mean the same as in `TrainConfig`; `vocab_size` is V, the number of tokens; `embed_size`
    is E, `rnn_size` H, `num_layers` L and `output_rank` R. Raises ConfigError if the rank is too
    large, or if tied weights have a rank or two widths.
    """

    vocab_size: int
    embed_size: int = 128
    rnn_size: int = 512
    num_layers: int = 1
    dropout: float = 0.0
    dropout_kind: Literal["variational", "plain"] = "variational"
    weight_drop: float = 0.0
    output_norm: bool = False
    residual: bool = False
    tie_weights: bool = False
    output_rank: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output_rank and self.tie_weights:
            raise ConfigError(
                "`output_rank` needs an output matrix of its own; leave out `tie_weights`"
            )
        if self.output_rank:
            size = min(self.vocab_size, self.rnn_size)
            if not 1 <= self.output_rank < size:
                raise ConfigError(
                    f"`output_rank` is {self.output_rank}, expected less than {size}, the smaller"
                    f" of {self.vocab_size} tokens and {self.rnn_size} hidden units"
                )
        if self.tie_weights and self.embed_size != self.rnn_size:
            raise ConfigError(
                f"`tie_weights` needs `embed_size` equal to `rnn_size`, got {self.embed_size} and"
                f" {self.rnn_size}"
            )

    @property
    def output_width(self) -> int:
        """Columns of the output matrix: H, or the rank of the output."""
        return self.output_rank or self.rnn_size

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields, as config.json has them, without an output rank of 0."""
        values = dataclasses.asdict(self)
        if not self.output_rank:
            del values["output_rank"]
        return values


def require_format(config: dict[str, Any]) -> None:
    """Raises FormatError for the config.json of another format."""
    version = config.get("format_version")
    expected = COMPRESSED_VERSION if "compression" in config else FORMAT_VERSION
    if type(version) is not int or version != expected:
        raise FormatError(
            f"has format version {version!s:.60}, this fastlstm reads {expected}; open the run"
            " with the fastlstm that wrote it"
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainingOptions, CellOptions):
    """Options of `fastlstm train` for a text. `None` means: chosen at the start and reported.

    With the attributes of `CellOptions`, the options of the LSTM's cell.

    Attributes:
        vocab: tokens of the model: characters, bytes or BPE.
        vocab_size: number of BPE tokens (bpe only), learned from the training split.
        text_field: field of JSON lines, or column of Parquet files, with the text.
        keep_crlf: keep CRLF line ends instead of converting them to LF.
        invalid_utf8: error stops at the first invalid byte; replace substitutes U+FFFD.
        encoding: encoding of the text, such as cp1252 or gb18030.
        missing_text: JSON lines and rows without a text are an error, or skipped and counted.
        split: contiguous train/validation/test shares of the text in percent; they count characters
            for BPE, else tokens.
        valid: validation text, in any form that SOURCE takes; default is a share of SOURCE. If a
            text is given, that share is added to the training split.
        test: test text, scored with the best model at the end; default is a share of SOURCE,
            which `evaluate` scores.
        cache_dir: cache of encoded texts (default ~/.cache/fastlstm).
        preset: model size. Without a given size, a run with a budget chooses size, one or two
            layers, batch and optimizer by timing steps; other runs are small.
        rnn_size: hidden units per layer, H.
        num_layers: number of LSTM layers.
        embed_size: width of the token embedding, E.
        dropout: dropout between layers and before the output, and a third of it on embeddings;
            default depends on the number of epochs and the size of the model.
        dropout_kind: variational uses one mask per sequence, plain uses a new mask per step.
        weight_drop: DropConnect probability on the recurrent weights.
        output_norm: layer normalization of the output of every layer.
        residual: add the input of a layer to its output if the sizes match.
        tie_weights: share the weights of embedding and output projection.
        output_rank: width of a projection before the output matrix, which makes a large
            vocabulary cheaper; 0 for no projection.
        zoneout: probability that a unit keeps its previous value for a step; X,Y sets output and
            cell separately.
        budget: wall-clock time of the whole command, e.g. 90s, 5min, 1h30m, with setup, evaluations
            and the report; default 5m without --steps or --epochs.
        batch_size: lanes (rows of contiguous text) per forward pass, B.
        seq_length: steps of truncated backpropagation through time, T; default is 128, or 64 for a
            short run.
        order: lanes carries the state through contiguous text; windows shuffles (for comparison).
        lane_reset: probability per lane and step of a reset to the zero state.
        learning_rate: peak learning rate; default depends on the optimizer.
        eval_every: steps between evaluations; by default evaluations take less than 5 % of the
            time.
        sample_every: evaluations between text samples; 0 disables samples.
        pipeline: divide the layers among the processes, and pass each batch through them in this
            many parts; 0 divides the batch, not the layers.
    """

    vocab: Vocab = "char"
    vocab_size: int = 4096
    text_field: str = "text"
    keep_crlf: bool = False
    invalid_utf8: Literal["error", "replace"] = "error"
    encoding: str = "utf-8"
    missing_text: Literal["error", "skip"] = "error"
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
    weight_drop: float = 0.0
    output_norm: bool = False
    residual: bool = False
    tie_weights: bool = False
    output_rank: int = 0
    zoneout: float | tuple[float, float] = 0.0  # type: ignore[assignment]

    seq_length: int | None = None
    order: Order = "lanes"
    lane_reset: float = 0.0
    optimizer: OptimizerName = "muon"
    sample_every: int = 1
    pipeline: int = 0

    def __post_init__(self) -> None:
        for name in PARTS:
            if isinstance(path := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(path))
        super().__post_init__()
        check_fields(self, _BOUNDS)
        parse_split(self.split)
        check_encoding(self.encoding)
        self.check_schedule()
        if self.strict_kernels and self.sample_every > 0:
            from fastlstm.text.decoder import native_refusal

            if (why := native_refusal(self)) is not None:
                raise ConfigError(
                    f"{why}: samples would be written on torch, which `strict_kernels` refuses;"
                    " give `sample_every=0`"
                )
        if self.order == "windows" and self.lane_reset > 0:
            raise ConfigError("`lane_reset` works on lanes; with `order='windows'` leave it out")

        self._check_pipeline()

    @property
    def divides_batch(self) -> bool:
        return self.pipeline == 0

    def _check_pipeline(self) -> None:
        if not self.pipeline:
            return
        refused = (
            (self.accumulate > 1, "accumulate", "a step is cut into its own parts"),
            (self.sync_every > 1, "sync_every", "each process has part of the weights"),
            (self.wire == "bf16", "wire='bf16'", "activations are sent as they are"),
            (self.tie_weights, "tie_weights", "two processes would hold the same weight"),
            (self.precision == "fp16", "precision='fp16'", "its loss is not scaled"),
        )
        for is_given, setting, why in refused:
            if is_given:
                raise ConfigError(
                    f"`pipeline` cannot be combined with `{setting}`: {why}; leave out one of them"
                )

    def model_config(self, vocab_size: int, dropout: float) -> ModelConfig:
        """Returns the architecture: the preset, with given fields in place of its own.

        `vocab_size` is V, `dropout` the chosen one.
        """
        names = {field.name for field in dataclasses.fields(ModelConfig)}
        own = {name: value for name, value in vars(self).items() if name in names}
        sizes = {
            name: default if own[name] is None else own[name]
            for name, default in PRESETS[self.preset].items()
        }
        if self.tie_weights and self.embed_size is None:
            sizes["embed_size"] = sizes["rnn_size"]
        return ModelConfig(**{**own, **sizes, "vocab_size": vocab_size, "dropout": dropout})


MODEL_BOUNDS: dict[str, tuple[float, float]] = {
    **{"vocab_size": (1, 2**24), "embed_size": (1, 65_536), "rnn_size": (1, 65_536)},
    **{"num_layers": (1, 64), "dropout": (0.0, BELOW_1), "weight_drop": (0.0, BELOW_1)},
    "output_rank": (0, 65_535),
}
_BOUNDS: dict[str, tuple[float, float]] = {
    **BOUNDS,
    **MODEL_BOUNDS,
    "batch_size": (1, 65_536),
    "vocab_size": (257, 1_000_000),
    "dropout": (0.0, 0.95),
    "weight_drop": (0.0, 0.95),
    "seq_length": (1, 65_536),
    "lane_reset": (0.0, 1.0),
    "sample_every": (0, 10**9),
    "pipeline": (0, 65_536),
}
