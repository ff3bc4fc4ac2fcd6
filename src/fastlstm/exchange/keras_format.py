"""Keras files (.keras): writes a text model's `Graph` without Keras, and runs files in Keras."""

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

from fastlstm.errors import ConfigError
from fastlstm.exchange.graph import Graph, Node
from fastlstm.exchange.source import needed
from fastlstm.system.environment import default_keras_backend, quiet

KERAS_VERSION = "3.5.0"
"""The oldest version that reads these files."""
_ON_STATES = ("slice", "concat", "identity")
_DATE = (1980, 1, 1, 0, 0, 0)
_DTYPE = {
    "module": "keras", "class_name": "DTypePolicy", "config": {"name": "float32"},
    "registered_name": None,
}  # fmt: skip


def write_keras(graph: Graph) -> bytes:
    """Returns a text model's graph as a Sequential model of Keras 3.

    The input is `(batch, time)`; every call starts from the zero state."""
    h5py = needed("h5py", "keras")
    shape, weights = [None, None], graph.float_arrays()
    layers = [_described("InputLayer", batch_shape=shape, name="input", dtype="int32")]
    numbers: Counter[str] = Counter()
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", track_order=False) as file:
        file.create_group("vars")
        for node in graph.nodes:
            if node.kind in _ON_STATES:
                continue
            kind, path, config, arrays = _layer(node, weights)
            name = f"{path}_{numbers[path]}" if numbers[path] else path
            layers.append(_described(kind, name=name, dtype=_DTYPE, **config))
            numbers[path] += 1
            inner = "cell/vars" if kind == "LSTM" else "vars"
            group = file.create_group(f"layers/{name}").require_group(inner)
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


def _layer(
    node: Node, weights: Mapping[str, NDArray[np.float32]]
) -> tuple[str, str, dict[str, Any], list[NDArray[np.float32]]]:
    """Returns class, name in files, options, and arrays; Keras' gate order is torch's."""
    match node.kind, node.attributes:
        case "gather", {"table": table}:
            V, E = weights[table].shape
            return "Embedding", "embedding", {"input_dim": V, "output_dim": E}, [weights[table]]
        case "lstm", {"directions": [(w_ih, w_hh, biases)], "options": options, "hidden_size": H}:
            if options.layer_norm or options.zoneout != (0.0, 0.0):
                raise _no_layer("layer_norm" if options.layer_norm else "zoneout")
            config = {
                "units": H, "return_sequences": True, "activation": options.activation,
                "recurrent_activation": options.recurrent_activation,
            }  # fmt: skip
            bias = np.sum([weights[name] for name in biases], 0)
            return "LSTM", "lstm", config, [weights[w_ih].T, weights[w_hh].T, bias]
        case "linear", {"weight": weight, "bias": bias}:
            K = len(weights[weight])
            bias = weights[bias] if bias else np.zeros(K, np.float32)
            return "Dense", "dense", {"units": K}, [weights[weight].T, bias]
        case "layer_norm", {"weight": weight, "bias": bias, "eps": eps}:
            arrays = [weights[weight], weights[bias]]
            config = {"axis": [-1], "epsilon": eps}
            return "LayerNormalization", "layer_normalization", config, arrays
    raise _no_layer("residual")


def _no_layer(option: str) -> ConfigError:
    return ConfigError(f"Keras has no layer for `{option}`; export to another target")


class KerasRunner:
    """A .keras file in Keras, on its current backend."""

    def __init__(self, path: Path) -> None:
        quiet("tensorflow")
        default_keras_backend("torch")
        keras = needed("keras", "keras")
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
