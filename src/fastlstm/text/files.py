"""Language models to disk and back, as safetensors and JSON; text/stored_model.py reads them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fastlstm.errors import counted
from fastlstm.report.lines import Row, model_rows
from fastlstm.runs.run_directory import TEXT_RUN
from fastlstm.runs.weight_formats import QuantizedMatrix, as_floats
from fastlstm.system.storage import encode_json
from fastlstm.system.tensors import encode_tensors
from fastlstm.text.config import FORMAT_VERSION
from fastlstm.text.stored_model import (
    CONFIG_FILE,
    GENERATION_DEFAULTS,
    GENERATION_FILE,
    MODEL_FILE,
    TOKENIZER_FILE,
    StoredModel,
    load_stored_model,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fastlstm.text.config import ModelConfig
    from fastlstm.text.data.tokenizer import Tokenizer
    from fastlstm.text.lm import LM
    from fastlstm.text.model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class LoadedModel(StoredModel):
    """A `StoredModel` whose weights are in `model`: an fp32 network on the CPU, evaluating."""

    model: LanguageModel
    matrices: Mapping[str, QuantizedMatrix]


def language_model_rows(loaded: LoadedModel | LM) -> list[Row]:
    """Returns the rows of a model: layers, size, vocabulary, and the text it was trained on."""
    model, tokenizer, data = loaded.model, loaded.tokenizer, loaded.config.get("data")
    rows = [
        *model_rows({"model": model.config.to_dict(), "num_parameters": model.num_parameters}),
        ("vocabulary", f"{tokenizer.kind}, {counted(tokenizer.vocab_size, 'token')}"),
        ("trained on", str(data.get("source") or "") if isinstance(data, dict) else ""),
        ("note", loaded.note or ""),
    ]
    return [(label, text) for label, text in rows if text]


def weights_file(weights: Mapping[str, torch.Tensor]) -> bytes:
    """Returns the content of model.safetensors: every weight in fp32."""
    return encode_tensors({name: weight.detach().float() for name, weight in weights.items()})


def settings_files(
    model: ModelConfig,
    tokenizer: Tokenizer,
    train: Mapping[str, Any],
    data: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
    **more: Any,
) -> dict[str, bytes]:
    """Returns config.json, with `more` keys, tokenizer.json and generation_config.json."""
    config = {
        "format": TEXT_RUN,
        "format_version": FORMAT_VERSION,
        "model": model.to_dict(),
        "train": dict(train),
        "given": dict(train if given is None else given),
        "tokenizer_sha256": tokenizer.fingerprint,
        "data": dict(data),
        **more,
    }
    return {
        CONFIG_FILE: encode_json(config),
        TOKENIZER_FILE: tokenizer.to_json(),
        GENERATION_FILE: encode_json(dict(generation or GENERATION_DEFAULTS)),
    }


def save_language_model(
    model: LanguageModel,
    tokenizer: Tokenizer,
    *,
    train: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
) -> dict[str, bytes]:
    """Returns the four files of a model, ready for `RunDirectory.publish`."""
    files = settings_files(model.config, tokenizer, train or {}, data or {}, generation)
    return {**files, MODEL_FILE: weights_file(dict(model.named_parameters()))}


def load_language_model(path: str | os.PathLike[str]) -> LoadedModel:
    """Loads the model of a run or of a checkpoint; raises what `load_stored_model` does."""
    stored = load_stored_model(path)
    model = build_model(as_floats(stored.weights), stored.model_config).eval()
    matrices = {n: w for n, w in stored.weights.items() if isinstance(w, QuantizedMatrix)}
    return LoadedModel(**{**vars(stored), "weights": {}}, model=model, matrices=matrices)


def build_model(weights: Mapping[str, NDArray[np.float32]], config: ModelConfig) -> LanguageModel:
    """Returns a model with copies of these weights, by the names of its parameters."""
    from fastlstm.text.model import LanguageModel

    with torch.random.fork_rng(devices=[]):  # loading must not move the caller's random numbers
        model = LanguageModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weights[name].copy()))
    return model
