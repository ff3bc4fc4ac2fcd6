"""Keras models as layer stacks: `.keras` archives, `.h5` files of Keras 1, 2 and 3."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from fastlstm.errors import FormatError
from fastlstm.exchange.keras_layers import (
    Arrays,
    KerasLayer,
    class_of,
    name_of,
    output_shape,
    read_layer,
)
from fastlstm.exchange.keras_path import MAX_LAYERS
from fastlstm.exchange.keras_weights import ArchiveWeights, Hdf5Weights
from fastlstm.exchange.model_file import Hdf5, KerasArchive, json_of
from fastlstm.sequence.layer_stack import Layer, LayerStack


class StoredWeights(Protocol):
    """The weights in a file, for the layers of a described model."""

    def of_layers(self, config: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], Arrays]]:
        """Yields the described layers from input to output, each with its arrays."""

    def is_shared(self, settings: Mapping[str, Any]) -> bool:
        """Whether arrays that a layer leaves belong to the next one."""


def read_archive(archive: KerasArchive, path: Path) -> LayerStack:
    """Returns the layers of a `.keras` file.

    Raises:
        FormatError: a layer that cannot be imported, or weights that are not those described.
    """
    version = str(archive.metadata.get("keras_version", "3"))
    return stack_of(archive.config, version, ArchiveWeights(archive.weights), path)


def read_hdf5_model(file: Hdf5, path: Path) -> LayerStack:
    """Returns the layers of an `.h5` file; raises what `read_archive` does."""
    root = file.attributes.get("", {})
    described = root.get("model_config")
    if not isinstance(described, str):
        raise FormatError(
            f"{path} holds weights without a model: save the model itself with model.save"
        )
    config = json_of(described, "its model_config", path)
    version = str(root.get("keras_version") or "1")  # the first ones did not write it
    return stack_of(config, version, Hdf5Weights(file), path)


def stack_of(
    config: Mapping[str, Any], version: str, weights: StoredWeights, path: Path
) -> LayerStack:
    """Returns the layers of a described model; raises what `read_archive` does."""
    number = re.match(r"\d{1,3}", version)
    major = int(number[0]) if number else 3
    layers: list[Layer] = []
    notes: list[str] = []
    window, time_major, shape = None, set(), None
    for count, (settings, arrays) in enumerate(weights.of_layers(config)):
        if count == MAX_LAYERS:
            raise FormatError(f"{path}: the model has more than {MAX_LAYERS} layers")
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
                f"the layer '{layer.name}' is behind a Reshape or Squeeze, which is imported at the"
                " end only"
            )
        layers += added
        if arrays and not weights.is_shared(settings):
            raise FormatError(f"the layer '{layer.name}' ({kind}) has weights too many")
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
    """Returns the steps that the first layer says its input has."""
    steps = config.get("input_length")
    for name in ("batch_shape", "batch_input_shape"):
        shape = config.get(name)
        if isinstance(shape, list) and len(shape) > 1:
            steps = shape[1]
    return steps if type(steps) is int and steps > 0 else None
