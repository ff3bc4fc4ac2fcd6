"""A layer stack as arrays and JSON, to hand it from one process to another, and for files."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from fastlstm.sequence.layer_stack import CellWeights, Layer, LayerStack

Arrays = dict[str, NDArray[Any]]
_KINDS = {kind.__name__: kind for kind in get_args(Layer)}


def pack(stack: LayerStack) -> tuple[Arrays, dict[str, Any]]:
    """Returns the arrays of a stack, and all else as what JSON holds."""
    arrays: Arrays = {}
    layers = [
        {"kind": type(layer).__name__, **_packed(layer, str(k), arrays)}
        for k, layer in enumerate(stack.layers)
    ]
    return arrays, {**vars(replace(stack, layers=())), "layers": layers, "notes": [*stack.notes]}


def unpack(arrays: Arrays, about: dict[str, Any]) -> LayerStack:
    """Returns the stack that `pack` took apart; raises KeyError or TypeError for anything else."""
    layers = []
    for k, item in enumerate(about["layers"]):
        kind = _KINDS[item["kind"]]
        layers.append(kind(**_unpacked(kind, item, str(k), arrays)))
    return LayerStack(**{**about, "layers": tuple(layers), "notes": tuple(about["notes"])})


def _packed(part: Any, prefix: str, arrays: Arrays) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, value in vars(part).items():
        if isinstance(value, np.ndarray):
            arrays[f"{prefix}.{name}"] = np.ascontiguousarray(value, np.float32)
        elif isinstance(value, CellWeights):
            _packed(value, f"{prefix}.{name}", arrays)
        else:
            plain[name] = value
    return plain


def _unpacked(kind: Any, item: dict[str, Any], prefix: str, arrays: Arrays) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in (field.name for field in fields(kind)):
        path = f"{prefix}.{name}"
        if path in arrays:
            found[name] = arrays[path]
        elif f"{path}.weight_ih" in arrays:
            names = [field.name for field in fields(CellWeights)]
            found[name] = CellWeights(**{n: arrays[f"{path}.{n}"] for n in names})
        elif name in item:
            found[name] = item[name]
    return found
