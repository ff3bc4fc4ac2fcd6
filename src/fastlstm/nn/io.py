"""Language models on disk: weights as safetensors, everything else as JSON; nothing executes.

A model is four files, in a run directory or in a checkpoint: config.json, model.safetensors,
tokenizer.json and generation_config.json. They are read once, checked against the manifest beside
them, and parsed from the bytes that were checked.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch

from fastlstm.config import ModelConfig, TrainConfig
from fastlstm.errors import (
    CorruptFileError,
    DataError,
    FormatError,
    NonFiniteError,
    RunDirectoryError,
    nearest_hint,
)
from fastlstm.manifest import MANIFEST
from fastlstm.run_directory import RunDirectory
from fastlstm.storage import encode_json, parse_json

if TYPE_CHECKING:
    from fastlstm.data.text import TextDataset
    from fastlstm.data.tokenizer import Tokenizer
    from fastlstm.nn.language_model import LanguageModel

CONFIG_FILE = "config.json"
MODEL_FILE = "model.safetensors"
AVERAGE_FILE = "average.safetensors"
TOKENIZER_FILE = "tokenizer.json"
GENERATION_FILE = "generation_config.json"
FORMAT = "fastlstm-run"
FORMAT_VERSION = 1
GENERATION_DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
_FILES = (CONFIG_FILE, MODEL_FILE, AVERAGE_FILE, TOKENIZER_FILE, GENERATION_FILE)
_SIZES = {"vocab_size": 2**24, "embed_size": 65_536, "rnn_size": 65_536, "num_layers": 64}


@dataclass(frozen=True)
class LoadedModel:
    """A model read from disk.

    Attributes:
        model: the weights, fp32 on the CPU, in evaluation mode.
        tokenizer: of the text it was trained on.
        config: config.json.
        generation: generation_config.json.
        path: the directory the files came from.
        note: what to tell the user about the choice of `path`, or None.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    config: dict[str, Any]
    generation: dict[str, Any]
    path: Path
    note: str | None = None


def encode_tensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Returns named tensors of any device and layout as one safetensors file."""
    # Cloned: the format knows no shared storage, and tied or sliced tensors share theirs.
    packed = {n: t.detach().to("cpu", copy=True).contiguous() for n, t in tensors.items()}
    return safetensors.torch.save(packed)


def decode_tensors(data: bytes, origin: Path) -> dict[str, torch.Tensor]:
    """Parses a safetensors file; what is allocated is bounded by the file's own size.

    Raises:
        CorruptFileError: names `origin` and what is wrong.
    """
    # AssertionError and KeyError: what the library raises for an odd shape or an unknown dtype.
    bad = (safetensors.SafetensorError, ValueError, TypeError, KeyError, AssertionError)
    try:
        return dict(safetensors.torch.load(data))
    except (*bad, RuntimeError, OverflowError) as error:
        raise CorruptFileError(f"{origin}: not a valid safetensors file ({error})") from None


def weights_file(model: torch.nn.Module) -> bytes:
    """Returns the content of model.safetensors: every parameter in fp32."""
    return encode_tensors({n: p.detach().float() for n, p in model.named_parameters()})


def model_files(
    model: ModelConfig,
    train: TrainConfig,
    text: TextDataset,
    generation: Mapping[str, Any] | None = None,
    *,
    given: TrainConfig | None = None,
) -> dict[str, bytes]:
    """Returns config.json, tokenizer.json and generation_config.json, without the weights.

    Args:
        model: the architecture.
        train: the resolved configuration.
        text: what it was trained on.
        generation: sampling defaults.
        given: the configuration as the user gave it; `train` where None.
    """
    data = {
        "source": text.source,
        "key": text.key,
        "num_bytes": text.num_bytes,
        "num_chars": text.num_chars,
    }
    begun = dataclasses.asdict(train)
    first = begun if given is None else dataclasses.asdict(given)
    return settings_files(model, text.tokenizer, begun, data, generation, first)


def settings_files(
    model: ModelConfig,
    tokenizer: Tokenizer,
    train: Mapping[str, Any],
    data: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
) -> dict[str, bytes]:
    """Returns the three JSON files of a model from plain values."""
    config = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model": dataclasses.asdict(model),
        "train": dict(train),
        "given": dict(train if given is None else given),
        "tokenizer_sha256": tokenizer.fingerprint,
        "data": dict(data),
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
    return {**files, MODEL_FILE: weights_file(model)}


def load_language_model(path: str | os.PathLike[str]) -> LoadedModel:
    """Loads the model of a run or of a checkpoint.

    A run that has published no model yet gives that of its newest intact, finite checkpoint, and
    `note` says so. A checkpoint gives its averaged weights when it has them.

    Raises:
        RunDirectoryError: nothing there that holds a model.
        CorruptFileError: names the damaged file and an intact checkpoint to use instead.
        FormatError: of a newer format, or files of different models.
        NonFiniteError: the weights are NaN or Inf.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise RunDirectoryError(
            f"{directory}: no such run; train one with: fastlstm train SOURCE --out {directory}"
        )
    try:
        chosen, files, finite = _read_files(directory)
        if finite:
            note = f"{directory} has no published model yet; using {chosen.name}"
            return _assemble(chosen, files, None if chosen == directory else note)
    except CorruptFileError as error:
        raise _with_offer(directory, error) from None
    raise NonFiniteError(
        f"{chosen}: its weights are NaN or Inf; use an earlier checkpoint of the run"
    )


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
        raise RunDirectoryError(
            f"{directory}: holds no model and no checkpoint;"
            f" train one with: fastlstm train SOURCE --out {directory}"
        )
    _, files = RunDirectory(chosen).read_published(_FILES)
    return chosen, files, True


def _with_offer(directory: Path, error: CorruptFileError) -> CorruptFileError:
    run = RunDirectory(directory)
    if run.checkpoints():
        return run.with_offer(error)
    absolute = directory.absolute()
    return RunDirectory(absolute.parent).with_offer(error, besides=absolute)


def _assemble(directory: Path, files: dict[str, bytes], note: str | None) -> LoadedModel:
    from fastlstm.data.tokenizer import load_tokenizer
    from fastlstm.nn.language_model import LanguageModel

    for name in (CONFIG_FILE, MODEL_FILE, TOKENIZER_FILE):
        if name not in files:
            raise FormatError(f"{directory / MANIFEST}: lists no {name}: this holds no model")
    config, model_config = parse_config(files[CONFIG_FILE], directory / CONFIG_FILE)
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
    if tokenizer.vocab_size != model_config.vocab_size:
        raise FormatError(
            f"{tokenizer_path}: has {tokenizer.vocab_size} tokens, {CONFIG_FILE} says"
            f" {model_config.vocab_size}; put the right file back"
        )
    name = AVERAGE_FILE if AVERAGE_FILE in files else MODEL_FILE
    tensors = decode_tensors(files[name], directory / name)
    check_shapes(tensors, model_config, directory / name)  # before memory is taken
    with torch.random.fork_rng(devices=[]):  # loading must not move the caller's random numbers
        model = LanguageModel(model_config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])
    data = files.get(GENERATION_FILE)
    generation = parse_json(data, directory / GENERATION_FILE) if data is not None else {}
    if not isinstance(generation, dict):
        raise FormatError(f"{directory / GENERATION_FILE}: is not a JSON object")
    return LoadedModel(model.eval(), tokenizer, config, generation, directory, note)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of every parameter of a `LanguageModel`, without building one.

    A model on torch's meta device would know them too, but its initialisation there loads 800
    modules (1 s).
    """
    E, H, V = config.embed_size, config.rnn_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (V, E)}
    for k in range(config.num_layers):
        shapes[f"layers.{k}.weight_ih_l0"] = (4 * H, H if k else E)
        shapes[f"layers.{k}.weight_hh_l0"] = (4 * H, H)
        shapes[f"layers.{k}.bias_ih_l0"] = shapes[f"layers.{k}.bias_hh_l0"] = (4 * H,)
        if config.layer_norm:
            shapes[f"norms.{k}.weight"] = shapes[f"norms.{k}.bias"] = (H,)
    if not config.tie_weights:
        shapes["output.weight"] = (V, H)
    shapes["output.bias"] = (V,)
    return shapes


def check_shapes(tensors: Mapping[str, torch.Tensor], config: ModelConfig, origin: Path) -> None:
    """Raises FormatError unless the tensors are exactly the parameters that `config` describes."""
    expected = parameter_shapes(config)
    for name in tensors:
        if name not in expected:
            raise FormatError(
                f"{origin}: has a tensor '{name}' the model lacks{nearest_hint(name, expected)};"
                f" {CONFIG_FILE} is of another model"
            )
    for name, shape in expected.items():
        if name not in tensors:
            raise FormatError(f"{origin}: lacks '{name}'; {CONFIG_FILE} is of another model")
        got = tensors[name]
        if tuple(got.shape) != shape or not got.is_floating_point():
            raise FormatError(
                f"{origin}: '{name}' is {tuple(got.shape)} {got.dtype}, {CONFIG_FILE} asks for"
                f" {shape} of floats; it is of another model"
            )


def parse_config(data: bytes, origin: Path) -> tuple[dict[str, Any], ModelConfig]:
    """Parses config.json.

    Returns:
        The whole of it, and the architecture in it.

    Raises:
        CorruptFileError: not strict JSON.
        FormatError: of a newer format, or not the config.json of a run.
    """
    config = parse_json(data, origin)
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise FormatError(f"{origin}: is not the config.json of a fastlstm run")
    version = config.get("format_version")
    if type(version) is not int or version > FORMAT_VERSION:
        raise FormatError(
            f"{origin}: has format version {version}, this fastlstm reads up to {FORMAT_VERSION};"
            " update it: pip install -U fastlstm"
        )
    model, digest = config.get("model"), config.get("tokenizer_sha256")
    if not isinstance(model, dict) or not isinstance(digest, str):
        raise FormatError(f"{origin}: lacks 'model' or 'tokenizer_sha256'")
    return config, _model_config(model, origin)


def _model_config(values: dict[str, Any], origin: Path) -> ModelConfig:
    fields = {field.name: field for field in dataclasses.fields(ModelConfig)}
    for name, value in values.items():
        if name not in fields:
            raise FormatError(
                f"{origin}: unknown key 'model.{name}'{nearest_hint(name, fields)};"
                " a newer fastlstm may have written it"
            )
        if name in _SIZES:
            good = type(value) is int and 1 <= value <= _SIZES[name]
            expected = f"a whole number from 1 to {_SIZES[name]}"
        elif name in ("dropout", "recurrent_dropout"):
            good = type(value) in (int, float) and 0 <= value < 1
            expected = "a number from 0 to below 1"
        elif name == "dropout_kind":
            good, expected = value in ("variational", "plain"), "variational or plain"
        else:
            good, expected = isinstance(value, bool), "true or false"
        if not good:
            raise FormatError(f"{origin}: model.{name} is {value!r:.60}, expected {expected}")
    try:
        config = ModelConfig(**values)
    except TypeError as error:
        raise FormatError(f"{origin}: 'model' is incomplete ({error})") from None
    if config.tie_weights and config.embed_size != config.rnn_size:
        raise FormatError(
            f"{origin}: model.tie_weights needs embed_size equal to rnn_size,"
            f" got {config.embed_size} and {config.rnn_size}"
        )
    return config
