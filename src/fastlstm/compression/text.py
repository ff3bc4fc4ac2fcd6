"""Compresses a text model: reads, rounds and measures it, and lowers the rank of its output."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastlstm.compression.options import CompressConfig
from fastlstm.compression.pruning import OUTPUT_SHARE, pruned, without_units
from fastlstm.compression.report import (
    Change,
    CompressReport,
    ModelFigures,
    OutputErrors,
    TrainingFigures,
    bootstrap_interval,
    notes_of_speed,
    speeds_in_turns,
)
from fastlstm.compression.session import (
    Attempt,
    CompressionSession,
    CompressionWay,
    Result,
    ways_of_text,
)
from fastlstm.errors import ConfigError, DataError, FormatError, NonFiniteError
from fastlstm.runs.weight_formats import (
    QuantizedMatrix,
    as_floats,
    block_grid,
    decode_weights,
    encode_weights,
    may_be_blocks,
    num_gates,
)
from fastlstm.system.measurements import CpuTimer
from fastlstm.system.storage import encode_json
from fastlstm.text.config import COMPRESSED_VERSION, ModelConfig
from fastlstm.text.data.tokenizer import Tokenizer
from fastlstm.text.decoder import (
    BYTE_PRODUCTS,
    Decoder,
    default_format,
    isa_of,
    make_decoder,
    native_refusal,
)
from fastlstm.text.files import LoadedModel, build_model, load_language_model
from fastlstm.text.held_out import part_of, read_text, validation_ids
from fastlstm.text.stored_model import (
    CONFIG_FILE,
    GENERATION_FILE,
    MODEL_FILE,
    TOKENIZER_FILE,
    load_stored_model,
    parameter_shapes,
    weights_record,
)
from fastlstm.text.task import tokens_per_char
from fastlstm.text.weight_report import score_tokens, writing_speed

Weights = Mapping[str, "NDArray[np.float32] | QuantizedMatrix"]

STREAMS = (1, 64)
MAX_SCORED = 1_000_000
"""Most tokens in a measurement of quality; a fiftieth of them where torch runs tokens one by
one."""
_LOGIT_TOKENS, _LOGIT_LANES, _LOGIT_STEPS = 4096, 16, 16
OUTPUT, PROJECTION = "output.weight", "projection.weight"
_SPARSE_SHARE = 0.25
"""A matrix with so many blocks of zeros is stored block-sparse, without them."""


@dataclass(frozen=True, eq=False)
class TextModel:
    """A text model before or after compression, with the hash and size of its file."""

    path: str
    weights: Weights
    config: ModelConfig
    weight_format: str
    sha256: str
    file_bytes: int

    @staticmethod
    def of_file(data: bytes, path: Path, config: ModelConfig, weight_format: str) -> TextModel:
        weights = decode_weights(data, parameter_shapes(config), weight_format, path / MODEL_FILE)
        digest = hashlib.sha256(data).hexdigest()
        return TextModel(str(path), weights, config, weight_format, digest, len(data))

    @cached_property
    def floats(self) -> dict[str, NDArray[np.float32]]:
        return as_floats(self.weights)

    @cached_property
    def decoder(self) -> Decoder:
        """The decoder that writes text by default."""
        weight_format = default_format(self.weight_format, self.config)
        return make_decoder(self.weights, self.config, weight_format)

    def figures(self, speed: dict[int, float], quality: float | None) -> ModelFigures:
        values = self.floats.values()
        return ModelFigures(
            path=self.path, sha256=self.sha256, weights=self.weight_format,
            num_parameters=sum(w.size for w in values),
            num_nonzero=sum(int(np.count_nonzero(w)) for w in values),
            file_bytes=self.file_bytes, resident_bytes=self.decoder.nbytes,
            kernel=self.decoder.describe(), speed=speed, quality=quality,
        )  # fmt: skip


class TextCompression(CompressionSession):
    """A text model and the tokens to measure it on: `ids`, or None and the reason `about_ids`."""

    unit = "characters"
    ids: NDArray[Any] | None = None
    about_ids: str = ""
    loaded_teacher: LoadedModel | None = None

    def __post_init__(self) -> None:
        self.stored = stored = load_stored_model(self.run)
        require_finite(stored.path, stored.weights)
        self.sizes: ModelConfig = stored.model_config
        record = weights_record(stored.path)
        self.model = TextModel(
            os.fspath(self.run), stored.weights, self.sizes, stored.weight_format,
            record.sha256, record.size,
        )  # fmt: skip
        self.sha256, self.before = record.sha256, stored.config.get("compression", {})
        self.learning_rate = stored.config.get("train", {}).get("learning_rate")
        names = ("rnn_size", "num_layers", "embed_size")
        sizes = {name: getattr(self.sizes, name) for name in names}
        self.facts = {"learning_rate": self.peak_rate, **sizes}
        if (rank := self.config.output_rank) is not None:
            check_output_rank(self.sizes, rank)

    def ways(self) -> tuple[CompressionWay, ...]:
        return ways_of_text(output_to_shrink(self.model.weights, self.sizes))

    def start(self, config: CompressConfig) -> tuple[dict[str, torch.Tensor], ModelConfig]:
        """Returns weights and sizes at the start of training: without some units, of lower rank."""
        floats, sizes = as_floats(self.model.weights), self.sizes
        tensors = {name: torch.from_numpy(weight.copy()) for name, weight in floats.items()}
        if config.prune is not None and config.structured == "units":
            tensors, sizes = without_units(tensors, sizes, config.prune)
        if config.output_rank is not None and not config.is_new_student:
            weights, sizes = with_output_rank(tensors, sizes, config.output_rank)
            tensors = {name: torch.as_tensor(weight) for name, weight in weights.items()}
        return tensors, sizes

    def attempt(self, config: CompressConfig) -> Attempt:
        chars_per_token = 1.0 if config.target is None else self._chars_per_token
        tensors, sizes = self.start(config)
        if config.prune is not None and config.structured == "blocks":
            model = build_model(as_floats(tensors), sizes)
            tensors = pruned(model, config.prune, "blocks")
        data = encode_model({n: tensor.numpy() for n, tensor in tensors.items()}, config.to)
        if config.target is None:
            return Attempt(len(data), None)
        result = TextModel.of_file(data, self.run, sizes, config.to)
        speed = writing_speed(result.decoder, config.streams) * chars_per_token
        return Attempt(len(data), speed)

    @cached_property
    def _chars_per_token(self) -> float:
        """Characters per token of the text to measure on; DataError without a text."""
        if self.stored.tokenizer.kind == "char":
            return 1.0
        self.find_data()
        if self.ids is None:
            raise DataError(
                f"`target` counts characters, and the text of {self.run} cannot be read:"
                f" {self.about_ids}; give it as `data`"
            )
        return 1.0 / tokens_per_char(self.ids, self.stored.tokenizer)

    def find_data(self) -> None:
        config, tokenizer = self.stored.config, self.stored.tokenizer
        about = config.get("data", {})
        if self.data is not None:
            text = read_text(config, tokenizer, self.data, "count")
            self.ids, self.about_ids = text.ids, text.source
            if text.key == about.get("key"):
                self.ids = part_of(config, text, "valid")
                self.about_ids = f"the validation part of {text.source}"
        elif not about.get("source"):
            self.about_ids = "the run does not name its text"
        else:
            try:
                self.ids = validation_ids(config, tokenizer)
                self.about_ids = name_of_text(about)
            except (DataError, OSError) as error:
                self.about_ids = f"the run's validation text is unreadable ({error})"

    def open_teacher(self) -> dict[str, str] | None:
        if not self.config.is_taught:
            return None
        path = self.config.distil or self.run
        self.loaded_teacher = teacher = load_language_model(path)
        named = teacher.model.named_parameters()
        require_finite(teacher.path, {name: p.detach().numpy() for name, p in named})
        if teacher.tokenizer.fingerprint != self.stored.tokenizer.fingerprint:
            raise FormatError(
                f"the teacher {path} has another tokenizer than {self.run}; their"
                " predictions cannot be compared: train both on one vocabulary"
            )
        return {"path": os.fspath(path), "model_sha256": weights_record(teacher.path).sha256}

    def plain(self) -> Result:
        weights, sizes, stored = self.model.weights, self.sizes, self.stored
        if (rank := self.config.output_rank) is not None:
            weights, sizes = with_output_rank(weights, sizes, rank)
        files = {
            CONFIG_FILE: encode_json({**stored.config, "model": sizes.to_dict()}),
            TOKENIZER_FILE: stored.tokenizer.to_json(),
            GENERATION_FILE: encode_json(stored.generation),
        }
        return self.result(weights, sizes, files)

    def result(self, weights: Weights, sizes: ModelConfig, files: Mapping[str, bytes]) -> Result:
        """Returns a result with these JSON files."""
        to = self.config.to
        data = encode_model(weights, to)
        files = compressed_files(files, self.about(self.config))
        model = TextModel.of_file(data, self.out, sizes, to)
        return Result(model, sizes, {**files, MODEL_FILE: data})

    def train(self) -> None:
        from fastlstm.compression.text_training import train_compressed

        train_compressed(self)

    def notes_on_start(self) -> list[str]:
        notes = [] if self.stored.note is None else [self.stored.note]
        if (to := self.model.weight_format) in ("int8", "int4"):
            notes.append(f"compression starts from weights stored as {to}")
        return notes

    def measured(
        self, result: Result, methods: list[str], training: TrainingFigures | None
    ) -> CompressReport:
        config, tokenizer = self.config, self.stored.tokenizer
        notes, source, model = [*self.notes, *self.notes_on_start()], self.model, result.model
        if training is None:
            less = "loses less with training: give a budget"
            notes += [f"an output of low rank {less}"] * (config.output_rank is not None)
            notes += [f"int4 {less}"] * (config.to == "int4")
        elif config.prune is not None and config.structured == "none":
            notes.append("the same speed as without zeros: no kernel is faster for single zeros")
        change, outputs = None, None
        quality: tuple[float | None, float | None] = None, None
        per_token, has_text = 1.0, self.ids is not None
        if self.ids is not None:
            quality, change, outputs = compare_quality(
                source, model, tokenizer, self.ids, self.about_ids
            )
            per_token = 1.0 / tokens_per_char(self.ids, tokenizer)
        with CpuTimer(threads=1) as timer:
            before, after = compare_speed(source, model, per_token)
        return CompressReport(
            kind="text", path=model.path, methods=methods,
            source=source.figures(before, quality[0]), result=model.figures(after, quality[1]),
            measure="bits_per_char", change=change,
            not_measured=None if has_text else self.about_ids, outputs=outputs,
            speed_unit="characters" if has_text or tokenizer.kind == "char" else "tokens",
            lacks=missing_features(model), training=training, max_loss=config.max_loss,
            is_published=True, notes=[*notes, *notes_of_speed(timer)],
        )  # fmt: skip


def name_of_text(data: Mapping[str, Any]) -> str:
    """Returns the name of the validation text, from `data` of config.json."""
    if "valid" in data:
        return str(data["valid"]["source"])
    return f"the validation part of {data['source']}"


def require_finite(path: Path, weights: Weights) -> None:
    """Raises NonFiniteError for a NaN or Inf in the weights of the run `path`."""
    for name, weight in weights.items():
        values = weight.scales if isinstance(weight, QuantizedMatrix) else weight
        if not np.isfinite(values).all():
            raise NonFiniteError(
                f"{path}: '{name}' holds NaN or Inf; use an earlier checkpoint or another run"
            )


def encode_model(weights: Weights, weight_format: str) -> bytes:
    """Returns model.safetensors, block-sparse for matrices with many blocks of zeros."""
    sparse = []
    for name, weight in weights.items() if weight_format != "int4" else ():
        values = weight.codes if isinstance(weight, QuantizedMatrix) else weight
        if may_be_blocks(values):
            is_zero = ~block_grid(values, num_gates(name, len(values))).any(axis=(2, 3))
            sparse += [name] * bool(is_zero.mean() >= _SPARSE_SHARE)
    return encode_weights(weights, weight_format, sparse)


def compressed_files(
    files: Mapping[str, bytes], compression: Mapping[str, Any]
) -> dict[str, bytes]:
    """Returns the JSON files of a model with `compression` in its config.json."""
    config = {**json.loads(files[CONFIG_FILE]), "format_version": COMPRESSED_VERSION}
    return {**files, CONFIG_FILE: encode_json({**config, "compression": dict(compression)})}


def max_scored(*models: ModelConfig) -> int:
    """Returns the most tokens in a measurement of quality."""
    is_native = all(native_refusal(model) is None for model in models)
    return MAX_SCORED if is_native else MAX_SCORED // 50


def compare_quality(
    source: TextModel, result: TextModel, tokenizer: Tokenizer, ids: NDArray[Any], scored_on: str
) -> tuple[tuple[float, float], Change, OutputErrors]:
    """Scores the same tokens with both models, each with the kernels that would serve it.

    Returns bits per character before and after, their difference, and the distance of the logits.
    """
    ids = ids[: max_scored(source.config, result.config) + 1]
    before, after = (score_tokens(model.decoder, ids) for model in (source, result))
    chars = tokenizer.token_chars[before.targets].astype(np.float64)
    bits = [scores.nats / math.log(2) for scores in (before, after)]
    low, high = bootstrap_interval(bits[1] - bits[0], chars)
    whole = max(float(chars.sum()), 1.0)
    quality = float(bits[0].sum()) / whole, float(bits[1].sum()) / whole
    change = Change(
        difference=quality[1] - quality[0], low=low, high=high,
        num_scored=len(chars), scored_on=scored_on,
    )  # fmt: skip
    agreement = float((before.likeliest == after.likeliest).mean())
    return quality, change, _logit_errors(source, result, ids, agreement)


@torch.no_grad()
def _logit_errors(
    source: TextModel, result: TextModel, ids: NDArray[Any], agreement: float
) -> OutputErrors:
    """Compares logits minus the mean of their row, in float32 with the stored weights."""
    lanes = min(_LOGIT_LANES, max(1, len(ids) // 64))
    steps = min(_LOGIT_TOKENS, len(ids)) // lanes
    tokens = torch.from_numpy(np.asarray(ids[: lanes * steps], np.int64).reshape(lanes, steps).T)
    models = [build_model(model.floats, model.config).eval() for model in (source, result)]
    states = [model.initial_state(lanes) for model in models]
    largest = total = 0.0
    for start in range(0, steps, _LOGIT_STEPS):
        part, outputs = tokens[start : start + _LOGIT_STEPS].contiguous(), []
        for k, model in enumerate(models):
            logits, states[k] = model(part, states[k])
            outputs.append(logits - logits.mean(2, keepdim=True))
        difference = outputs[1] - outputs[0]
        largest = max(largest, float(difference.abs().max()))
        total += float(difference.double().square().sum())
    count = lanes * steps
    return OutputErrors(
        what="logits", largest=largest, rms=math.sqrt(total / (count * source.config.vocab_size)),
        num_compared=count, agreement=agreement,
    )  # fmt: skip


def compare_speed(
    source: TextModel, result: TextModel, chars_per_token: float
) -> list[dict[int, float]]:
    """Returns characters per second of both models by number of streams."""

    def speed(model: TextModel, num_streams: int) -> float:
        return writing_speed(model.decoder, num_streams) * chars_per_token

    return speeds_in_turns((source, result), STREAMS, speed)


def missing_features(model: TextModel) -> list[str]:
    """Returns what this CPU lacks for the fastest kernels of a model."""
    if (why := native_refusal(model.config)) is not None:
        return [f"{why}: text is written on torch, in fp32"]
    name = model.weight_format
    is_slow = name in ("int8", "int4") and isa_of(name) in ("scalar", *BYTE_PRODUCTS)
    return [
        f"has no products of bytes (VNNI, on Arm dotprod), with which {name} is fastest"
    ] * is_slow


def check_output_rank(config: ModelConfig, rank: int) -> None:
    """Raises ConfigError for tied weights, and for a rank that is not smaller."""
    if config.tie_weights:
        raise ConfigError(
            "the output matrix of the model is its embedding (tied weights), which keeps its rank;"
            " leave out `output_rank`"
        )
    largest = config.output_rank or min(config.vocab_size, config.rnn_size)
    if rank >= largest:
        raise ConfigError(
            f"`output_rank` is {rank}, expected less than {largest}, the rank of the model's output"
        )


def output_to_shrink(weights: Mapping[str, Any], config: ModelConfig) -> int | None:
    """Returns the columns of the output matrix, if a lower rank would shrink the model by much.

    Returns None if the matrix is tied, has a lower rank, is at most a tenth of the weights, or has
    fewer than two rows a column.
    """
    if config.tie_weights or config.output_rank:
        return None
    rows, columns = weights[OUTPUT].shape
    total = sum(math.prod(weight.shape) for weight in weights.values())
    is_large = rows >= 2 * columns and rows * columns > OUTPUT_SHARE * total
    return int(columns) if is_large else None


def with_output_rank(
    weights: Mapping[str, Any], config: ModelConfig, rank: int
) -> tuple[dict[str, Any], ModelConfig]:
    """Returns weights with the best approximation of the output matrix of a rank, and their sizes.

    It keeps the largest values of the singular value decomposition ``U S V^T``, in float64. The
    output matrix is ``U sqrt(S)``, the projection before it ``sqrt(S) V^T``. The factors of an
    output that is a product already are multiplied first.
    """
    check_output_rank(config, rank)
    names = (OUTPUT, PROJECTION) if config.output_rank else (OUTPUT,)
    floats = as_floats({name: weights[name] for name in names})
    whole = np.asarray(floats[OUTPUT], np.float64)
    if config.output_rank:
        whole = whole @ np.asarray(floats[PROJECTION], np.float64)
    u, s, vt = np.linalg.svd(whole, full_matrices=False)
    root = np.sqrt(s[:rank])
    factors = {OUTPUT: u[:, :rank] * root, PROJECTION: root[:, None] * vt[:rank]}
    small = {name: np.ascontiguousarray(w, np.float32) for name, w in factors.items()}
    return {**weights, **small}, replace(config, output_rank=rank)
