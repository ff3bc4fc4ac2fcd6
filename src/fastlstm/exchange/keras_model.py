"""Keras models as layer stacks: `.keras` archives, `.h5` files of Keras 1, 2 and 3."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import FormatError, counted
from fastlstm.exchange.keras_layers import (
    IN_KERAS,
    Arrays,
    KerasLayer,
    class_of,
    name_of,
    output_shape,
    read_layer,
)
from fastlstm.exchange.model_file import json_of, read_hdf5, read_keras_archive
from fastlstm.sequence.layer_stack import Layer, LayerStack

_MODELS = ("Sequential", "Functional", "Model")
_MAX_LAYERS = 1000
_MAX_NESTED, _MAX_DEPTH = 16, 100
_ROOTS = ("layers", "_layer_checkpoint_dependencies")
"""Group of the layers in model.weights.h5: for Keras 3 and late Keras 2, then for Keras 2.12."""


def read_archive(data: bytes, path: Path) -> LayerStack:
    """Returns the layers of a `.keras` file."""
    config, metadata, weights = read_keras_archive(data, path)
    version = str(metadata.get("keras_version", "3"))
    return _stack_of(_layers_of_archive(config, *weights), version, path)


def read_hdf5_model(data: bytes, path: Path) -> LayerStack:
    """Returns the layers of an `.h5` file."""
    file = read_hdf5(data, path)
    root = file[1].get("", {})
    described = root.get("model_config")
    if not isinstance(described, str):
        raise FormatError(
            f"{path} holds weights without a model: save the model itself with model.save"
        )
    config = json_of(described, "its model_config", path)
    version = str(root.get("keras_version") or "1")  # Keras 1 did not write it
    return _stack_of(_layers_of_hdf5(config, *file), version, path)


def _stack_of(
    described: Iterator[tuple[dict[str, Any], Arrays]], version: str, path: Path
) -> LayerStack:
    """Returns the layers that come with settings and arrays, in order."""
    number = re.match(r"\d{1,3}", version)
    major = int(number[0]) if number else 3
    layers: list[Layer] = []
    notes: list[str] = []
    window, time_major, shape = None, set(), None
    for count, (settings, arrays) in enumerate(described):
        if count == _MAX_LAYERS:
            raise FormatError(f"{path}: the model has more than {_MAX_LAYERS} layers")
        own = settings.get("config")
        own = own if isinstance(own, dict) else {}
        kind = class_of(settings)
        layer = KerasLayer(kind, name_of(settings), own, major, arrays, notes)
        if not layers and window is None:
            window = _window(own)
        if kind in ("Reshape", "Squeeze"):
            shape = output_shape(layer, layers)
            continue
        added = read_layer(layer)
        if added and shape is not None:
            raise FormatError(
                f"the layer '{layer.name}' is behind a Reshape or Squeeze, which is possible at the"
                " end only"
            )
        layers += added
        if kind in ("LSTM", "Bidirectional"):
            time_major.add(_is_time_major(own))
    if not layers:
        raise FormatError(f"{path} holds a model without layers")
    if len(time_major) > 1:
        raise FormatError(f"{path}: some layers have time_major, others do not")
    is_time_major = True in time_major
    return LayerStack(
        tuple(layers), f"Keras {version:.20}", None if is_time_major else window,
        is_time_major, tuple(notes), shape,
    )  # fmt: skip


def _is_time_major(config: Mapping[str, Any]) -> bool:
    inner = config.get("layer")
    if isinstance(inner, dict) and isinstance(inner.get("config"), dict):
        config = inner["config"]
    return bool(config.get("time_major", False))


def _window(config: Mapping[str, Any]) -> int | None:
    """Returns the number of input steps in the first layer's settings."""
    steps = config.get("input_length")
    for name in ("batch_shape", "batch_input_shape"):
        shape = config.get(name)
        if isinstance(shape, list) and len(shape) > 1:
            steps = shape[1]
    return steps if type(steps) is int and steps > 0 else None


def layers_of(config: Mapping[str, Any], depth: int = 0) -> list[dict[str, Any]]:
    """Returns the described layers of a model from input to output, nested models as one."""
    listed = listed_layers(config, depth)
    return listed if config["class_name"] == "Sequential" else _path_of(config["config"], listed)


def listed_layers(config: Mapping[str, Any], depth: int) -> list[dict[str, Any]]:
    """Returns the described layers of a model in file order."""
    kind, inner = config.get("class_name"), config.get("config")
    if kind not in _MODELS:
        class_of(config)  # refuses a user's class by name
        raise FormatError(
            f"the model is {kind!r:.60}; expected a Sequential or Functional model of one path"
        )
    listed: Any = inner.get("layers") if isinstance(inner, dict) else inner
    is_list = isinstance(listed, list) and (kind == "Sequential" or isinstance(inner, dict))
    if not is_list or not all(isinstance(part, dict) for part in listed):
        raise FormatError("the model's description lists no layers")
    if len(listed) > _MAX_LAYERS or depth > _MAX_NESTED:
        raise FormatError(f"the model has {len(listed)} layers in one of its models")
    layers: list[dict[str, Any]] = listed
    return layers


def _path_of(config: Mapping[str, Any], listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_name = {str(layer.get("name") or name_of(layer)): layer for layer in listed}
    start, end = (_ends(config.get(key), key) for key in ("input_layers", "output_layers"))
    path: list[dict[str, Any]] = []
    name = end
    while len(path) <= len(listed):
        if name not in by_name:
            raise FormatError(
                f"the layer '{name}' is an input of the model, but not among its layers"
            )
        layer = by_name[name]
        nodes = _objects(layer.get("inbound_nodes"))
        if any(node.get("training") is True for node in nodes):
            raise FormatError(
                f"the layer '{name}' is called with training=True: it drops at random in every"
                " prediction, which cannot be imported; save the model without it"
            )
        path.append(layer)
        before = list(_sources(layer.get("inbound_nodes")))
        if not before and name == start:
            break
        if len(before) != 1 or before[0][1] != 0:
            reads = ", ".join(sorted({source for source, _ in before})) or "nothing"
            raise FormatError(
                f"the layer '{name}' reads {reads}; layers in one path are imported, in which each"
                f" reads the output of the layer before it, once; {IN_KERAS}"
            )
        name = before[0][0]
    unused = by_name.keys() - {str(layer.get("name") or name_of(layer)) for layer in path}
    if unused:
        raise FormatError(
            f"the layer '{min(unused)}' is not on the path from input to output; layers in one"
            f" path are imported; {IN_KERAS}"
        )
    return path[::-1]


def _ends(value: Any, key: str) -> str:
    while isinstance(value, list | dict) and len(value) == 1:
        value = next(iter(value.values() if isinstance(value, dict) else value))
    if isinstance(value, list) and len(value) == 3 and isinstance(value[0], str):
        return value[0]
    what = key.removesuffix("_layers")
    count = counted(len(value), what) if isinstance(value, list | dict) else f"no known {what}"
    raise FormatError(
        f"the model has {count}, expected one: layers in one path are imported, an encoder with a"
        f" decoder is not; {IN_KERAS}"
    )


def _sources(node: Any, depth: int = 0) -> Iterator[tuple[str, int]]:
    """Yields the layers that a node reads, each with an output number."""
    if depth > _MAX_NESTED:
        return
    if isinstance(node, dict):
        history = node.get("keras_history")
        is_known = isinstance(history, list) and len(history) == 3
        node = history if is_known else [None, *node.values()]  # skipped below
    if isinstance(node, list):
        is_place = len(node) in (3, 4) and isinstance(node[0], str)
        if is_place and type(node[1]) is int and type(node[2]) is int:
            yield node[0], node[2]
            node = node[3:]
        for value in node:
            yield from _sources(value, depth + 1)


def _objects(value: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list) and depth < _MAX_DEPTH:
        for part in value:
            yield from _objects(part, depth + 1)


def _layers_of_hdf5(
    config: Mapping[str, Any], stored: Mapping[str, Any], attributes: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], Arrays]]:
    """Yields layers with the arrays that an `.h5` file lists by name, one list per nested model."""
    root, used = "model_weights" if "model_weights" in attributes else "", set[str]()
    for layer in layers_of(config):
        group, arrays = f"{root}/{layer.get('name') or name_of(layer)}".lstrip("/"), Arrays()
        for name in _text_list(attributes.get(group, {}), "weight_names"):
            path = f"{group}/{name}".lstrip("/")
            if path not in stored:
                raise FormatError(f"the file lacks the array '{path:.120}', which it lists")
            if path in used:
                raise FormatError(f"the array '{path:.120}' belongs to two layers")
            used.add(path)
            arrays.append(stored[path])
        if len(set(_trainable(layer))) > 1:  # Keras lists frozen weights last
            raise FormatError(
                f"a part of the layer '{name_of(layer)}' is frozen, which changes the order of"
                " its weights in an .h5 file; save the model as .keras"
            )
        for inner in _flat(layer):
            yield inner, arrays
        if arrays:
            raise FormatError(f"the layer '{name_of(layer)}' has too many weights")


def _flat(layer: dict[str, Any], depth: int = 0) -> Iterator[dict[str, Any]]:
    if layer.get("class_name") not in _MODELS:
        yield layer
        return
    for inner in layers_of(layer, depth):
        yield from _flat(inner, depth + 1)


def _trainable(described: Any) -> Iterator[bool]:
    """Yields `trainable` of a layer and of each layer inside it; models are skipped."""
    for part in _objects(described):
        config = part.get("config")
        is_layer = part.get("class_name") not in (None, *_MODELS)  # its layers have the setting
        if is_layer and isinstance(config, dict) and "trainable" in config:
            yield bool(config["trainable"])


def _text_list(attributes: Mapping[str, Any], name: str) -> list[str]:
    """Returns a list of texts; Keras splits a long one into several attributes."""
    if name in attributes:
        parts = [attributes[name]]
    else:
        numbered = (f"{name}{k}" for k in range(len(attributes)))
        parts = [attributes[key] for key in numbered if key in attributes]
    return [str(text) for part in parts if isinstance(part, list) for text in part]


def _layers_of_archive(
    config: Mapping[str, Any], stored: Mapping[str, Any], attributes: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], Arrays]]:
    """Yields layers with the arrays of a `.keras` file.

    The group of a layer has its number among the layers of its class, whatever their names.
    """
    below: dict[str, list[tuple[str, NDArray[np.float32]]]] = {}
    for path, array in stored.items():
        folders = path.split("/")
        for depth in range(1, len(folders)):
            below.setdefault("/".join(folders[:depth]), []).append((path, array))

    def layers(
        config: Mapping[str, Any], prefix: str, depth: int
    ) -> Iterator[tuple[dict[str, Any], Arrays]]:
        root = next((f"{prefix}{name}" for name in _ROOTS if f"{prefix}{name}" in attributes), "")
        numbers, groups = Counter[str](), dict[int, str]()
        for layer in listed_layers(config, depth):
            name = _snake_case(str(layer.get("class_name")))
            groups[id(layer)] = f"{root}/{name}" + (f"_{numbers[name]}" if numbers[name] else "")
            numbers[name] += 1
        for layer in layers_of(config, depth):
            group = groups[id(layer)]
            if layer.get("class_name") in _MODELS:
                yield from layers(layer, f"{group}/", depth + 1)
            else:
                arrays = _in_order(group, below.get(group, ()))
                yield layer, arrays
                if arrays:
                    kind = layer["class_name"]
                    raise FormatError(f"the layer '{name_of(layer)}' ({kind}) has too many weights")

    yield from layers(config, "", 0)


def _in_order(group: str, stored: Sequence[tuple[str, NDArray[np.float32]]]) -> Arrays:
    """Returns the arrays of a layer in Keras' order, a Bidirectional's forward ones first."""
    found = []
    for path, array in stored:
        *folders, number = path[len(group) + 1 :].split("/")
        if not number.isdecimal() or len(number) > 6:
            raise FormatError(f"the file has an array '{path:.120}', which no layer has")
        found.append((("backward_layer" in folders, int(number)), array))
    return [array for _, array in sorted(found, key=lambda pair: pair[0])]


def _snake_case(name: str) -> str:
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()
