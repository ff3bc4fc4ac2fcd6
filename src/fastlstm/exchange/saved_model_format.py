"""TensorFlow SavedModels: a `Graph` as a tf.Module, written and run by TensorFlow."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastlstm.errors import MissingExtraError
from fastlstm.exchange.graph import interpret, reshaped
from fastlstm.exchange.litert_lstm import EPSILON as CELL_EPSILON
from fastlstm.runs.weight_formats import QuantizedMatrix
from fastlstm.system.environment import quiet_tensorflow

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastlstm.exchange.graph import Graph, Node
    from fastlstm.ops.cell_options import CellOptions

SIGNATURE = "serving_default"


def write_saved_model(graph: Graph) -> dict[str, bytes]:
    """Returns the files of a SavedModel by relative path, with one signature, `serving_default`.

    Raises:
        MissingExtraError: TensorFlow is not installed.
    """
    tf = _tensorflow()
    module = _Module(graph)
    specs = {
        value.name: tf.TensorSpec(
            [None if isinstance(size, str) else size for size in value.shape],
            value.dtype, name=value.name,
        )
        for value in graph.inputs
    }  # fmt: skip
    call = tf.function(module.compute).get_concrete_function(**specs)
    with tempfile.TemporaryDirectory() as directory:
        options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
        tf.saved_model.save(module.holder, directory, {SIGNATURE: call}, options)
        root = Path(directory)
        files = (path for path in sorted(root.rglob("*")) if path.is_file())
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


@cache
def _tensorflow() -> Any:
    """Returns TensorFlow; on one thread, unless the program has imported it before."""
    is_first = "tensorflow" not in sys.modules
    quiet_tensorflow()
    try:
        import tensorflow
    except ImportError:
        raise MissingExtraError(
            "--to saved-model needs TensorFlow: pip install 'fastlstm[tensorflow]'"
        ) from None
    if is_first:
        tensorflow.config.threading.set_intra_op_parallelism_threads(1)
        tensorflow.config.threading.set_inter_op_parallelism_threads(1)
    return tensorflow


def _threads(tf: Any) -> str:
    threading = tf.config.threading
    intra = threading.get_intra_op_parallelism_threads()
    inter = threading.get_inter_op_parallelism_threads()
    if (intra, inter) == (1, 1):
        return "one thread"
    within, between = (num or "as many as it takes" for num in (intra, inter))
    return f"threads: {within} within an operation, {between} between them"


class _Module:
    """Computes a graph with TensorFlow's operations; `holder` keeps the variables."""

    def __init__(self, graph: Graph) -> None:
        tf = _tensorflow()
        self._tf, self._graph = tf, graph
        self.holder = tf.Module(name=graph.name)
        self.holder.weights = {}
        self._weights: dict[str, Callable[[], Any]] = {}
        for name, w in graph.weights.items():
            self._weights[name] = self._variable(name.replace(".", "_"), w)
        self._simple: dict[str, Callable[..., Any]] = {
            **{"add": tf.add, "sub": tf.subtract, "mul": tf.multiply, "div": tf.divide},
            **{"maximum": tf.maximum, "minimum": tf.minimum, "equal": tf.equal, "less": tf.less},
            **{"relu": tf.nn.relu, "sigmoid": tf.sigmoid, "tanh": tf.tanh, "exp": tf.exp},
            **{"log": tf.math.log, "sqrt": tf.sqrt, "softplus": tf.nn.softplus},
            **{"is_nan": tf.math.is_nan, "not": tf.logical_not, "where": tf.where},
            "identity": tf.identity,
        }

    def compute(self, **inputs: Any) -> dict[str, Any]:
        """Returns the outputs by name."""
        return interpret(self._graph, inputs, self._computed)

    def _variable(self, name: str, w: Any) -> Callable[[], Any]:
        """Returns what gives a weight in float32; the variable has the weight's own format."""
        tf = self._tf
        if isinstance(w, QuantizedMatrix):
            codes = self._kept(f"{name}_codes", w.codes)
            scales = self._kept(f"{name}_scales", w.scales.astype(np.float32)[:, None])
            return lambda: tf.cast(codes, tf.float32) * scales
        variable = self._kept(name, np.asarray(w))
        if variable.dtype == tf.float16:
            return lambda: tf.cast(variable, tf.float32)
        return lambda: tf.convert_to_tensor(variable)

    def _kept(self, name: str, array: NDArray[Any]) -> Any:
        variable = self._tf.Variable(array, trainable=False, name=name)
        self.holder.weights[name] = variable
        return variable

    def _computed(self, node: Node, *inputs: Any) -> Any:
        if node.kind in self._simple:
            return self._simple[node.kind](*inputs)
        if node.kind == "reshape":
            return self._tf.reshape(inputs[0], reshaped(node, self._tf.shape(inputs[0])))
        return getattr(self, f"_{node.kind}")(*inputs, **node.attributes)

    def _weight(self, weight: str) -> Any:
        return self._weights[weight]()

    def _gather(self, indices: Any, table: str) -> Any:
        return self._tf.gather(self._weights[table](), indices)

    def _linear(self, x: Any, weight: str, bias: str | None) -> Any:
        product = self._tf.matmul(x, self._weights[weight](), transpose_b=True)
        return product if bias is None else product + self._weights[bias]()

    def _layer_norm(self, x: Any, weight: str, bias: str, eps: float) -> Any:
        return self._normalised(x, eps) * self._weights[weight]() + self._weights[bias]()

    def _normalised(self, x: Any, eps: float) -> Any:
        """Returns `x` with mean 0 and variance 1 over its last axis."""
        tf = self._tf
        mean = tf.reduce_mean(x, -1, keepdims=True)
        variance = tf.reduce_mean(tf.square(x - mean), -1, keepdims=True)
        return (x - mean) / tf.sqrt(variance + eps)

    def _cast(self, x: Any, to: str) -> Any:
        return self._tf.cast(x, to)

    def _concat(self, *values: Any, axis: int) -> Any:
        return self._tf.concat(values, axis)

    def _slice(self, x: Any, axis: int, start: int, stop: int) -> Any:
        return x[(slice(None),) * axis + (slice(start, stop),)]

    def _last(self, x: Any, axis: int) -> Any:
        return x[(slice(None),) * axis + (slice(-1, None),)]

    def _transpose(self, x: Any, axes: tuple[int, ...]) -> Any:
        return self._tf.transpose(x, axes)

    def _sort(self, x: Any) -> Any:
        return self._tf.sort(x, -1)

    def _sum(self, x: Any, axis: int) -> Any:
        return self._tf.reduce_sum(x, axis, keepdims=True)

    def _mean(self, x: Any, axis: int) -> Any:
        return self._tf.reduce_mean(x, axis, keepdims=True)

    def _max(self, x: Any, axis: int) -> Any:
        return self._tf.reduce_max(x, axis, keepdims=True)

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
        recurrent = self._weights[w_hh]()
        norm = {name: self._weight(w_ih.replace("weight_ih", name)) for name in options.parameters}

        def normalised(x: Any, gamma: str) -> Any:
            return self._normalised(x, CELL_EPSILON) * norm[gamma] if norm else x

        gates_x = normalised(tf.matmul(x, self._weights[w_ih](), transpose_b=True), "gamma_ih")
        gates_x += sum(self._weights[name]() for name in biases)
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
            new_h = gate(o) * shape(shown)
            new_h, new_c = _mixed(keep_h, h, new_h), _mixed(keep_c, c, new_c)
            if lengths is None:
                return new_h, new_h, new_c
            inside = (number < lengths)[:, None]
            new_h, new_c = tf.where(inside, new_h, h), tf.where(inside, new_c, c)
            return tf.where(inside, new_h, 0.0), new_h, new_c

        ys, hs, cs = tf.scan(step, (gates_x, steps), (h, h, c), reverse=is_backward)
        last = 0 if is_backward else -1
        return ys, hs[last], cs[last]

    def _activation(self, name: str) -> Callable[[Any], Any]:
        tf = self._tf
        functions: dict[str, Callable[[Any], Any]] = {
            "sigmoid": tf.sigmoid, "tanh": tf.tanh, "relu": tf.nn.relu,
            "softsign": tf.nn.softsign, "linear": tf.identity,
            "hard_sigmoid": lambda x: tf.clip_by_value(x / 6 + 0.5, 0.0, 1.0),
        }  # fmt: skip
        return functions[name]


def _mixed(keep: float, old: Any, new: Any) -> Any:
    return new if keep == 0 else keep * old + (1 - keep) * new


class SavedModelRunner:
    """A SavedModel in TensorFlow. No TensorFlow Serving runs here.

    Args:
        path: of its directory.
    """

    def __init__(self, path: Path) -> None:
        tf = _tensorflow()
        self._tf = tf
        self.version = f"tensorflow {tf.__version__}, {_threads(tf)}"
        self._loaded = tf.saved_model.load(str(path))  # keeps the variables alive
        self._call = self._loaded.signatures[SIGNATURE]

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Returns the outputs by name."""
        given = {name: self._tf.constant(array) for name, array in inputs.items()}
        return {name: value.numpy() for name, value in self._call(**given).items()}
