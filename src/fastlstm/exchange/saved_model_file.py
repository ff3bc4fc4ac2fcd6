"""TensorFlow's SavedModels as layer stacks, without TensorFlow.

Keras 2 writes what its layers are (`keras_metadata.pb`) beside the variables. What Keras 3's
`model.export` writes is read from its graph: `saved_model_graph.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import FormatError
from fastlstm.exchange.keras_layers import Arrays, name_of
from fastlstm.exchange.keras_model import stack_of
from fastlstm.exchange.keras_path import MODELS, layers_of
from fastlstm.exchange.model_file import json_of, read_model_file
from fastlstm.exchange.protobuf import DamagedMessage, messages, text
from fastlstm.exchange.saved_model_graph import read_graph
from fastlstm.exchange.tensor_bundle import INDEX, SavedObject, TensorBundle, child
from fastlstm.runs.run_directory import kind_of_run
from fastlstm.sequence.layer_stack import LayerStack

GRAPH, _METADATA, _VARIABLES = "saved_model.pb", "keras_metadata.pb", "variables"
SAVED_MODEL_FILES = (GRAPH, f"{_VARIABLES}/{INDEX}")
"""What every SavedModel has; the index holds checksums of the variables."""
_MAX_BYTES, _MAX_OBJECTS = 256 << 20, 100_000
_ARRAYS = ("embeddings", "kernel", "recurrent_kernel", "bias", "gamma", "beta")
"""Variables of a layer in Keras' order."""
_WRAPPED = (("forward_layer", "backward_layer"), ("cell",), ("layer",))


def read_saved_model(folder: Path) -> LayerStack:
    """Returns the layers of a SavedModel.

    Raises:
        FormatError: damaged, a layer that cannot be imported, or a graph that is not known; named.
    """
    variables = folder / _VARIABLES
    if kind_of_run(folder) is not None:
        raise FormatError(f"{folder} is a run already, which needs no import")
    if not (folder / GRAPH).exists():
        raise FormatError(
            f"{folder} is a directory without {GRAPH}; imported are SavedModels of TensorFlow, and"
            " files: .keras, .h5, .onnx, .safetensors, .pt"
        )
    if variables.is_symlink():
        raise FormatError(f"{variables} is a symbolic link, which is not read")
    try:
        bundle = TensorBundle(variables)
        objects = bundle.objects()
        if any("weight_ih_l0" in name for k in objects[0].children.values() if k < len(objects)
               for name in objects[k].children):  # fmt: skip
            raise FormatError(
                f"{folder} was exported by fastlstm; import is not needed: the run that it was made"
                " from is the model"
            )
        if (folder / _METADATA).exists():
            return _of_metadata(_read(folder / _METADATA), bundle, objects, folder)
        return read_graph(_read(folder / GRAPH), bundle, objects, folder)
    except DamagedMessage as error:
        raise FormatError(f"{folder} is damaged: {error}") from None


def _read(path: Path) -> memoryview:
    if path.stat().st_size > _MAX_BYTES:
        raise FormatError(f"{path} is too large: expected at most {_MAX_BYTES >> 20} MB")
    return memoryview(read_model_file(path))


def _of_metadata(
    data: memoryview, bundle: TensorBundle, objects: list[SavedObject], folder: Path
) -> LayerStack:
    """Returns the layers that `keras_metadata.pb` describes."""
    names: dict[str, str] = {}
    described: dict[str, Any] = {}
    for saved in messages(data, 1):
        path, content = text(saved, 3), text(saved, 5)
        if path == "root":
            described = _plain(json_of(content, _METADATA, folder))
        elif path.rpartition(".")[2].startswith("layer"):
            about = json_of(content, _METADATA, folder)
            names[f"{path.rpartition('.')[0]}/{about.get('name')}"] = path
        if len(names) > _MAX_OBJECTS:
            raise DamagedMessage("it has too many layers")
    if not described:
        raise DamagedMessage(f"{_METADATA} does not describe the model")
    version = str(described.get("keras_version") or "2")
    return stack_of(described, version, _SavedWeights(bundle, objects, names), folder)


def _plain(value: Any) -> Any:
    """Returns JSON with Keras' tuples as lists."""
    if isinstance(value, dict):
        if value.get("class_name") == "__tuple__":
            return _plain(value.get("items"))
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list) else value


class _SavedWeights:
    """The variables of described layers: by the paths of their objects from the model."""

    def __init__(
        self, bundle: TensorBundle, objects: list[SavedObject], names: Mapping[str, str]
    ) -> None:
        self._bundle, self._objects, self._names = bundle, objects, names

    def of_layers(
        self, config: Mapping[str, Any], at: str = "root", depth: int = 0
    ) -> Iterator[tuple[dict[str, Any], Arrays]]:
        for layer in layers_of(config, depth):
            path = self._names.get(f"{at}/{name_of(layer)}", "")
            if layer.get("class_name") in MODELS:
                yield from self.of_layers(layer, path, depth + 1)
            else:
                yield layer, list(self._arrays(self._object(path))) if path else []

    def is_shared(self, settings: Mapping[str, Any]) -> bool:
        return False

    def _object(self, path: str) -> int:
        at = 0
        for name in path.split(".")[1:]:
            at = child(self._objects, at, name)
            if at < 0:
                raise FormatError(f"the variables lack the object '{path:.120}'")
        return at

    def _arrays(self, at: int, depth: int = 0) -> Iterator[NDArray[np.float32]]:
        """Yields the arrays of a layer, or of those that it wraps, in Keras' order."""
        known = self._objects[at].children
        wrapped = next((names for names in _WRAPPED if names[0] in known), ())
        if wrapped and depth < len(_WRAPPED):
            for name in wrapped:
                if (inner := child(self._objects, at, name)) >= 0:
                    yield from self._arrays(inner, depth + 1)
            return
        for name in _ARRAYS:
            if (variable := child(self._objects, at, name)) >= 0:
                yield self._bundle.array(self._objects[variable].key)
