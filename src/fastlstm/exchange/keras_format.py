"""Keras files (.keras): written from a `LayerStack` without Keras, run by Keras itself."""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import MissingExtraError
from fastlstm.sequence.layer_stack import (
    Dense,
    Embedding,
    Layer,
    LayerNorm,
    LayerStack,
    LSTMLayer,
)
from fastlstm.system.environment import default_keras_backend, quiet_tensorflow

KERAS_VERSION = "3.5.0"
"""The oldest that reads these files."""
_DATE = (1980, 1, 1, 0, 0, 0)
_DTYPE = {
    "module": "keras", "class_name": "DTypePolicy", "config": {"name": "float32"},
    "registered_name": None,
}  # fmt: skip


def write_keras(stack: LayerStack) -> bytes:
    """Returns a Sequential model of Keras 3 of a text model; its input is `(batch, time)`."""
    try:
        import h5py
    except ImportError:
        raise _missing("h5py") from None
    shape = [None, None]
    layers = [_described("InputLayer", batch_shape=shape, name="input", dtype="int32")]
    numbers: Counter[str] = Counter()
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", track_order=False) as file:
        file.create_group("vars")
        for layer in stack.layers:
            kind, config, path, arrays = _layer(layer)
            layers.append(_described(kind, name=layer.name, dtype=_DTYPE, **config))
            place = f"{path}_{numbers[path]}" if numbers[path] else path
            numbers[path] += 1
            inner = "cell/vars" if kind == "LSTM" else "vars"
            group = file.create_group(f"layers/{place}").require_group(inner)
            for number, array in enumerate(arrays):
                group.create_dataset(str(number), data=np.ascontiguousarray(array))
    config = {"name": "fastlstm", "trainable": True, "dtype": _DTYPE, "layers": layers}
    model = {
        "module": "keras", "class_name": "Sequential", "config": config, "registered_name": None,
        "build_config": {"input_shape": shape},
    }  # fmt: skip
    files: dict[str, str | bytes] = {
        "metadata.json": json.dumps({"keras_version": KERAS_VERSION, "date_saved": ""}),
        "config.json": json.dumps(model),
        "model.weights.h5": buffer.getvalue(),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, _DATE), data)
    return buffer.getvalue()


def _described(kind: str, **config: Any) -> dict[str, Any]:
    return {
        "module": "keras.layers", "class_name": kind, "config": config, "registered_name": None
    }  # fmt: skip


def _layer(layer: Layer) -> tuple[str, dict[str, Any], str, list[NDArray[np.float32]]]:
    """Returns class, options, place in the file of weights, and arrays; the gates of Keras are in
    torch's order."""
    match layer:
        case Embedding():
            V, E = layer.weight.shape
            return "Embedding", {"input_dim": V, "output_dim": E}, "embedding", [layer.weight]
        case LSTMLayer():
            cell = layer.forward
            options: dict[str, Any] = {
                "units": layer.hidden_size, "return_sequences": True,
                "activation": layer.activation,
                "recurrent_activation": layer.recurrent_activation,
            }  # fmt: skip
            return "LSTM", options, "lstm", [cell.weight_ih.T, cell.weight_hh.T, cell.bias]
        case Dense():
            return "Dense", {"units": len(layer.bias)}, "dense", [layer.weight.T, layer.bias]
        case LayerNorm():
            options = {"axis": [-1], "epsilon": layer.epsilon}
            arrays = [layer.weight, layer.bias]
            return "LayerNormalization", options, "layer_normalization", arrays
    raise AssertionError(f"no text model has {layer.name}")


def _missing(package: str) -> MissingExtraError:
    return MissingExtraError(f"--to keras needs {package}: pip install 'fastlstm[keras]'")


class KerasRunner:
    """A .keras file in Keras, by the backend that it is set to."""

    def __init__(self, path: Path) -> None:
        quiet_tensorflow()
        default_keras_backend("torch")
        try:
            import keras
        except ImportError:
            raise _missing("keras") from None
        self.version = f"keras {keras.__version__} on {keras.backend.backend()}"
        self._model = keras.saving.load_model(path, compile=False)
        self._to_numpy = keras.ops.convert_to_numpy

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Returns the logits `(T, B, V)` of tokens `(T, B)` from the zero state."""
        if any(inputs[name].any() for name in ("h", "c") if name in inputs):
            raise ValueError("a Keras file starts from the zero state")
        tokens = np.ascontiguousarray(inputs["tokens"].T)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Keras' own, of NumPy
            logits = self._to_numpy(self._model(tokens, training=False))
        return {"logits": logits.transpose(1, 0, 2)}
