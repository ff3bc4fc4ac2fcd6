"""From a model file of any kind to its layers, and to a torch module."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fastlstm.errors import ConfigError, FormatError, Setting, kind_of_value
from fastlstm.exchange.keras_model import read_archive, read_hdf5_model
from fastlstm.exchange.model_file import (
    kind_of_file,
    read_hdf5,
    read_keras_archive,
    read_model_file,
    read_onnx,
    read_safetensors,
    read_torch,
)
from fastlstm.exchange.torch_state import read_state
from fastlstm.runs.run_directory import kind_of_run
from fastlstm.sequence.layer_stack import LayerStack

if TYPE_CHECKING:
    from fastlstm.sequence.stack_module import ImportedModel


def import_module(path: str | os.PathLike[str], *, activation: str | None = None) -> ImportedModel:
    """Returns a model of another framework as a torch module, in evaluation mode.

    Read are `.keras`, `.h5` of Keras 1, 2 and 3, `.onnx` with LSTM operators, and state_dicts of
    torch (`.safetensors`, `.pt`): docs/exchange.md. Neither Keras nor TensorFlow is needed.

    Args:
        path: the file.
        activation: of a state_dict with several linear layers, the function between them, such as
            "relu" or "linear".

    Returns:
        A module from `(B, T)` token ids or `(B, T, C)` values to `(B, T, K)` or `(B, K)`. A softmax
        at the end is left out: the outputs are logits.

    Raises:
        FormatError: a damaged file, a layer or setting that cannot be imported; it is named.
        ConfigError: no activation where one is needed, or one where none is.
        MissingExtraError: h5py (`fastlstm[keras]`) or onnx and onnxruntime (`fastlstm[onnx]`)
            are not installed.
    """
    stack = read_layer_stack(path, activation)

    from fastlstm.sequence.stack_module import ImportedModel

    return ImportedModel(stack)


def read_layer_stack(path: str | os.PathLike[str], activation: str | None = None) -> LayerStack:
    """Returns the layers of a model; raises what `import_module` does."""
    if not isinstance(path, str | os.PathLike):
        raise FormatError(f"the model is {kind_of_value(path)}, expected the path of a file")
    file = Path(path)
    data = b"" if file.is_dir() else read_model_file(file)
    with np.errstate(all="ignore"):  # NaN and Inf are refused below
        kind = "directory" if file.is_dir() else kind_of_file(data, file)
        if activation is not None and kind not in ("safetensors", "torch"):
            raise ConfigError(
                Setting("activation"), f" is for a state_dict of torch; {file} describes its layers"
            )
        match kind:
            case "directory":
                raise _directory(file)
            case "keras":
                stack = read_archive(read_keras_archive(data, file), file)
            case "hdf5":
                stack = read_hdf5_model(read_hdf5(data, file), file)
            case "safetensors":
                stack = read_state(read_safetensors(data, file), file, activation)
            case "torch":
                stack = read_state(read_torch(data, file), file, activation)
            case "onnx":
                stack = read_onnx(data, file)

    if not stack.logits.layers:
        raise FormatError(f"{file}: the model has no layer but a softmax")

    from fastlstm.sequence.stack_module import check_widths

    check_widths(stack)
    _check_finite(stack)
    return stack


def _directory(folder: Path) -> FormatError:
    if kind_of_run(folder) is not None:
        return FormatError(f"{folder} is a run already, which needs no import")
    if (folder / "saved_model.pb").exists():
        return FormatError(
            f"{folder} is a SavedModel of TensorFlow, which is not imported: save the Keras model"
            " itself, model.save('model.keras'), and import that file"
        )
    return FormatError(
        f"{folder} is a directory; imported are files: .keras, .h5, .onnx, .safetensors, .pt"
    )


def _check_finite(stack: LayerStack) -> None:
    for layer in stack.layers:
        cells = [getattr(layer, name, None) for name in ("forward", "backward")]
        for part in (layer, *filter(None, cells)):
            for name, value in vars(part).items():
                if isinstance(value, np.ndarray) and not np.isfinite(value).all():
                    raise FormatError(f"{name} of the layer '{layer.name}' is NaN or Inf")
