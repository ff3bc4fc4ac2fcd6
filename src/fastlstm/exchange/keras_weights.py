"""The arrays of a Keras model's layers, as `.h5` files and `.keras` archives store them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import FormatError
from fastlstm.exchange.keras_layers import Arrays, name_of
from fastlstm.exchange.keras_path import MODELS, layers_of, listed_layers
from fastlstm.exchange.model_file import Hdf5

_ROOTS = ("layers", "_layer_checkpoint_dependencies")
"""Group of the layers in model.weights.h5: of Keras 3 and late Keras 2, of Keras 2.12."""


class Hdf5Weights:
    """Weights of `.h5` files: per layer a list of names, of a nested model all in one list."""

    def __init__(self, file: Hdf5) -> None:
        self._file = file
        self._used: set[str] = set()
        self._root = "model_weights" if "model_weights" in file.attributes else ""

    def of_layers(self, config: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], Arrays]]:
        for layer in layers_of(config):
            arrays = self._arrays(str(layer.get("name") or name_of(layer)))
            if len(set(_trainable(layer))) > 1:  # Keras lists what is frozen last
                raise FormatError(
                    f"a part of the layer '{name_of(layer)}' is frozen, which changes the order of"
                    " its weights in an .h5 file; save the model as .keras"
                )
            yield from self._flat(layer, arrays, 0)
            if arrays:
                raise FormatError(f"the layer '{name_of(layer)}' has weights too many")

    def is_shared(self, settings: Mapping[str, Any]) -> bool:
        return True  # counted above, once a nested model is through

    def _flat(
        self, layer: dict[str, Any], arrays: Arrays, depth: int
    ) -> Iterator[tuple[dict[str, Any], Arrays]]:
        if layer.get("class_name") not in MODELS:
            yield layer, arrays
            return
        for inner in layers_of(layer, depth):
            yield from self._flat(inner, arrays, depth + 1)

    def _arrays(self, layer: str) -> Arrays:
        group = f"{self._root}/{layer}".lstrip("/")
        found = []
        for name in _text_list(self._file.attributes.get(group, {}), "weight_names"):
            path = f"{group}/{name}".lstrip("/")
            if path not in self._file.arrays:
                raise FormatError(f"the file lacks the array '{path:.120}', which it lists")
            if path in self._used:
                raise FormatError(f"the array '{path:.120}' belongs to two layers")
            self._used.add(path)
            found.append(self._file.arrays[path])
        return found


def _trainable(described: Any) -> Iterator[bool]:
    """Yields whether a layer, and each one within it, is trained; models have no say."""
    if isinstance(described, dict):
        config = described.get("config")
        is_layer = described.get("class_name") not in (None, *MODELS)  # its layers say it
        if is_layer and isinstance(config, dict) and "trainable" in config:
            yield bool(config["trainable"])
        for part in described.values():
            yield from _trainable(part)
    elif isinstance(described, list):
        for part in described:
            yield from _trainable(part)


def _text_list(attributes: Mapping[str, Any], name: str) -> list[str]:
    """Returns a list of texts, which Keras cuts into several attributes where it is long."""
    if name in attributes:
        parts = [attributes[name]]
    else:
        numbered = (f"{name}{k}" for k in range(len(attributes)))
        parts = [attributes[key] for key in numbered if key in attributes]
    return [str(text) for part in parts if isinstance(part, list) for text in part]


class ArchiveWeights:
    """Weights of `.keras` files: by the place of a layer among those of its class."""

    def __init__(self, file: Hdf5) -> None:
        self._arrays: dict[str, list[tuple[str, NDArray[np.float32]]]] = {}
        for path, array in file.arrays.items():
            folders = path.split("/")
            for depth in range(1, len(folders)):
                group = "/".join(folders[:depth])
                self._arrays.setdefault(group, []).append((path, array))
        self._groups = file.attributes.keys()

    def of_layers(
        self, config: Mapping[str, Any], prefix: str = "", depth: int = 0
    ) -> Iterator[tuple[dict[str, Any], Arrays]]:
        root = next((f"{prefix}{name}" for name in _ROOTS if f"{prefix}{name}" in self._groups), "")
        groups = dict(self._groups_of(listed_layers(config, depth), root))
        for layer in layers_of(config, depth):
            group = groups[id(layer)]
            if layer.get("class_name") in MODELS:
                yield from self.of_layers(layer, f"{group}/", depth + 1)
            else:
                yield layer, self._below(group)

    def is_shared(self, settings: Mapping[str, Any]) -> bool:
        return False

    def _groups_of(self, listed: list[dict[str, Any]], root: str) -> Iterator[tuple[int, str]]:
        """Yields the group of every layer: layers of one class are numbered, names do not count."""
        counts: dict[str, int] = {}
        for layer in listed:
            name = _snake_case(str(layer.get("class_name")))
            k = counts[name] = counts.get(name, -1) + 1
            yield id(layer), f"{root}/{name}_{k}" if k else f"{root}/{name}"

    def _below(self, group: str) -> Arrays:
        """Returns the arrays of a layer in Keras' order: both ways of a Bidirectional in turn."""
        found = []
        for path, array in self._arrays.get(group, ()):
            *folders, number = path[len(group) + 1 :].split("/")
            if not number.isdecimal() or len(number) > 6:
                raise FormatError(f"the file has an array '{path:.120}', which no layer has")
            is_second = "backward_layer" in folders
            found.append(((is_second, int(number)), array))
        return [array for _, array in sorted(found, key=lambda pair: pair[0])]


def _snake_case(name: str) -> str:
    """Returns the name of a class as Keras turns it into that of a layer."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()
