"""A trained sequence model as files: JSON and safetensors, nothing executable."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.errors import DataError, FormatError, kind_of_value
from fastlstm.runs.find_run import read_model
from fastlstm.runs.run_directory import SEQUENCE
from fastlstm.runs.stored_values import (
    checked_values,
    json_object,
    require_finite,
    require_same,
    restored_network,
    stored_options,
)
from fastlstm.sequence.answers import Answers, Labels, Numbers
from fastlstm.sequence.config import ARCHITECTURE, SequenceConfig
from fastlstm.sequence.model import NetworkConfig, SequenceNetwork
from fastlstm.sequence.stack_module import StackConfig, StackNetwork, restored_stack
from fastlstm.system.storage import encode_json
from fastlstm.system.tensors import decode_tensors, encode_tensors

if TYPE_CHECKING:
    from fastlstm.training.checkpoint import Checkpoint

CONFIG_FILE = "config.json"
MODEL_FILE = "model.safetensors"
_FORMAT = 1
_STORABLE = (str, int, float, bool)


@dataclass(frozen=True)
class StoredSequenceModel:
    """A trained sequence model with everything that its files contain.

    `config` are the options with every choice made, `given` as the user gave them; mean and
    deviation of the columns are float64, `key` is the hash of the training data.
    """

    config: SequenceConfig
    given: SequenceConfig
    network: SequenceNetwork | StackNetwork
    mean: Tensor
    std: Tensor
    answers: Answers
    key: str


def description_files(stored: StoredSequenceModel) -> dict[str, bytes]:
    """Returns config.json. Raises DataError: a label that JSON cannot represent."""
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
    network = stored.network
    if isinstance(network, StackNetwork):
        tensors = network.stored_tensors()
    else:
        tensors = network.state_dict()
    return {**description_files(stored), MODEL_FILE: encode_tensors(tensors)}


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
                " that are strings, finite numbers, True or False"
            )
    dtype = answers.classes.dtype
    text = np.array(classes).dtype.str if dtype.kind == "U" else dtype.str
    return {"kind": answers.kind, "classes": classes, "dtype": text}


def read_options(checkpoint: Checkpoint) -> tuple[SequenceConfig, SequenceConfig, str]:
    """Returns the options of a checkpoint, resolved and as given, and the key of the data.

    Raises:
        CorruptFileError: an invalid value; the message names the file.
        FormatError: the checkpoint is not of a sequence model, or of another format.
    """
    origin = checkpoint.path / CONFIG_FILE
    return stored_options(_config(checkpoint.files[CONFIG_FILE], origin), SequenceConfig, origin)


def _config(data: bytes, origin: Path) -> dict[str, Any]:
    config = json_object(data, origin)
    if config.get("kind") != SEQUENCE or config.get("format") != _FORMAT:
        raise FormatError(
            f"{origin} is not of a sequence model of format {_FORMAT}; open a text model by"
            " LM.load, a forecaster by Forecaster.load, another format by the fastlstm that wrote"
            " it"
        )
    return config


def read_sequence_model(path: str | Path) -> StoredSequenceModel:
    """Reads the published sequence model of a run directory; checks the SHA-256 of each file.

    Raises:
        CorruptFileError: a damaged file or an invalid value; the message names the file.
        FormatError: another kind of model, or another format.
        NonFiniteError: a weight is NaN or Inf.
        RunDirectoryError: nothing is published there.
    """
    files, path = read_model(path, "sequence", (CONFIG_FILE, MODEL_FILE)), Path(path)
    origin = path / CONFIG_FILE
    config = _config(files[CONFIG_FILE], origin)
    resolved, given, key = stored_options(config, SequenceConfig, origin)
    tensors = decode_tensors(files[MODEL_FILE], path / MODEL_FILE)
    network: SequenceNetwork | StackNetwork
    with checked_values(origin):
        described = config["network"]
        if "stack" in described:
            network = restored_stack(described, tensors)
            require_finite(tensors, path / MODEL_FILE)
            sizes: StackConfig | NetworkConfig = network.config
        else:
            sizes = NetworkConfig(**described)
            require_same(resolved, sizes, ARCHITECTURE)
        scale = config["scale"]
        mean = torch.from_numpy(_numbers(scale["mean"], sizes.num_columns, "mean"))
        std = torch.from_numpy(_numbers(scale["std"], sizes.num_columns, "std", 1e-300))
        answers = _answers(config["answers"], sizes.num_outputs)
    if isinstance(sizes, NetworkConfig):
        build = partial(SequenceNetwork, sizes)
        network = restored_network(build, tensors, path / MODEL_FILE, origin, sizes.num_layers)
    return StoredSequenceModel(resolved, given, network, mean, std, answers, key)


def _answers(values: dict[str, Any], num: int) -> Answers:
    """Returns the answers of config.json; raises ValueError if they are invalid."""
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
        raise ValueError(f"its classes are not {num} strings or numbers")
    if len(set(classes)) != num or dtype.kind not in "biufUO":
        raise ValueError("its classes are not distinct, or have an unsupported type")
    is_forged = dtype.kind == "U" and dtype != np.array(classes).dtype  # it would take memory
    if is_forged or (array := np.array(classes, dtype=dtype)).tolist() != classes:
        raise ValueError(f"its classes are no {dtype}")
    return Labels(array)


def _numbers(values: Any, num: int, name: str, low: float = -np.inf) -> NDArray[np.float64]:
    array = np.asarray(values)
    is_good = array.shape == (num,) and array.dtype.kind in "iuf" and np.isfinite(array).all()
    if not is_good or (array < low).any():
        raise ValueError(f"{name} is expected to be {num} finite numbers from {low:g} on")
    return array.astype(np.float64)
