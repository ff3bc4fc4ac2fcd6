"""A model as a graph of a few operations, which every export target can hold.

A source builds the graph (`text_source.py`) or records it from the network's code (`trace.py`). The
writer of a target (`onnx_format.py`, `litert_format.py`, …) turns each operation into its own, and
the written file is checked against the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastlstm.ops.cell_options import CellOptions
from fastlstm.runs.weight_formats import QuantizedMatrix, as_floats

CELL_EPSILON = 1e-5
"""Added to the variance in the cell's layer norm, as `ops.cell_call` does (which loads torch)."""
DType = Literal["float32", "int32", "bool"]
Size = int | str
"""Length of an axis: a number, or the name of a length that callers choose, such as "B"."""


@dataclass(frozen=True)
class Value:
    """An input or the result of an operation; + - * / add operations to the graph."""

    name: str
    dtype: DType
    shape: tuple[Size, ...]
    builder: ClassVar[GraphBuilder]  # set per value; no field, so that reports leave it out

    def __add__(self, other: Operand) -> Value:
        return self.builder.binary("add", self, other)

    def __sub__(self, other: Operand) -> Value:
        return self.builder.binary("sub", self, other)

    def __mul__(self, other: Operand) -> Value:
        return self.builder.binary("mul", self, other)

    def __truediv__(self, other: Operand) -> Value:
        return self.builder.binary("div", self, other)


Operand = Value | float | NDArray[Any]
Direction = tuple[str, str, tuple[str, ...]]
"""The names of `weight_ih` `(4H, I)`, `weight_hh` `(4H, H)` and the biases `(4H,)` of an LSTM."""


class Node(NamedTuple):
    """An operation: `kind` is its name, such as add or lstm; `attributes` are numbers, options and
    names of weights."""

    kind: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attributes: dict[str, Any]


@dataclass
class Graph:
    """A model: its operations in the order of execution.

    Weights are float32, float16, or matrices in int8 with scales; `metadata` are texts stored in
    the file.
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
    """Builds a `Graph`, operation by operation, with NumPy's axes, shapes and broadcasting.

    Operations refer to weights by name; a constant becomes a weight."""

    def __init__(self, name: str, weights: dict[str, NDArray[Any] | QuantizedMatrix]) -> None:
        self.graph = Graph(name, dict(weights))
        self.count = 0

    def input(self, name: str, shape: Sequence[Size], dtype: DType = "float32") -> Value:
        value = self.bound(Value(name, dtype, tuple(shape)))
        self.graph.inputs.append(value)
        return value

    def bound(self, value: Value) -> Value:
        """Returns the value with this builder, to which its arithmetic adds operations."""
        bound = replace(value)
        object.__setattr__(bound, "builder", self)
        return bound

    def output(self, name: str, value: Value) -> None:
        self.graph.outputs.append(self._add("identity", (value,), value.shape, value.dtype, name))

    def constant(self, array: Any) -> Value:
        array = np.asarray(array)
        dtype: DType = "int32" if array.dtype.kind in "iu" else "float32"
        name = f"constant_{self.count}"
        self.graph.weights[name] = array.astype(dtype)
        return self._add("weight", (), array.shape, dtype, weight=name)

    def weight(self, name: str) -> Value:
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
        directions: Sequence[Direction],
        options: CellOptions,
        lengths: Value | None = None,
    ) -> tuple[Value, Value, Value]:
        """Adds one LSTM layer on `x` `(T, B, I)` with initial h and c `(D, B, H)`; D directions.

        The biases of a direction are summed; gates i, f, g, o. A parameter of `options` is named as
        `weight_ih` is, with that part replaced: gamma_ih_l0. Outputs beyond `lengths` `(B,)` int32
        are 0. Returns outputs `(T, B, D * H)`, and the last h and c.
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
        return self._add("layer_norm", (x,), x.shape, weight=weight, bias=bias, eps=eps)

    def binary(self, kind: str, a: Value, b: Operand) -> Value:
        """Adds add, sub, mul, div, maximum, minimum, equal or less; the last two give bool."""
        right = b if isinstance(b, Value) else self.constant(np.asarray(b, a.dtype))
        shape = _broadcast(a.shape, right.shape)
        return self._add(kind, (a, right), shape, "bool" if kind in ("equal", "less") else a.dtype)

    def unary(self, kind: str, x: Value) -> Value:
        """Adds relu, sigmoid, tanh, exp, log, sqrt, softplus, …; `is_nan` and `not` give bool."""
        return self._add(kind, (x,), x.shape, "bool" if kind in ("is_nan", "not") else x.dtype)

    def cast(self, x: Value, dtype: DType) -> Value:
        """Converts `x` from another type; floats are truncated to integers."""
        return x if x.dtype == dtype else self._add("cast", (x,), x.shape, dtype, to=dtype)

    def where(self, condition: Value, a: Value, b: Operand) -> Value:
        other = b if isinstance(b, Value) else self.constant(np.asarray(b, a.dtype))
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
        return self._along("last", x, axis)

    def reshape(self, x: Value, shape: Sequence[Size]) -> Value:
        """Returns the same numbers in another shape; at most one named axis may move."""
        return x if tuple(shape) == x.shape else self._add("reshape", (x,), shape, x.dtype)

    def transpose(self, x: Value, axes: Sequence[int]) -> Value:
        shape = [x.shape[axis] for axis in axes]
        return self._add("transpose", (x,), shape, x.dtype, axes=tuple(axes))

    def reduce(self, kind: Literal["sum", "mean", "max"], x: Value, axis: int) -> Value:
        """Returns the sum, mean or maximum along an axis, which keeps length 1."""
        return self._along(kind, x, axis)

    def _along(self, kind: str, x: Value, axis: int) -> Value:
        axis %= len(x.shape)
        shape = [1 if k == axis else size for k, size in enumerate(x.shape)]
        return self._add(kind, (x,), shape, x.dtype, axis=axis)

    def split(self, x: Value, parts: int) -> tuple[Value, ...]:
        """Returns equal parts along the last axis, of known length; only LiteRT's writer has it."""
        shape = (*x.shape[:-1], _known(x.shape[-1]) // parts)
        outputs = tuple(self._new(shape, x.dtype) for _ in range(parts))
        self.graph.nodes.append(Node("split", (x,), outputs, {}))
        return outputs

    def sort(self, x: Value) -> Value:
        return self._add("sort", (x,), x.shape, x.dtype)

    def softmax(self, x: Value, axis: int = -1) -> Value:
        shares = self.unary("exp", self._below_largest(x, axis))
        return shares / self.reduce("sum", shares, axis)

    def log_softmax(self, x: Value, axis: int = -1) -> Value:
        below = self._below_largest(x, axis)
        return below - self.unary("log", self.reduce("sum", self.unary("exp", below), axis))

    def _below_largest(self, x: Value, axis: int) -> Value:
        return x - self.reduce("max", x, axis)

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
        self.count += 1
        return self.bound(Value(name or f"value_{self.count}", dtype, tuple(shape)))


def lstm_weights(
    prefix: str, layer: int, num_directions: int = 1, *, has_bias: bool = True
) -> list[Direction]:
    """Returns the names of a layer's weights for `GraphBuilder.lstm`."""
    names = []
    for suffix in ("", "_reverse")[:num_directions]:
        w_ih, w_hh, *biases = (
            f"{prefix}{name}_l{layer}{suffix}"
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        names.append((w_ih, w_hh, tuple(biases) if has_bias else ()))
    return names


def composed(graph: Graph, kinds: Mapping[str, Callable[..., Sequence[Value]]]) -> Graph:
    """Returns the graph with some `kinds` of operation replaced by what their functions add.

    A function gets a builder, the inputs and the attributes.
    """
    g = GraphBuilder(graph.name, graph.weights)
    g.graph.inputs, g.graph.outputs, g.graph.metadata = graph.inputs, graph.outputs, graph.metadata
    names = (v.name.removeprefix("value_") for node in graph.nodes for v in node.outputs)
    g.count = max((int(name) for name in names if name.isdigit()), default=0)
    made: dict[str, Value] = {}
    for node in graph.nodes:
        inputs = tuple(g.bound(made.get(value.name, value)) for value in node.inputs)
        if node.kind in kinds:
            results = kinds[node.kind](g, *inputs, **node.attributes)
            made |= zip((value.name for value in node.outputs), results, strict=True)
        else:
            g.graph.nodes.append(node._replace(inputs=inputs))
    return g.graph


def interpret(
    graph: Graph, inputs: Mapping[str, Any], compute: Callable[..., Any]
) -> dict[str, Any]:
    """Calls `compute(node, *inputs)` for each node; returns the outputs by name."""
    values = dict(inputs)
    for node in graph.nodes:
        results = compute(node, *(values[value.name] for value in node.inputs))
        results = results if isinstance(results, tuple) else (results,)
        values |= zip((value.name for value in node.outputs), results, strict=True)
    return {value.name: values[value.name] for value in graph.outputs}


def reshaped(node: Node, lengths: Any) -> list[Any]:
    """Returns the target of a `reshape`: a named axis that stays keeps its length, else -1."""
    before, after = node.inputs[0].shape, node.outputs[0].shape
    return [
        size if isinstance(size, int) else lengths[k] if before[k : k + 1] == (size,) else -1
        for k, size in enumerate(after)
    ]


_SELU, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805


def _hard_sigmoid(g: GraphBuilder, x: Value, slope: float) -> Value:
    return g.binary("minimum", g.binary("maximum", x * slope + 0.5, 0.0), 1.0)


def _softsign(g: GraphBuilder, x: Value) -> Value:
    return x / (g.binary("maximum", x, x * -1.0) + 1.0)


def _elu(g: GraphBuilder, x: Value, alpha: float = 1.0, scale: float = 1.0) -> Value:
    below = g.unary("exp", g.binary("minimum", x, 0.0)) - 1.0
    return (g.unary("relu", x) + below * alpha) * scale


_FUNCTIONS: dict[str, Callable[[GraphBuilder, Value], Value]] = {
    "linear": lambda g, x: x, "softsign": _softsign, "elu": _elu,
    "hard_sigmoid": lambda g, x: _hard_sigmoid(g, x, 1 / 6),
    "hard_sigmoid_0.2": lambda g, x: _hard_sigmoid(g, x, 0.2),
    "selu": lambda g, x: _elu(g, x, _SELU, _SELU_SCALE),
    "silu": lambda g, x: x * g.unary("sigmoid", x),
    "exponential": lambda g, x: g.unary("exp", x),
    "softmax": GraphBuilder.softmax, "log_softmax": GraphBuilder.log_softmax,
}  # fmt: skip


def function(g: GraphBuilder, name: str, x: Value) -> Value:
    """Adds a function of a layer or an activation of the cell, by name."""
    return _FUNCTIONS[name](g, x) if name in _FUNCTIONS else g.unary(name, x)


def _broadcast(a: tuple[Size, ...], b: tuple[Size, ...]) -> tuple[Size, ...]:
    rank = max(len(a), len(b))
    pairs = zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True)
    return tuple(y if x == 1 else x for x, y in pairs)


def _known(size: Size) -> int:
    assert isinstance(size, int), f"axis {size} has no known length"
    return size
