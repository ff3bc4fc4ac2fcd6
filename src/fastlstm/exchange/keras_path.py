"""The described layers of a Keras model in order: those of a Sequential, the path of a graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastlstm.errors import FormatError
from fastlstm.exchange.keras_layers import class_of, name_of

MODELS = ("Sequential", "Functional", "Model")
"""Classes of models, which hold layers."""
MAX_LAYERS = 1000
_MAX_NESTED = 16


def layers_of(config: Mapping[str, Any], depth: int = 0) -> list[dict[str, Any]]:
    """Returns the described layers of a model, from input to output; nested models are kept."""
    listed = listed_layers(config, depth)
    return listed if config["class_name"] == "Sequential" else _path_of(config["config"], listed)


def listed_layers(config: Mapping[str, Any], depth: int) -> list[dict[str, Any]]:
    """Returns the described layers of a model in the order of the file."""
    kind, inner = config.get("class_name"), config.get("config")
    if kind not in MODELS:
        class_of(config)  # refuses a class of the user's own by its name
        raise FormatError(
            f"the model is {kind!r:.60}; imported are Sequential and Functional models of one path"
        )
    listed: Any = inner.get("layers") if isinstance(inner, dict) else inner
    is_list = isinstance(listed, list) and (kind == "Sequential" or isinstance(inner, dict))
    if not is_list or not all(isinstance(part, dict) for part in listed):
        raise FormatError("the model's description lists no layers")
    if len(listed) > MAX_LAYERS or depth > _MAX_NESTED:
        raise FormatError(f"the model has {len(listed)} layers in one of its models")
    layers: list[dict[str, Any]] = listed
    return layers


def _path_of(config: Mapping[str, Any], listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the layers of a graph from its input to its output.

    Raises:
        FormatError: it is more than one path.
    """
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
        if _is_in_training(layer.get("inbound_nodes")):
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
                f"the layer '{name}' reads {reads}; imported are models of one path, in which"
                " every layer reads the output of the one before it, once"
            )
        name = before[0][0]
    unused = by_name.keys() - {str(layer.get("name") or name_of(layer)) for layer in path}
    if unused:
        raise FormatError(
            f"the layer '{min(unused)}' is not on the path from input to output; imported are"
            " models of one path"
        )
    return path[::-1]


def _ends(value: Any, key: str) -> str:
    """Returns the one layer in `input_layers` or `output_layers`."""
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, list) and len(value) == 3 and isinstance(value[0], str):
        return value[0]
    raise FormatError(
        f"the model has {key} {value!s:.80}; imported are models with one input and one output"
    )


def _sources(node: Any, depth: int = 0) -> Iterator[tuple[str, int]]:
    """Yields the layers that a node reads, each with the number of its output."""
    if depth > _MAX_NESTED:
        return
    if isinstance(node, dict):
        history = node.get("keras_history")
        if isinstance(history, list) and len(history) == 3:
            node = history
        else:
            for value in node.values():
                yield from _sources(value, depth + 1)
            return
    if isinstance(node, list):
        is_place = len(node) in (3, 4) and isinstance(node[0], str)
        if is_place and type(node[1]) is int and type(node[2]) is int:
            yield node[0], node[2]
            if len(node) == 4:
                yield from _sources(node[3], depth + 1)
            return
        for value in node:
            yield from _sources(value, depth + 1)


def _is_in_training(node: Any, depth: int = 0) -> bool:
    """Whether a layer is called with `training=True`, as its nodes say it."""
    if depth > _MAX_NESTED:
        return False
    if isinstance(node, dict):
        parts = list(node.values())
        if node.get("training") is True:
            return True
    else:
        parts = node if isinstance(node, list) else []
    return any(_is_in_training(part, depth + 1) for part in parts)
