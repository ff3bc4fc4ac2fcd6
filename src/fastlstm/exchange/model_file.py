"""Opens model files of other frameworks: finds their format, reads arrays and descriptions."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from fastlstm.errors import (
    CorruptFileError,
    FormatError,
    MissingExtraError,
    StorageError,
    nearest_hint,
)
from fastlstm.sequence.layer_stack import LayerStack
from fastlstm.system.storage import MAX_JSON_BYTES, parse_json, read_bytes
from fastlstm.system.tensors import decode_tensors

Arrays = dict[str, NDArray[np.float32]]
_TIMEOUT_S = 300
_PICKLE_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_HDF5_MAGIC, _ZIP_MAGIC = b"\x89HDF\r\n\x1a\n", b"PK\x03\x04"
_MAX_RATIO = 4
"""Largest ratio of unpacked to packed bytes: weights hardly compress."""


Hdf5 = tuple[Arrays, dict[str, dict[str, Any]]]
"""Arrays by path, and attributes by path of their group."""
FileKind = Literal["keras", "hdf5", "torch", "safetensors", "onnx"]


def read_model_file(path: str | os.PathLike[str]) -> bytes:
    """Returns the bytes of a file."""
    file = Path(path)
    if not file.exists():
        there = [entry.name for entry in file.parent.iterdir()] if file.parent.is_dir() else []
        raise FormatError(f"{path}: no such file{nearest_hint(file.name, there)}")
    try:
        return read_bytes(file)
    except (OSError, StorageError, CorruptFileError) as error:
        raise FormatError(f"{path} cannot be read ({_first_line(error)})") from None


def kind_of_file(data: bytes, path: Path) -> FileKind:
    """Returns the format of a file by its content."""
    if not data:
        raise FormatError(f"{path} is empty: copy it again")
    if data.startswith(_HDF5_MAGIC):
        return "hdf5"
    if data.startswith(_ZIP_MAGIC):
        return "keras" if "config.json" in _names(data, path) else "torch"
    if path.suffix.lower() == ".onnx":
        return "onnx"
    if len(data) > 8 and data[8:9] == b"{":
        return "safetensors"
    if data.startswith(_PICKLE_MAGIC):  # torch.save before 1.6
        return "torch"
    if data[4:8] == b"TFL3":
        raise FormatError(
            f"{path} is a LiteRT model (.tflite), whose layers are compiled: import the Keras model"
            " that it was converted from"
        )
    if data[:1] == b"\x08":  # the first field of ONNX's message, its version
        return "onnx"
    raise FormatError(
        f"{path} is no model that can be imported: expected .keras, .h5, .onnx, .safetensors"
        " or a state_dict saved by torch.save (.pt)"
    )


def read_keras_archive(data: bytes, path: Path) -> tuple[dict[str, Any], dict[str, Any], Hdf5]:
    """Returns config, metadata and weights of a `.keras` file."""
    config, metadata = (
        json_of(_part(data, name, MAX_JSON_BYTES, path), name, path)
        for name in ("config.json", "metadata.json")
    )
    weights = _part(data, "model.weights.h5", _MAX_RATIO * len(data) + (1 << 20), path)
    return config, metadata, read_hdf5(weights, path)


def read_hdf5(data: bytes, path: Path) -> Hdf5:
    """Reads an HDF5 file."""
    if find_spec("h5py") is None:
        raise MissingExtraError(
            f"{path} holds HDF5, which h5py reads: pip install 'fastlstm[keras]'"
        )
    arrays, about = _converted("hdf5", data, path)
    return arrays, about["attributes"]


def read_torch(data: bytes, path: Path) -> Arrays:
    """Reads the tensors of a `.pt` file in order; unpickles nothing else."""
    arrays, about = _converted("torch", data, path)
    return {name: arrays[name] for name in about["names"]}


def read_onnx(data: bytes, path: Path) -> LayerStack:
    """Reads an ONNX file and the arrays beside it."""
    if find_spec("onnx") is None or find_spec("onnxruntime") is None:
        raise MissingExtraError(
            f"{path} is read by onnx and onnxruntime: pip install 'fastlstm[onnx]'"
        )
    from fastlstm.exchange.onnx_model import proved

    found = _converted("onnx", data, path)
    try:
        return proved(*found)
    except FormatError as error:
        raise FormatError(f"{path}: ", *error.args) from None


def read_safetensors(data: bytes, path: Path) -> Arrays:
    """Reads the floating-point tensors of a safetensors file."""
    try:
        tensors = decode_tensors(data, path)
    except CorruptFileError as error:
        raise FormatError(*error.args) from None
    return {n: t.float().numpy() for n, t in tensors.items() if t.is_floating_point()}


def json_of(data: str | bytes, name: str, path: Path) -> dict[str, Any]:
    """Parses a JSON object inside a file; raises FormatError."""
    raw = data.encode("utf-8", "replace") if isinstance(data, str) else data
    try:
        # Keras writes a user's Infinity and NaN; they are not read.
        value = parse_json(raw, path)
    except CorruptFileError as error:
        raise FormatError(f"{path}: {name} is no JSON ({_first_line(error)})") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path}: {name} is no JSON object")
    return value


def _names(data: bytes, path: Path) -> list[str]:
    """Returns the names in an archive; raises FormatError for a path out of the archive."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        raise FormatError(
            f"{path} is an incomplete or damaged archive, copy it again ({_first_line(error)})"
        ) from None
    for name in names:
        parts = name.replace("\\", "/").split("/")
        if parts[0] in ("", "~") or ".." in parts or parts[0].endswith(":"):
            raise FormatError(f"{path}: an archive with the name {name!r:.80} is not read")
    return names


def _part(data: bytes, name: str, limit: int, path: Path) -> bytes:
    """Unpacks one file of an archive, of at most `limit` bytes."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if archive.getinfo(name).file_size > limit:
                raise FormatError(f"{path}: {name} claims more bytes than such an archive holds")
            with archive.open(name) as part:
                found = part.read(limit + 1)
    except KeyError:
        raise FormatError(f"{path}: lacks {name}") from None
    except FormatError:
        raise
    except Exception as error:  # zipfile raises zlib.error, EOFError, RuntimeError and more
        raise FormatError(f"{path}: {name} is damaged ({_first_line(error)})") from None
    if len(found) > limit:
        raise FormatError(f"{path}: {name} claims more bytes than such an archive holds")
    return found


def _converted(kind: str, data: bytes, path: Path) -> tuple[Arrays, dict[str, Any]]:
    """Reads a file in another process, `converter`."""
    command = [sys.executable, "-P", "-m", "fastlstm.exchange.converter", kind, str(len(data))]
    command.append(str(path.absolute().parent))
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise FormatError(f"{path} is damaged: reading it takes too long") from None
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = (
            said[-1] if done.returncode == 2 and said else "its reader crashed, or took too long"
        )
        raise FormatError(f"{path} cannot be read: {reason}")
    header = json.loads(done.stdout[8 : 8 + int.from_bytes(done.stdout[:8], "little")])
    return safetensors.numpy.load(done.stdout), json.loads(header["__metadata__"]["about"])


def _first_line(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text.splitlines()[0][:200]
