"""What the nodes of an ONNX graph work on while its layers are read.

Around the layers, exporters write operations that only move numbers: Transpose, Reshape, Slice,
Split, and many that compute their sizes. They are not matched one by one. Instead, the graph is
computed for inputs of a few steps, with the *place* of every number in the output of the last layer
in place of the number: `Stream.at`. What was moved where can then be read from the places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.exchange.onnx_file import Operation
from fastlstm.sequence.layer_stack import Layer, LSTMLayer

Places = NDArray[np.int64]
_PART = 1 << 40


@dataclass(frozen=True, eq=False)
class Stream:
    """The output of the layers so far, in any arrangement.

    Attributes:
        layers: from the input on.
        at: place of each number in that output, an array `(N0, N1, width)` of the input's first two
            axes; where only the last step has an output, `(B, width)`.
        width: columns of the output of the last layer.
        sizes: N0 and N1.
        time_axis: which of these is time, once an LSTM has shown it.
        is_last: the last layer has an output for the last step only.
        is_tokens: integers that no layer has read.
        is_truncated: these were made of floats, as an embedding's tokens may be.
    """

    layers: tuple[Layer, ...]
    at: Places
    width: int
    sizes: tuple[int, int]
    time_axis: int | None = None
    is_last: bool = False
    is_tokens: bool = False
    is_truncated: bool = False

    def by_row(self) -> tuple[Places, Places] | None:
        """Returns the rows and the columns of steps along the last axis, else None.

        The rows are `(…)`, numbers of steps; the columns are the same of all of them.
        """
        if not self.at.ndim or not self.at.size:
            return None
        rows = self.at[..., 0] // self.width
        columns = self.at.reshape(-1, self.at.shape[-1])[0] % self.width
        same = (self.at == rows[..., None] * self.width + columns).all()
        return (rows, columns) if same else None

    def of_last_step(self) -> Stream:
        """Returns this, where it is what both ways of an LSTM wrote last, as that layer's output:
        the way from the end writes its last output at the first step."""
        last = self.layers[-1] if self.layers else None
        if not isinstance(last, LSTMLayer) or last.backward is None or last.merge != "concat":
            return self
        if self.time_axis is None or not last.every_step or self.sizes[self.time_axis] < 2:
            return self
        rows, columns = self.at // self.width, self.at % self.width
        places = np.divmod(rows, self.sizes[1])
        end = self.sizes[self.time_axis] - 1
        if (places[self.time_axis] != np.where(columns < last.hidden_size, end, 0)).any():
            return self
        layers = (*self.layers[:-1], replace(last, every_step=False))
        at = places[1 - self.time_axis] * self.width + columns
        return replace(self, layers=layers, at=at, is_last=True)

    def has_all_columns(self) -> bool:
        """Whether the last axis has every column of a step, in order."""
        found = self.by_row()
        return found is not None and np.array_equal(found[1], np.arange(self.width))

    def with_layer(self, layer: Layer, rows: Places, width: int) -> Stream:
        """Returns the output of one more layer, for these rows, columns last."""
        at = rows[..., None] * width + np.arange(width)
        layers = (*self.layers, layer)
        return replace(self, layers=layers, at=at, width=width, is_tokens=False, is_truncated=False)


@dataclass(frozen=True, eq=False)
class States:
    """The last outputs of several LSTMs, joined, as torch returns them.

    Attributes:
        parts: these outputs.
        at: places in them, of part k beginning at k * `_PART`.
    """

    parts: tuple[Stream, ...]
    at: Places

    @classmethod
    def joined(cls, parts: list[Stream], join: Callable[[list[Places]], Any]) -> States:
        """Returns outputs as an operator joins them."""
        places = join([part.at + k * _PART for k, part in enumerate(parts)])
        return cls(tuple(parts), np.asarray(places, np.int64))

    def moved(self, at: Any) -> States | Stream:
        """Returns these in another arrangement; a stream, if all are of one part."""
        places: Places = np.asarray(at, np.int64)
        first = int(places.flat[0] // _PART) if places.size else 0
        if (places // _PART != first).any():
            return replace(self, at=places)
        return replace(self.parts[first], at=places % _PART)


@dataclass(frozen=True)
class Aside:
    """A value beside the layers: a state, lengths; `name` is that of the input or the node.

    `is_written` is true for a state that an LSTM of the model writes.
    """

    name: str
    is_written: bool = False


@dataclass(frozen=True)
class Unread:
    """A value that cannot be read; `reason` says why."""

    reason: str


Value = Stream | States | Aside | Unread | NDArray[Any] | None

FOLDED = frozenset(
    (
        *("Constant", "ConstantOfShape", "Cast", "CastLike", "Identity", "Shape", "Size", "Gather"),
        *("Slice", "Concat", "Split", "Squeeze", "Unsqueeze", "Reshape", "Transpose", "Expand"),
        *("Tile", "Flatten", "Range", "Add", "Sub", "Mul", "Div", "Neg", "Min", "Max", "Equal"),
        *("Less", "Greater", "Where", "Not", "And", "Or", "DequantizeLinear", "MatMul"),
        *("ReduceProd", "Abs", "Sqrt", "Pow", "Floor", "Ceil", "Mod"),
    )
)  # fmt: skip
"""Operators that are computed where they depend on constants and sizes only."""
MOVES = frozenset(
    (
        *("Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Gather"),
        *("Split", "Expand", "ReverseSequence"),
    )
)
"""Operators that only move numbers of their first input."""

_INPUTS = {
    "Squeeze": ("axes",), "Unsqueeze": ("axes",), "Split": ("split",),
    "Slice": ("starts", "ends", "axes"),
}  # fmt: skip
"""Attributes before opset 13 (Slice 10) that are inputs since, in the order of these."""


def spread_columns(weight: NDArray[Any], columns: Places, width: int) -> NDArray[np.float32]:
    """Returns `(K, width)` of weights `(K, C)` on some columns of `width`."""
    if np.array_equal(columns, np.arange(width)):
        return np.asarray(weight, np.float32)
    spread = np.zeros((width, len(weight)), np.float32)
    np.add.at(spread, columns, np.asarray(weight, np.float32).T)
    return np.ascontiguousarray(spread.T)


def _with_inputs(operation: Operation, feeds: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns a node of opset 13 in place of an older one, and what it is given."""
    from onnx import helper

    attributes = dict(operation.attributes)
    names = list(operation.inputs)
    for name in _INPUTS[operation.kind]:
        if name in attributes:
            names.append(f"{operation.name}.{name}")
            feeds[names[-1]] = np.array(attributes.pop(name), np.int64)
    node = helper.make_node(operation.kind, names, list(operation.outputs), **attributes)
    return node, feeds


def computed(operation: Operation, inputs: list[Any], opset: int) -> list[Any]:
    """Returns the outputs of a node for arrays, by ONNX's reference implementation.

    Raises:
        ValueError: it cannot be computed; the text says why.
    """
    from onnx.reference import ReferenceEvaluator

    if operation.kind == "Identity":
        return [inputs[0]]
    try:
        node, feeds = operation.proto, dict(zip(operation.inputs, inputs, strict=True))
        feeds.pop("", None)
        if opset < 13 and operation.kind in _INPUTS:
            node, feeds = _with_inputs(operation, feeds)
            opset = 13
        outputs: Any = ReferenceEvaluator(node, opsets={"": opset}).run(None, feeds)
    except MemoryError:
        raise
    except Exception as error:  # whatever numpy says of inputs that do not fit
        reason = (str(error) or type(error).__name__).splitlines()[0][:100]
        raise ValueError(f"{operation.label} cannot be computed ({reason})") from None
    return [np.asarray(output) for output in outputs]
