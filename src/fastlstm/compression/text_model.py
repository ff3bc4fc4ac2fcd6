"""A text model on one side of a compression, and how two of them are measured beside each other."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastlstm.compression.report import Change, ModelFigures, OutputErrors
from fastlstm.compression.statistics import bootstrap_interval
from fastlstm.errors import NonFiniteError
from fastlstm.runs.weight_formats import (
    QuantizedMatrix,
    as_floats,
    block_grid,
    decode_weights,
    encode_weights,
    may_be_blocks,
    num_gates,
)
from fastlstm.system import hardware
from fastlstm.system.storage import encode_json
from fastlstm.text.config import COMPRESSED_VERSION, ModelConfig
from fastlstm.text.decoder import Decoder, default_format, make_decoder, native_refusal
from fastlstm.text.files import build_model
from fastlstm.text.stored_model import (
    CONFIG_FILE,
    GENERATION_FILE,
    MODEL_FILE,
    TOKENIZER_FILE,
    StoredModel,
    load_stored_model,
    parameter_shapes,
    weights_record,
)
from fastlstm.text.weight_report import score_tokens, writing_speed

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from fastlstm.text.data.tokenizer import Tokenizer

Weights = Mapping[str, "NDArray[np.float32] | QuantizedMatrix"]

STREAMS = (1, 64)
MAX_SCORED = 1_000_000
"""Tokens that quality is measured on at most; on torch, token by token, a fiftieth of it."""
_LOGIT_TOKENS, _LOGIT_LANES, _LOGIT_STEPS = 4096, 16, 16
_SPARSE_SHARE = 0.25
"""A matrix with so many blocks of zeros is stored as the others only."""
_ROUNDS = 3


@dataclass(frozen=True, eq=False)
class TextModel:
    """A text model before or after compression.

    Attributes:
        path: of its run.
        weights: by name, as its file gives them.
        config: its sizes and options.
        weight_format: of its file.
        sha256: of its file.
        file_bytes: size of its file.
    """

    path: str
    weights: Weights
    config: ModelConfig
    weight_format: str
    sha256: str
    file_bytes: int

    @staticmethod
    def of_run(stored: StoredModel, path: str | os.PathLike[str]) -> TextModel:
        """Returns the model of a run or checkpoint that was read from `stored.path`."""
        record = weights_record(stored.path)
        return TextModel(
            os.fspath(path), stored.weights, stored.model_config, stored.weight_format,
            record.sha256, record.size,
        )  # fmt: skip

    @staticmethod
    def of_file(data: bytes, path: Path, config: ModelConfig, weight_format: str) -> TextModel:
        """Returns the model that a file of weights, `data`, gives back."""
        weights = decode_weights(data, parameter_shapes(config), weight_format, path / MODEL_FILE)
        digest = hashlib.sha256(data).hexdigest()
        return TextModel(str(path), weights, config, weight_format, digest, len(data))

    @cached_property
    def floats(self) -> dict[str, NDArray[np.float32]]:
        """The weights as float32."""
        return as_floats(self.weights)

    @cached_property
    def decoder(self) -> Decoder:
        """The weights as text is written with by default."""
        weight_format = default_format(self.weight_format, self.config)
        return make_decoder(self.weights, self.config, weight_format)

    def figures(self, speed: dict[int, float], quality: float | None) -> ModelFigures:
        """Returns what the report says of it."""
        values = self.floats.values()
        return ModelFigures(
            path=self.path, sha256=self.sha256, weights=self.weight_format,
            num_parameters=sum(w.size for w in values),
            num_nonzero=sum(int(np.count_nonzero(w)) for w in values),
            file_bytes=self.file_bytes, resident_bytes=self.decoder.nbytes,
            kernel=self.decoder.describe(), speed=speed, quality=quality,
        )  # fmt: skip


def load_text_model(path: str | os.PathLike[str]) -> tuple[StoredModel, TextModel]:
    """Loads the model of a run or checkpoint; raises what `load_stored_model` does, NaN too."""
    stored = load_stored_model(path)
    require_finite(stored.path, stored.weights)
    return stored, TextModel.of_run(stored, path)


def require_finite(path: Path, weights: Weights) -> None:
    """Raises NonFiniteError where a weight is NaN or Inf; `path` is that of its run."""
    for name, weight in weights.items():
        values = weight.scales if isinstance(weight, QuantizedMatrix) else weight
        if not np.isfinite(values).all():
            raise NonFiniteError(
                f"{path}: '{name}' holds NaN or Inf; use an earlier checkpoint or another run"
            )


def encode_model(weights: Weights, weight_format: str) -> bytes:
    """Returns model.safetensors; matrices with many blocks of zeros are stored block-sparse."""
    sparse = [] if weight_format == "int4" else [n for n, w in weights.items() if _is_sparse(n, w)]
    return encode_weights(weights, weight_format, sparse)


def _is_sparse(name: str, weight: NDArray[np.float32] | QuantizedMatrix) -> bool:
    values = weight.codes if isinstance(weight, QuantizedMatrix) else weight
    if not may_be_blocks(values):
        return False
    is_zero = ~block_grid(values, num_gates(name, len(values))).any(axis=(2, 3))
    return bool(is_zero.mean() >= _SPARSE_SHARE)


def compressed_files(
    files: Mapping[str, bytes], compression: Mapping[str, Any]
) -> dict[str, bytes]:
    """Returns the JSON files of a model with `compression` in its config.json."""
    config = {**json.loads(files[CONFIG_FILE]), "format_version": COMPRESSED_VERSION}
    return {**files, CONFIG_FILE: encode_json({**config, "compression": dict(compression)})}


def files_of(stored: StoredModel, sizes: ModelConfig) -> dict[str, bytes]:
    """Returns the JSON files of a model that was read, with these sizes."""
    return {
        CONFIG_FILE: encode_json({**stored.config, "model": sizes.to_dict()}),
        TOKENIZER_FILE: stored.tokenizer.to_json(),
        GENERATION_FILE: encode_json(stored.generation),
    }


# measuring ---------------------------------------------------------------------------------------


def max_scored(*models: ModelConfig) -> int:
    """Returns how many tokens the quality of models is measured on at most."""
    is_native = all(native_refusal(model) is None for model in models)
    return MAX_SCORED if is_native else MAX_SCORED // 50


def compare_quality(
    source: TextModel, result: TextModel, tokenizer: Tokenizer, ids: NDArray[Any], scored_on: str
) -> tuple[tuple[float, float], Change, OutputErrors]:
    """Scores the same tokens with both models, each by the kernels that would serve it.

    Returns:
        Bits per character before and after, their difference, and that of the logits.

    Raises:
        DataError: fewer than 2 tokens.
        NonFiniteError: weights are damaged.
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
    """Compares logits, each row less its mean, in float32 with the stored weights."""
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
) -> tuple[dict[int, float], dict[int, float]]:
    """Returns the characters a second that both write, by number of streams; taken in turns."""
    speeds: tuple[dict[int, float], ...] = ({}, {})
    for num in STREAMS:
        rounds = [
            [writing_speed(model.decoder, num) for model in (source, result)]
            for _ in range(_ROUNDS)
        ]
        for speed, taken in zip(speeds, zip(*rounds, strict=True), strict=True):
            speed[num] = float(np.median(taken)) * chars_per_token
    return speeds[0], speeds[1]


def missing_features(model: TextModel) -> list[str]:
    """Returns what this CPU lacks for the fastest kernels of a model's format."""
    why = native_refusal(model.config)
    if why is not None:
        return [f"{why}: text is written on torch, in fp32"]
    features = hardware.cpu().features
    lacks = []
    if model.weight_format in ("int8", "int4") and "avx512_vnni" not in features:
        lacks.append(f"has no AVX-512 VNNI, with which {model.weight_format} is fastest")
    return lacks
