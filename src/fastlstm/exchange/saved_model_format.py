"""TensorFlow SavedModels: writes a `Graph` as one tf.function, and runs files in TensorFlow."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.exchange.graph import CELL_EPSILON, Graph, Node, interpret, reshaped
from fastlstm.exchange.source import needed
from fastlstm.ops.cell_options import CellOptions
from fastlstm.runs.weight_formats import QuantizedMatrix
from fastlstm.system.environment import quiet

SIGNATURE = "serving_default"


def write_saved_model(graph: Graph) -> dict[str, bytes]:
    """Returns the files of a SavedModel by relative path, with one signature, `serving_default`."""
    tf = _tensorflow()
    module = _SavedModule(graph)
    specs = {
        value.name: tf.TensorSpec(
            [None if isinstance(size, str) else size for size in value.shape],
            value.dtype, name=value.name,
        )
        for value in graph.inputs
    }  # fmt: skip
    call = tf.function(lambda **inputs: interpret(graph, inputs, module.compute))
    with tempfile.TemporaryDirectory() as directory:
        options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
        signatures = {SIGNATURE: call.get_concrete_function(**specs)}
        tf.saved_model.save(module.holder, directory, signatures, options)
        root = Path(directory)
        files = (path for path in sorted(root.rglob("*")) if path.is_file())
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


@cache
def _tensorflow() -> Any:
    """Imports TensorFlow; sets one thread unless the program has imported it before."""
    is_first = "tensorflow" not in sys.modules
    quiet("tensorflow")
    tensorflow = needed("tensorflow", "saved-model")
    if is_first:
        tensorflow.config.threading.set_intra_op_parallelism_threads(1)
        tensorflow.config.threading.set_inter_op_parallelism_threads(1)
    return tensorflow


class _SavedModule:
    """The operations of a graph in TensorFlow; `holder` owns the variables."""

    def __init__(self, graph: Graph) -> None:
        tf = self._tf = _tensorflow()
        self.holder = tf.Module(name=graph.name)
        self.holder.weights = {
            name.replace(".", "_"): tuple(tf.Variable(a, trainable=False) for a in _stored(w))
            for name, w in graph.weights.items()
        }
        self._operations: dict[str, Any] = {
            **{"add": tf.add, "sub": tf.subtract, "mul": tf.multiply, "div": tf.divide},
            **{"maximum": tf.maximum, "minimum": tf.minimum, "equal": tf.equal, "less": tf.less},
            **{"relu": tf.nn.relu, "sigmoid": tf.sigmoid, "tanh": tf.tanh, "exp": tf.exp},
            **{"log": tf.math.log, "sqrt": tf.sqrt, "softplus": tf.nn.softplus},
            **{"is_nan": tf.math.is_nan, "not": tf.logical_not, "where": tf.where},
            **{"identity": tf.identity, "sort": tf.sort, "weight": self._weight},
            **{"gather": self._gather, "linear": self._linear, "lstm": self._lstm},
            "sum": lambda x, axis: tf.reduce_sum(x, axis, keepdims=True),
            "mean": lambda x, axis: tf.reduce_mean(x, axis, keepdims=True),
            "max": lambda x, axis: tf.reduce_max(x, axis, keepdims=True),
            "cast": lambda x, to: tf.cast(x, to),
            "concat": lambda *values, axis: tf.concat(values, axis),
            "transpose": lambda x, axes: tf.transpose(x, axes),
            "slice": lambda x, axis, start, stop: x[_along(axis, slice(start, stop))],
            "last": lambda x, axis: x[_along(axis, slice(-1, None))],
            "layer_norm": self._layer_norm,
        }

    def compute(self, node: Node, *inputs: Any) -> Any:
        if node.kind == "reshape":
            return self._tf.reshape(inputs[0], reshaped(node, self._tf.shape(inputs[0])))
        return self._operations[node.kind](*inputs, **node.attributes)

    def _weight(self, weight: str) -> Any:
        """Returns a weight in float32; the variable stores its format."""
        tf, (stored, *scales) = self._tf, self.holder.weights[weight.replace(".", "_")]
        if scales:
            return tf.cast(stored, tf.float32) * scales[0]
        return tf.cast(stored, tf.float32) if stored.dtype == tf.float16 else tf.identity(stored)

    def _gather(self, indices: Any, table: str) -> Any:
        return self._tf.gather(self._weight(table), indices)

    def _linear(self, x: Any, weight: str, bias: str | None) -> Any:
        product = self._tf.matmul(x, self._weight(weight), transpose_b=True)
        return product if bias is None else product + self._weight(bias)

    def _layer_norm(self, x: Any, weight: str, bias: str, eps: float) -> Any:
        return self._normalised(x, eps) * self._weight(weight) + self._weight(bias)

    def _normalised(self, x: Any, eps: float) -> Any:
        mean, variance = self._tf.nn.moments(x, -1, keepdims=True)
        return (x - mean) / self._tf.sqrt(variance + eps)

    def _lstm(
        self, x: Any, h: Any, c: Any, lengths: Any = None, *, directions: Any,
        options: CellOptions, hidden_size: int,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        tf = self._tf
        results = [
            self._one_way(x, h[d], c[d], lengths, names, options, d == 1)
            for d, names in enumerate(directions)
        ]
        ys, hs, cs = zip(*results, strict=True)
        return tf.concat(ys, -1), tf.stack(hs), tf.stack(cs)

    def _one_way(
        self, x: Any, h: Any, c: Any, lengths: Any, names: Any, options: CellOptions,
        is_backward: bool,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        """Returns outputs `(T, B, H)` and the last h and c of one direction."""
        tf = self._tf
        w_ih, w_hh, biases = names
        recurrent = self._weight(w_hh)
        norm = {name: self._weight(w_ih.replace("weight_ih", name)) for name in options.parameters}

        def normalised(x: Any, gamma: str) -> Any:
            return self._normalised(x, CELL_EPSILON) * norm[gamma] if norm else x

        gates_x = normalised(tf.matmul(x, self._weight(w_ih), transpose_b=True), "gamma_ih")
        gates_x += sum(self._weight(name) for name in biases)
        steps = tf.range(tf.shape(x)[0])
        gate, shape = (
            self._activation(name) for name in (options.recurrent_activation, options.activation)
        )
        keep_h, keep_c = options.zoneout

        def step(carried: Any, given: Any) -> Any:
            (_, h, c), (gates_x, number) = carried, given
            gates_h = normalised(tf.matmul(h, recurrent, transpose_b=True), "gamma_hh")
            i, f, g, o = tf.split(gates_x + gates_h, 4, -1)
            new_c = gate(f) * c + gate(i) * shape(g)
            shown = normalised(new_c, "gamma_c") + (norm["beta_c"] if norm else 0.0)
            new_h = keep_h * h + (1 - keep_h) * gate(o) * shape(shown)
            new_c = keep_c * c + (1 - keep_c) * new_c
            if lengths is None:
                return new_h, new_h, new_c
            inside = (number < lengths)[:, None]
            new_h, new_c = tf.where(inside, new_h, h), tf.where(inside, new_c, c)
            return tf.where(inside, new_h, 0.0), new_h, new_c

        ys, hs, cs = tf.scan(step, (gates_x, steps), (h, h, c), reverse=is_backward)
        last = 0 if is_backward else -1
        return ys, hs[last], cs[last]

    def _activation(self, name: str) -> Any:
        if name == "hard_sigmoid":
            return lambda x: self._tf.clip_by_value(x / 6 + 0.5, 0.0, 1.0)
        own = {"softsign": self._tf.nn.softsign, "linear": self._tf.identity}
        return own.get(name) or self._operations[name]


def _stored(w: Any) -> list[NDArray[Any]]:
    """Returns the arrays of a weight: int8 codes come with scales."""
    if isinstance(w, QuantizedMatrix):
        return [w.codes, w.scales.astype(np.float32)[:, None]]
    return [np.asarray(w)]


def _along(axis: int, part: slice) -> tuple[slice, ...]:
    return (slice(None),) * axis + (part,)


class SavedModelRunner:
    """A SavedModel in TensorFlow, called by its signature, without TensorFlow Serving."""

    def __init__(self, path: Path) -> None:
        tf = self._tf = _tensorflow()
        threading = tf.config.threading
        numbers = (
            threading.get_intra_op_parallelism_threads(),
            threading.get_inter_op_parallelism_threads(),
        )
        threads = "one thread" if numbers == (1, 1) else "the threads of this program"
        self.version = f"tensorflow {tf.__version__}, {threads}"
        self._loaded = tf.saved_model.load(str(path))  # keeps the variables alive
        self._call = self._loaded.signatures[SIGNATURE]

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        given = {name: self._tf.constant(array) for name, array in inputs.items()}
        return {name: value.numpy() for name, value in self._call(**given).items()}
