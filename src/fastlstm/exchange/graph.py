"""A model as a graph of a few operations, which every export target can hold.

A writer of a target (`onnx_writer.py`, `litert_writer.py`, …) turns each operation into the
target's own. Nothing is traced: the builders (`text_graph.py`, `forecast_graph.py`, …) state what
the network computes, and the written file is checked against the network itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fastlstm.runs.weight_formats import QuantizedMatrix, as_floats

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastlstm.ops.cell_options import CellOptions

CELL_EPSILON = 1e-5
"""Added to the variance in the cell's layer norm, as `ops.cell_call` does (which loads torch)."""
DType = Literal["float32", "int32", "bool"]
Size = int | str
"""Length of an axis: a number, or the name of one that callers choose, such as "B"."""


@dataclass(frozen=True)
class Value:
    """An input or a result of an operation."""

    name: str
    dtype: DType
    shape: tuple[Size, ...]


@dataclass(frozen=True)
class Node:
    """An operation.

    Attributes:
        kind: name of the method of `GraphBuilder` that made it.
        inputs: values; weights are named in `attributes`.
        outputs: values.
        attributes: numbers, names of weights, options.
    """

    kind: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attributes: dict[str, Any]


@dataclass
class Graph:
    """A model.

    Attributes:
        name: of the model.
        weights: arrays by name: float32, float16, or matrices in int8 with scales.
        inputs: in the order in which callers give them.
        outputs: results by name, in order.
        nodes: in the order in which they run.
        metadata: texts that the file carries along.
    """

    name: str
    weights: dict[str, NDArray[Any] | QuantizedMatrix] = field(default_factory=dict)
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)

    def float_arrays(self) -> dict[str, NDArray[Any]]:
        """Returns the weights in float32, whatever their format, and int32 constants."""
        return {
            name: w
            if isinstance(w, np.ndarray) and w.dtype == np.int32
            else as_floats({name: w})[name]
            for name, w in self.weights.items()
        }


class GraphBuilder:
    """Builds a `Graph`, operation by operation. Axes and shapes are numpy's; two values of an
    operation are broadcast as numpy does.

    Args:
        name: of the model.
        weights: that operations name; constants are added to them.
    """

    def __init__(self, name: str, weights: dict[str, NDArray[Any] | QuantizedMatrix]) -> None:
        self.graph = Graph(name, dict(weights))
        self._count = 0

    def input(self, name: str, shape: Sequence[Size], dtype: DType = "float32") -> Value:
        """Adds an input."""
        value = Value(name, dtype, tuple(shape))
        self.graph.inputs.append(value)
        return value

    def output(self, name: str, value: Value) -> None:
        """Makes a value a result, under this name."""
        self.graph.outputs.append(self._add("identity", (value,), value.shape, value.dtype, name))

    def constant(self, array: Any) -> Value:
        """Returns a constant float32 or int32 array."""
        array = np.asarray(array)
        dtype: DType = "int32" if array.dtype.kind in "iu" else "float32"
        name = f"constant_{len(self.graph.weights)}"
        self.graph.weights[name] = array.astype(dtype)
        return self._add("weight", (), array.shape, dtype, weight=name)

    def weight(self, name: str) -> Value:
        """Returns a weight as a value, float32."""
        return self._add("weight", (), self.graph.weights[name].shape, weight=name)

    def gather(self, table: str, indices: Value) -> Value:
        """Returns rows of a weight `(N, E)`: indices `(…)` int32 to `(…, E)`."""
        width = self.graph.weights[table].shape[1]
        return self._add("gather", (indices,), (*indices.shape, width), table=table)

    def linear(self, x: Value, weight: str, bias: str | None = None) -> Value:
        """Returns `x @ weight^T + bias`: `(…, I)` to `(…, O)`; the weight is `(O, I)`."""
        shape = (*x.shape[:-1], self.graph.weights[weight].shape[0])
        return self._add("linear", (x,), shape, weight=weight, bias=bias)

    def lstm(
        self,
        x: Value,
        h: Value,
        c: Value,
        directions: Sequence[tuple[str, str, tuple[str, ...]]],
        options: CellOptions,
        lengths: Value | None = None,
    ) -> tuple[Value, Value, Value]:
        """One layer of an LSTM.

        Args:
            x: `(T, B, I)`.
            h: first output `(D, B, H)`; D is 2 where it runs both ways, else 1.
            c: first cell, as `h`.
            directions: for each of D the names of `weight_ih` `(4H, I)`, `weight_hh` `(4H, H)` and
                the biases `(4H,)` to be summed; gates i, f, g, o.
            options: of the cell.
            lengths: steps of each sequence, `(B,)` int32; outputs after them are 0.

        Returns:
            Outputs `(T, B, D * H)`, and the last h and c, `(D, B, H)`.
        """
        H = self.graph.weights[directions[0][1]].shape[1]
        outputs = (
            self._new((*x.shape[:2], len(directions) * H)), self._new(h.shape), self._new(c.shape)
        )  # fmt: skip
        inputs = (x, h, c) if lengths is None else (x, h, c, lengths)
        attributes = {"directions": tuple(directions), "options": options, "hidden_size": H}
        self.graph.nodes.append(Node("lstm", inputs, outputs, attributes))
        return outputs

    def layer_norm(self, x: Value, weight: str, bias: str, eps: float) -> Value:
        """Normalises the last axis."""
        return self._add("layer_norm", (x,), x.shape, weight=weight, bias=bias, eps=eps)

    def binary(self, kind: str, a: Value, b: Value | float) -> Value:
        """Returns add, sub, mul, div, maximum, minimum; of `equal` and `less` bool."""
        right = b if isinstance(b, Value) else self.constant(self._number(a, b))
        shape = _broadcast(a.shape, right.shape)
        return self._add(kind, (a, right), shape, "bool" if kind in ("equal", "less") else a.dtype)

    def unary(self, kind: str, x: Value) -> Value:
        """Returns relu, sigmoid, tanh, exp, log, sqrt, softplus, …; `is_nan` and `not` are bool."""
        return self._add(kind, (x,), x.shape, "bool" if kind in ("is_nan", "not") else x.dtype)

    def cast(self, x: Value, dtype: DType) -> Value:
        """Returns `x` in another type; floats are cut to whole numbers."""
        return self._add("cast", (x,), x.shape, dtype, to=dtype)

    def where(self, condition: Value, a: Value, b: Value | float) -> Value:
        """Returns `a` where the condition is True, else `b`."""
        other = b if isinstance(b, Value) else self.constant(self._number(a, b))
        shape = _broadcast(_broadcast(condition.shape, a.shape), other.shape)
        return self._add("where", (condition, a, other), shape, a.dtype)

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        """Joins values along an axis of known lengths."""
        if len(values) == 1:
            return values[0]
        axis %= len(values[0].shape)
        shape = list(values[0].shape)
        shape[axis] = sum(_known(value.shape[axis]) for value in values)
        return self._add("concat", tuple(values), shape, values[0].dtype, axis=axis)

    def slice(self, x: Value, axis: int, start: int, stop: int) -> Value:
        """Returns `x[…, start:stop, …]` along an axis of known length."""
        axis %= len(x.shape)
        shape = list(x.shape)
        if (start, stop) == (0, shape[axis]):
            return x
        shape[axis] = stop - start
        return self._add("slice", (x,), shape, x.dtype, axis=axis, start=start, stop=stop)

    def last(self, x: Value, axis: int) -> Value:
        """Returns `x[…, -1:, …]` along an axis of any length."""
        axis %= len(x.shape)
        shape = [1 if k == axis else size for k, size in enumerate(x.shape)]
        return self._add("last", (x,), shape, x.dtype, axis=axis)

    def reshape(self, x: Value, shape: Sequence[Size]) -> Value:
        """Returns the same numbers in another shape; at most one axis of it is named, beside
        those that stay in their place."""
        return x if tuple(shape) == x.shape else self._add("reshape", (x,), shape, x.dtype)

    def transpose(self, x: Value, axes: Sequence[int]) -> Value:
        """Returns `x` with its axes in this order."""
        shape = [x.shape[axis] for axis in axes]
        return self._add("transpose", (x,), shape, x.dtype, axes=tuple(axes))

    def reduce(self, kind: Literal["sum", "mean", "max"], x: Value, axis: int) -> Value:
        """Returns the sum, mean or maximum along an axis, which stays with length 1."""
        axis %= len(x.shape)
        shape = [1 if k == axis else size for k, size in enumerate(x.shape)]
        return self._add(kind, (x,), shape, x.dtype, axis=axis)

    def sort(self, x: Value) -> Value:
        """Returns `x` with its last axis, of known length, in ascending order."""
        return self._add("sort", (x,), x.shape, x.dtype)

    def _add(
        self,
        kind: str,
        inputs: tuple[Value, ...],
        shape: Sequence[Size],
        dtype: DType = "float32",
        name: str | None = None,
        **attributes: Any,
    ) -> Value:
        value = self._new(shape, dtype, name)
        self.graph.nodes.append(Node(kind, inputs, (value,), attributes))
        return value

    def _new(
        self, shape: Sequence[Size], dtype: DType = "float32", name: str | None = None
    ) -> Value:
        self._count += 1
        return Value(name or f"value_{self._count}", dtype, tuple(shape))

    @staticmethod
    def _number(like: Value, number: float) -> NDArray[Any]:
        return np.asarray(number, like.dtype)


def interpret(
    graph: Graph, inputs: Mapping[str, Any], compute: Callable[..., Any]
) -> dict[str, Any]:
    """Returns the outputs by name, of `compute(node, *inputs)` node by node."""
    values = dict(inputs)
    for node in graph.nodes:
        results = compute(node, *(values[value.name] for value in node.inputs))
        results = results if isinstance(results, tuple) else (results,)
        values |= zip((value.name for value in node.outputs), results, strict=True)
    return {value.name: values[value.name] for value in graph.outputs}


def reshaped(node: Node, lengths: Any) -> list[Any]:
    """Returns the shape of a `reshape`: lengths that stay in their place are taken from those of
    the input, one more with a name is -1."""
    before, after = node.inputs[0].shape, node.outputs[0].shape
    return [
        size if isinstance(size, int) else lengths[k] if before[k : k + 1] == (size,) else -1
        for k, size in enumerate(after)
    ]


def _broadcast(a: tuple[Size, ...], b: tuple[Size, ...]) -> tuple[Size, ...]:
    rank = max(len(a), len(b))
    pairs = zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True)
    return tuple(y if x == 1 else x for x, y in pairs)


def _known(size: Size) -> int:
    assert isinstance(size, int), f"axis {size} has no known length"
    return size
