"""Keras files (.keras): written from a `LayerStack` without Keras, run by Keras itself."""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from fastlstm.errors import ConfigError, MissingExtraError
from fastlstm.sequence.layer_stack import (
    CellWeights,
    Dense,
    Dropout,
    Embedding,
    Function,
    Layer,
    LayerNorm,
    LayerStack,
    LSTMLayer,
)
from fastlstm.system.environment import default_keras_backend, quiet_tensorflow

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

KERAS_VERSION = "3.5.0"
"""The oldest that reads these files."""
_DATE = (1980, 1, 1, 0, 0, 0)
_DTYPE = {
    "module": "keras", "class_name": "DTypePolicy", "config": {"name": "float32"},
    "registered_name": None,
}  # fmt: skip


def write_keras(stack: LayerStack) -> bytes:
    """Returns a Sequential model of Keras 3; its input is `(batch, time)` or `(batch, time, C)`."""
    try:
        import h5py
    except ImportError:
        raise _missing("h5py") from None
    first = stack.layers[0]
    is_tokens = isinstance(first, Embedding)
    shape = [None, stack.window] if is_tokens else [None, stack.window, _num_columns(first)]
    layers = [_described("InputLayer", batch_shape=shape, name="input", dtype=_input_type(first))]
    numbers: Counter[str] = Counter()
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", track_order=False) as file:
        file.create_group("vars")
        for layer in stack.layers:
            kind, config, path, arrays = _layer(layer)
            layers.append(_described(kind, name=layer.name, dtype=_DTYPE, **config))
            place = f"{path}_{numbers[path]}" if numbers[path] else path
            numbers[path] += 1
            group = file.create_group(f"layers/{place}")
            for inner, values in arrays.items():
                own = group.require_group(inner)
                for number, array in enumerate(values):
                    own.create_dataset(str(number), data=np.ascontiguousarray(array))
    config = {"name": "fastlstm", "trainable": True, "dtype": _DTYPE, "layers": layers}
    model = {
        "module": "keras", "class_name": "Sequential", "config": config, "registered_name": None,
        "build_config": {"input_shape": shape},
    }  # fmt: skip
    return _zipped(
        {
            "metadata.json": json.dumps({"keras_version": KERAS_VERSION, "date_saved": ""}),
            "config.json": json.dumps(model),
            "model.weights.h5": buffer.getvalue(),
        }
    )


def _zipped(files: Mapping[str, str | bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, _DATE), data)
    return buffer.getvalue()


def _described(kind: str, **config: Any) -> dict[str, Any]:
    return {
        "module": "keras.layers",
        "class_name": kind,
        "config": config,
        "registered_name": None,
    }


def _num_columns(first: Layer) -> int:
    if isinstance(first, LSTMLayer):
        return first.input_size
    if isinstance(first, Dense):
        return int(first.weight.shape[1])
    raise _cannot(first)


def _input_type(first: Layer) -> str:
    return "int32" if isinstance(first, Embedding) else "float32"


Described = tuple[str, dict[str, Any], str, dict[str, list["NDArray[np.float32]"]]]
"""Class, options, place in the file of weights, and arrays by their place below that."""


def _layer(layer: Layer) -> Described:
    if isinstance(layer, Embedding):
        V, E = layer.weight.shape
        config = {"input_dim": V, "output_dim": E, "mask_zero": layer.masks_zero}
        return "Embedding", config, "embedding", {"vars": [layer.weight]}
    if isinstance(layer, LSTMLayer):
        return _lstm(layer)
    if isinstance(layer, Dense):
        arrays = [layer.weight.T, layer.bias]
        return "Dense", {"units": len(layer.bias)}, "dense", {"vars": arrays}
    if isinstance(layer, LayerNorm):
        config = {"axis": [-1], "epsilon": layer.epsilon}
        return "LayerNormalization", config, "layer_normalization", {
            "vars": [layer.weight, layer.bias]
        }  # fmt: skip
    if isinstance(layer, Function):
        return "Activation", {"activation": layer.function}, "activation", {}
    if isinstance(layer, Dropout) and not layer.is_spatial:
        return "Dropout", {"rate": layer.rate}, "dropout", {}
    raise _cannot(layer)


def _lstm(layer: LSTMLayer) -> Described:
    config = {
        "units": layer.hidden_size, "return_sequences": layer.every_step,
        "go_backwards": layer.reverses, "activation": layer.activation,
        "recurrent_activation": layer.recurrent_activation,
    }  # fmt: skip
    if layer.backward is None:
        return "LSTM", config, "lstm", {"cell/vars": _arrays(layer.forward)}
    ways = {}
    for way in ("forward", "backward"):
        own = {**config, "name": f"{way}_{layer.name}", "go_backwards": way == "backward"}
        ways[way] = _described("LSTM", dtype=_DTYPE, **own)
    both = {
        "layer": ways["forward"], "backward_layer": ways["backward"],
        "merge_mode": layer.merge,
    }  # fmt: skip
    return "Bidirectional", both, "bidirectional", {
        "forward_layer/cell/vars": _arrays(layer.forward),
        "backward_layer/cell/vars": _arrays(layer.backward),
    }  # fmt: skip


def _arrays(cell: CellWeights) -> list[NDArray[np.float32]]:
    """Returns kernel, recurrent kernel and bias; the gates of Keras are in torch's order."""
    return [cell.weight_ih.T, cell.weight_hh.T, cell.bias]


def _cannot(layer: Layer) -> ConfigError:
    return ConfigError(f"a Keras file of {type(layer).__name__} '{layer.name}' cannot be written")


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
