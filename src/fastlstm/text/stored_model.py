"""Reads language models from disk: checked files, weights as numpy arrays; no torch.

A model is four files, in a run directory or in a checkpoint: config.json, model.safetensors,
tokenizer.json and generation_config.json. They are read once, checked against the manifest beside
them, and parsed from the same bytes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.errors import (
    ConfigError,
    CorruptFileError,
    DataError,
    FormatError,
    NonFiniteError,
    RunDirectoryError,
    counted,
)
from fastlstm.runs.find_run import require_run
from fastlstm.runs.manifest import MANIFEST, FileRecord, read_manifest
from fastlstm.runs.run_directory import TEXT_RUN, RunDirectory
from fastlstm.runs.weight_formats import QuantizedMatrix, checked_compression, decode_weights
from fastlstm.system.fields import built, check_values
from fastlstm.system.storage import parse_json
from fastlstm.text.config import MODEL_BOUNDS, ModelConfig, require_format

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from fastlstm.text.data.tokenizer import Tokenizer

CONFIG_FILE = "config.json"
MODEL_FILE = "model.safetensors"
AVERAGE_FILE = "average.safetensors"
TOKENIZER_FILE = "tokenizer.json"
GENERATION_FILE = "generation_config.json"
GENERATION_DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
_FILES = (CONFIG_FILE, MODEL_FILE, AVERAGE_FILE, TOKENIZER_FILE, GENERATION_FILE)


@dataclass(frozen=True)
class StoredModel:
    """A model read from disk, from the directory `path`.

    Weights are read-only float32 arrays by name; matrices of an int8 or int4 run are
    `QuantizedMatrix`. `note` tells the user about the choice of `path`, or is None.
    """

    weights: dict[str, NDArray[np.float32] | QuantizedMatrix]
    model_config: ModelConfig
    tokenizer: Tokenizer
    config: dict[str, Any]
    generation: dict[str, Any]
    path: Path
    note: str | None = None

    @property
    def weight_format(self) -> str:
        """Format of the stored weights, one of `FORMATS_IN_FILES`."""
        return format_of(self.config)


def load_stored_model(path: str | os.PathLike[str]) -> StoredModel:
    """Loads the model of a run or of a checkpoint.

    If a run has published no model yet, the model of its newest intact, finite checkpoint is
    loaded, and `note` says so. If a checkpoint has averaged weights, these are loaded.
    CorruptFileError names the damaged file and an intact checkpoint to use instead.
    """
    require_run(path, "text")
    directory = Path(path)
    try:
        chosen, files, finite = _read_files(directory)
        if finite:
            note = f"{directory} was not evaluated yet; using {chosen.name}"
            if chosen.name == "checkpoint-0":
                note += ", which is untrained: expect noise, or continue the run with --resume"
            return _assemble(chosen, files, None if chosen == directory else note)
    except CorruptFileError as error:
        run, absolute = RunDirectory(directory), directory.absolute()
        parent = RunDirectory(absolute.parent)
        if not run.checkpoints() and absolute in parent.checkpoints():
            raise parent.with_offer(error, besides=absolute) from None
        raise run.with_offer(error) from None
    raise NonFiniteError(f"{chosen}: its weights are NaN or Inf; use an earlier checkpoint")


def _read_files(directory: Path) -> tuple[Path, dict[str, bytes], bool]:
    """Returns the directory that holds the model, its files and whether they are finite."""
    run = RunDirectory(directory)
    if run.has_published():
        manifest, files = run.read_published(_FILES)
        if MODEL_FILE in files:
            return directory, files, manifest.finite
    elif run.model_path.exists():
        raise CorruptFileError(f"{run.manifest_path}: is missing")
    chosen = run.intact_checkpoint()
    if chosen is None:
        if run.checkpoints():
            raise CorruptFileError(f"{run.checkpoints()[0]}: is damaged or not finite")
        raise RunDirectoryError(f"{directory}: holds no model and no checkpoint; name another run")
    _, files = RunDirectory(chosen).read_published(_FILES)
    return chosen, files, True


def _assemble(directory: Path, files: dict[str, bytes], note: str | None) -> StoredModel:
    from fastlstm.text.data.tokenizer import load_tokenizer

    for name in (CONFIG_FILE, MODEL_FILE, TOKENIZER_FILE):
        if name not in files:
            raise FormatError(f"{directory / MANIFEST}: lists no {name}: this holds no model")
    config, model = parse_config(files[CONFIG_FILE], directory / CONFIG_FILE)
    tokenizer_path = directory / TOKENIZER_FILE
    try:
        tokenizer = load_tokenizer(files[TOKENIZER_FILE], str(tokenizer_path))
    except DataError as error:
        raise CorruptFileError(f"{tokenizer_path}: {error}") from None
    if tokenizer.fingerprint != config["tokenizer_sha256"]:
        raise FormatError(
            f"{tokenizer_path}: is the tokenizer {tokenizer.fingerprint[:12]} of another model,"
            f" {CONFIG_FILE} expects {config['tokenizer_sha256'][:12]}; put the right file back"
        )
    if tokenizer.vocab_size != model.vocab_size:
        raise FormatError(
            f"{tokenizer_path}: has {counted(tokenizer.vocab_size, 'token')}, {CONFIG_FILE} says"
            f" {model.vocab_size}; put the right file back"
        )
    name, shapes = AVERAGE_FILE if AVERAGE_FILE in files else MODEL_FILE, parameter_shapes(model)
    weights = decode_weights(files[name], shapes, format_of(config), directory / name)
    data = files.get(GENERATION_FILE)
    generation = parse_json(data, directory / GENERATION_FILE) if data is not None else {}
    if not isinstance(generation, dict):
        raise FormatError(f"{directory / GENERATION_FILE}: is not a JSON object")
    return StoredModel(weights, model, tokenizer, config, generation, directory, note)


def weights_record(directory: Path) -> FileRecord:
    """Returns size and SHA-256 of the weights file in a directory, `StoredModel.path`."""
    records = read_manifest(directory).files
    return records.get(AVERAGE_FILE, records[MODEL_FILE])


def format_of(config: Mapping[str, Any]) -> str:
    """Returns the format of the weights of the run with this config.json."""
    return str(config.get("compression", {}).get("weights", "fp32"))


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of every parameter of a `LanguageModel`, without torch."""
    E, H, V = config.embed_size, config.rnn_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (V, E)}
    for k in range(config.num_layers):
        shapes[f"layers.{k}.weight_ih_l0"] = (4 * H, H if k else E)
        shapes[f"layers.{k}.weight_hh_l0"] = (4 * H, H)
        shapes[f"layers.{k}.bias_ih_l0"] = shapes[f"layers.{k}.bias_hh_l0"] = (4 * H,)
        for name, (length, _) in config.parameters.items():
            shapes[f"layers.{k}.{name}_l0"] = (length * H,)
        if config.output_norm:
            shapes[f"norms.{k}.weight"] = shapes[f"norms.{k}.bias"] = (H,)
    if config.output_rank:
        shapes["projection.weight"] = (config.output_rank, H)
    if not config.tie_weights:
        shapes["output.weight"] = (V, config.output_width)
    shapes["output.bias"] = (V,)
    return shapes


def parse_config(data: bytes, origin: Path) -> tuple[dict[str, Any], ModelConfig]:
    """Returns config.json and the architecture in it; FormatError for another format."""
    config = parse_json(data, origin)
    if not isinstance(config, dict) or config.get("format") != TEXT_RUN:
        raise FormatError(f"{origin}: is not the config.json of a fastlstm run")
    model, digest = config.get("model"), config.get("tokenizer_sha256")
    try:
        require_format(config)
        if not isinstance(model, dict) or not isinstance(digest, str):
            raise FormatError("lacks 'model' or 'tokenizer_sha256'")
        if "compression" in config:
            checked_compression(config["compression"])
        sizes = built(ModelConfig, model, "model")
        check_values(sizes, MODEL_BOUNDS)
    except (ConfigError, FormatError) as error:  # also a ValueError
        raise FormatError(f"{origin}: {error!s:.200}") from None
    except ValueError as error:
        raise FormatError(f"{origin}: {error}; put the right file back") from None
    except TypeError as error:
        raise FormatError(f"{origin}: 'model' is incomplete ({error})") from None
    return config, sizes
