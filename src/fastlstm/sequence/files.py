"""A trained sequence model as files: JSON and safetensors, nothing that can execute."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.errors import DataError, FormatError, RunDirectoryError, Setting, kind_of_value
from fastlstm.runs.find_run import require_run
from fastlstm.runs.manifest import MANIFEST
from fastlstm.runs.run_directory import SEQUENCE, TRAINER_FILE, RunDirectory
from fastlstm.runs.stored_values import checked_values, json_object, restored_network
from fastlstm.runs.tensors import decode_tensors, encode_tensors
from fastlstm.sequence.answers import Answers, Labels, Numbers
from fastlstm.sequence.config import SequenceConfig
from fastlstm.sequence.model import NetworkConfig, SequenceNetwork
from fastlstm.system.fields import built
from fastlstm.system.storage import encode_json

CONFIG_FILE = "config.json"
MODEL_FILE = "model.safetensors"
_FORMAT = 1
_SHARED = ("hidden_size", "num_layers", "embed_size", "bidirectional", "pooling", "dropout")
_STORABLE = (str, int, float, bool)


@dataclass(frozen=True)
class StoredSequenceModel:
    """What is stored of a sequence model.

    Attributes:
        config: the options, every choice made.
        given: the same as the user gave them.
        network: trained.
        mean: of every column, float64.
        std: its deviation.
        answers: what the network's outputs mean.
        key: of the sequences and answers it was trained on.
    """

    config: SequenceConfig
    given: SequenceConfig
    network: SequenceNetwork
    mean: Tensor
    std: Tensor
    answers: Answers
    key: str


def description_files(stored: StoredSequenceModel) -> dict[str, bytes]:
    """Returns config.json.

    Raises:
        DataError: a label that JSON cannot hold.
    """
    config = {
        "format": _FORMAT,
        "kind": SEQUENCE,
        "train": dataclasses.asdict(stored.config),
        "given": dataclasses.asdict(stored.given),
        "network": dataclasses.asdict(stored.network.config),
        "scale": {"mean": stored.mean.tolist(), "std": stored.std.tolist()},
        "answers": _plain_answers(stored.answers),
        "data": {"key": stored.key},
    }
    return {CONFIG_FILE: encode_json(config)}


def sequence_files(stored: StoredSequenceModel) -> dict[str, bytes]:
    """Returns config.json and model.safetensors."""
    return {**description_files(stored), MODEL_FILE: encode_tensors(stored.network.state_dict())}


def _plain_answers(answers: Answers) -> dict[str, Any]:
    if isinstance(answers, Numbers):
        mean, std = answers.mean.tolist(), answers.std.tolist()
        return {"kind": answers.kind, "mean": mean, "std": std, "is_flat": answers.is_flat}
    classes = [c.item() if isinstance(c, np.generic) else c for c in answers.classes.tolist()]
    for label in classes:
        is_finite = not isinstance(label, float) or np.isfinite(label)
        if type(label) not in _STORABLE or not is_finite or answers.classes.dtype.kind == "M":
            raise DataError(
                f"the label {label!r:.80} ({kind_of_value(label)}) cannot be stored: give labels"
                " that are texts, finite numbers, True or False"
            )
    dtype = answers.classes.dtype
    text = np.array(classes).dtype.str if dtype.kind == "U" else dtype.str
    return {"kind": answers.kind, "classes": classes, "dtype": text}


def read_options(data: bytes, origin: Path) -> tuple[SequenceConfig, SequenceConfig, str]:
    """Returns the options of config.json, as resolved and as given, and the key of the data.

    Raises:
        CorruptFileError: they make no sense; `origin` is named.
        FormatError: it is of something else, or of a newer format.
    """
    config = _config(data, origin)
    with checked_values(origin):
        begun, given = (
            built(SequenceConfig, config[name], f"'{name}'") for name in ("train", "given")
        )
        key = config["data"]["key"]
        if not isinstance(key, str):
            raise TypeError(f"data.key is {key!r:.80}, expected a text")
    return begun, given, key


def _config(data: bytes, origin: Path) -> dict[str, Any]:
    config = json_object(data, origin)
    if config.get("kind") != SEQUENCE or config.get("format") != _FORMAT:
        raise FormatError(
            f"{origin} is not of a sequence model of format {_FORMAT}: a text model is opened by"
            " LM.load, a forecaster by Forecaster.load, another format by the fastlstm that wrote"
            " it"
        )
    return config


def read_sequence_model(path: str | Path) -> StoredSequenceModel:
    """Reads the sequence model published in a run directory, each file checked by its SHA-256.

    Raises:
        CorruptFileError: a file is damaged, or makes no sense; it is named.
        FormatError: it holds something else, or is of a newer format.
        NonFiniteError: a weight is NaN or Inf.
        RunDirectoryError: nothing is published there.
    """
    require_run(path, "sequence")
    run, directory = RunDirectory(path), Path(path)
    if not run.has_published():
        raise RunDirectoryError(
            f"{path} has no model yet: training ended before its first evaluation; continue it with"
            " ",
            Setting("resume", True),
        )
    manifest, files = run.read_published((CONFIG_FILE, MODEL_FILE))
    if TRAINER_FILE in manifest.files:
        raise FormatError(
            f"{path} is a checkpoint, which only ",
            Setting("resume", True),
            f" continues from; give its run, {directory.absolute().parent}",
        )
    for name in (CONFIG_FILE, MODEL_FILE):
        if name not in files:
            raise FormatError(f"{directory / MANIFEST}: lists no {name}: this is no sequence model")
    origin = directory / CONFIG_FILE
    config = _config(files[CONFIG_FILE], origin)
    begun, given, key = read_options(files[CONFIG_FILE], origin)
    with checked_values(origin):
        sizes = NetworkConfig(**config["network"])
        for name in _SHARED:
            if getattr(begun, name) != getattr(sizes, name):
                raise ValueError(f"{name} of 'train' and of 'network' differ")
        scale = config["scale"]
        mean = torch.from_numpy(_numbers(scale["mean"], sizes.num_columns, "mean"))
        std = torch.from_numpy(_numbers(scale["std"], sizes.num_columns, "std", 1e-300))
        answers = _answers(config["answers"], sizes.num_outputs)
    tensors = decode_tensors(files[MODEL_FILE], directory / MODEL_FILE)
    network = restored_network(
        lambda: SequenceNetwork(sizes), tensors, directory / MODEL_FILE, origin, sizes.num_layers
    )
    return StoredSequenceModel(begun, given, network, mean, std, answers, key)


def _answers(values: dict[str, Any], num: int) -> Answers:
    """Returns what config.json says of answers; raises ValueError where it makes no sense."""
    if values["kind"] == Numbers.kind:
        if not isinstance(values["is_flat"], bool) or (values["is_flat"] and num != 1):
            raise ValueError(f"is_flat is {values['is_flat']!r:.80} of {num} outputs")
        mean, std = _numbers(values["mean"], num, "mean"), _numbers(values["std"], num, "std", 0.0)
        return Numbers(mean, std, values["is_flat"])
    if values["kind"] != Labels.kind:
        raise ValueError(f"the kind of answers is {values['kind']!r:.80}")
    classes, dtype = values["classes"], np.dtype(values["dtype"])
    if (
        not isinstance(classes, list)
        or len(classes) != num
        or any(type(label) not in _STORABLE for label in classes)
    ):
        raise ValueError(f"its classes are not {num} texts or numbers")
    if len(set(classes)) != num or dtype.kind not in "biufUO":
        raise ValueError("its classes are not all different, or of no type of labels")
    if dtype.kind == "U" and dtype != np.array(classes).dtype:  # no longer than the labels are
        raise ValueError(f"its classes are no {dtype}")
    found = np.array(classes, dtype=dtype)
    if found.tolist() != classes:
        raise ValueError(f"its classes are no {dtype}")
    return Labels(found)


def _numbers(values: Any, num: int, name: str, least: float = -np.inf) -> NDArray[np.float64]:
    found = np.asarray(values)
    is_good = found.shape == (num,) and found.dtype.kind in "iuf" and np.isfinite(found).all()
    if not is_good or (found < least).any():
        raise ValueError(f"{name} is expected to be {num} finite numbers from {least:g} on")
    return found.astype(np.float64)
