"""ONNX files (opset 17): writes a `Graph`, and runs files in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import ConfigError
from fastlstm.exchange.graph import Graph, Node, Value, reshaped
from fastlstm.exchange.source import needed
from fastlstm.ops.cell_options import CellOptions
from fastlstm.runs.weight_formats import QuantizedMatrix

OPSET, IR_VERSION = 17, 8
LARGEST_FILE = (1 << 31) - 1
"""The limit of protobuf, the format of ONNX files."""
_OPERATORS = {
    **{"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "maximum": "Max"},
    **{"minimum": "Min", "equal": "Equal", "less": "Less", "where": "Where", "not": "Not"},
    **{"relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh", "exp": "Exp", "log": "Log"},
    **{"sqrt": "Sqrt", "softplus": "Softplus", "is_nan": "IsNaN", "identity": "Identity"},
}
_REDUCTIONS = {"mean": "ReduceMean", "max": "ReduceMax"}
_ACTIVATIONS: dict[str, tuple[str, tuple[float, float] | None]] = {
    "sigmoid": ("Sigmoid", None), "tanh": ("Tanh", None), "relu": ("Relu", None),
    "softsign": ("Softsign", None), "linear": ("Affine", (1.0, 0.0)),
    "hard_sigmoid": ("HardSigmoid", (1 / 6, 0.5)),
}  # fmt: skip
"""Activation -> ONNX's name, and its alpha and beta or None."""


def write_onnx(graph: Graph) -> bytes:
    """Returns the graph as an ONNX file."""
    return _OnnxWriter(graph).model()


class _OnnxWriter:
    def __init__(self, graph: Graph) -> None:
        self._onnx, self._graph = needed("onnx", "onnx"), graph
        self._nodes: list[Any] = []
        self._arrays: dict[str, NDArray[Any]] = {}
        self._made: dict[str, str] = {}

    def model(self) -> bytes:
        for node in self._graph.nodes:
            self._write(node)
        onnx, helper, graph = self._onnx, self._onnx.helper, self._graph
        num_bytes = sum(array.nbytes for array in self._arrays.values())
        if num_bytes > LARGEST_FILE - (1 << 20):  # the rest is left for everything else
            raise ConfigError(
                f"{num_bytes} bytes of weights are more than an .onnx file can hold,"
                f" {LARGEST_FILE}; export with fewer bits per weight, or to saved-model or torch"
            )
        arrays = [onnx.numpy_helper.from_array(a, name) for name, a in self._arrays.items()]
        made = helper.make_graph(
            self._nodes, graph.name, [self._described(v) for v in graph.inputs],
            [self._described(v) for v in graph.outputs], arrays,
        )  # fmt: skip
        model = helper.make_model(
            made, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="fastlstm"
        )
        model.ir_version = IR_VERSION
        helper.set_model_props(model, graph.metadata)
        onnx.checker.check_model(model, full_check=True)
        data: bytes = model.SerializeToString()
        return data

    def _described(self, value: Value) -> Any:
        dtype = self._dtype(value.dtype)
        return self._onnx.helper.make_tensor_value_info(value.name, dtype, list(value.shape))

    def _dtype(self, name: str) -> int:
        return int(self._onnx.helper.np_dtype_to_tensor_dtype(np.dtype(name)))

    def _write(self, node: Node) -> None:
        names, attributes = [value.name for value in node.inputs], node.attributes
        if node.kind in _OPERATORS:
            self._op(_OPERATORS[node.kind], names, node)
        elif node.kind in _REDUCTIONS:
            self._op(_REDUCTIONS[node.kind], names, node, axes=[attributes["axis"]], keepdims=1)
        elif node.kind == "concat":
            self._op("Concat", names, node, axis=attributes["axis"])
        else:
            getattr(self, f"_{node.kind}")(node, *names, **attributes)

    def _op(
        self, kind: str, inputs: list[str], outputs: Node | str | list[str], **attributes: Any
    ) -> str:
        """Adds an operation with the first output of a `Node`, or outputs by name; returns the
        first name."""
        outputs = outputs.outputs[0].name if isinstance(outputs, Node) else outputs
        outputs = [outputs] if isinstance(outputs, str) else outputs
        node = self._onnx.helper.make_node(kind, inputs, outputs, name=outputs[0], **attributes)
        self._nodes.append(node)
        return outputs[0]

    def _array(self, array: NDArray[Any], name: str) -> str:
        self._arrays[name] = array
        return name

    def _integers(self, numbers: Any) -> str:
        numbers = np.asarray(numbers, np.int64)
        name = "integers_" + "_".join(map(str, np.atleast_1d(numbers)))
        return self._array(numbers, name if numbers.ndim else name + "_scalar")

    def _stored(self, weight: str) -> str:
        """Returns the name of a weight in float32; the file stores its format."""
        if weight not in self._made:
            self._made[weight] = self._decoded(weight, self._graph.weights[weight])
        return self._made[weight]

    def _decoded(self, name: str, w: Any) -> str:
        """Adds an array and its conversion to float32.

        ONNX Runtime folds a cast and a product when it loads the model, but no DequantizeLinear.
        """
        float32 = self._onnx.TensorProto.FLOAT
        if isinstance(w, QuantizedMatrix):
            codes = self._op(
                "Cast", [self._array(w.codes, f"{name}.codes")], f"{name}.whole", to=float32
            )
            scales = self._array(w.scales.astype(np.float32)[..., None], f"{name}.scales")
            return self._op("Mul", [codes, scales], name)
        if w.dtype == np.float16:
            return self._op("Cast", [self._array(w, f"{name}.half")], name, to=float32)
        return self._array(w, name)

    def _weight(self, node: Node, weight: str) -> None:
        self._op("Identity", [self._stored(weight)], node)

    def _gather(self, node: Node, indices: str, table: str) -> None:
        self._op("Gather", [self._stored(table), indices], node, axis=0)

    def _linear(self, node: Node, x: str, weight: str, bias: str | None) -> None:
        turned, out = f"{weight}.transposed", node.outputs[0].name
        if turned not in self._made:
            self._made[turned] = self._op("Transpose", [self._stored(weight)], turned, perm=[1, 0])
        product = self._op("MatMul", [x, turned], out if bias is None else f"{out}.product")
        if bias is not None:
            self._op("Add", [product, self._stored(bias)], out)

    def _lstm(
        self, node: Node, x: str, h: str, c: str, *lengths: str, directions: Any, options: Any,
        hidden_size: int,
    ) -> None:  # fmt: skip
        H, D, out = hidden_size, len(directions), node.outputs[0].name
        activations = _activations(options, D)
        matrices = self._lstm_weights(directions, H)
        y, ends = f"{out}.directions", [value.name for value in node.outputs[1:]]
        results = [y, *(f"{end}.any" for end in ends)] if lengths else [y, *ends]
        self._op(
            "LSTM", [x, *matrices, *(lengths or ("",)), h, c], results, hidden_size=H,
            direction="bidirectional" if D == 2 else "forward", **activations,
        )  # fmt: skip
        for end, start in zip(ends if lengths else (), (h, c), strict=False):
            # Without steps ONNX Runtime's state is zero; ours stays as it was.
            none = self._array(np.zeros((), np.int32), "no_steps")
            is_empty = self._op("Equal", [lengths[0], none], f"{end}.is_empty")
            column = self._op("Unsqueeze", [is_empty, self._integers([1])], f"{end}.column")
            self._op("Where", [column, start, f"{end}.any"], end)
        if D == 1:
            self._op("Squeeze", [y, self._integers([1])], out)
        else:
            turned = self._op("Transpose", [y], f"{y}.last", perm=[0, 2, 1, 3])
            self._op("Reshape", [turned, self._integers([0, 0, D * H])], out)

    def _lstm_weights(self, directions: Any, H: int) -> list[str]:
        """Returns the names of ONNX's W, R and B, written once for all calls of a layer."""
        names = [f"{directions[0][0]}.{name}" for name in "WRB"]
        if names[0] in self._made:
            return names
        weights = self._graph.weights
        order = np.r_[0:H, 3 * H : 4 * H, H : 2 * H, 2 * H : 3 * H]  # torch i f g o, ONNX i o f c
        for k, name in enumerate(names[:2]):
            self._made[name] = self._decoded(
                name, _stacked([weights[d[k]] for d in directions], order)
            )
        none = np.zeros(4 * H, np.float32)
        pairs = [[np.asarray(weights[n], np.float32) for n in d[2]] or [none] for d in directions]
        both = [np.concatenate([np.sum(pair, 0)[order], none]) for pair in pairs]
        self._array(np.stack(both), names[2])
        return names

    def _layer_norm(self, node: Node, x: str, weight: str, bias: str, eps: float) -> None:
        inputs = [x, self._stored(weight), self._stored(bias)]
        self._op("LayerNormalization", inputs, node, axis=-1, epsilon=eps)

    def _cast(self, node: Node, x: str, to: str) -> None:
        self._op("Cast", [x], node, to=self._dtype(to))

    def _last(self, node: Node, x: str, axis: int) -> None:
        self._slice(node, x, axis, -1, np.iinfo(np.int64).max)

    def _slice(self, node: Node, x: str, axis: int, start: int, stop: int) -> None:
        ends = [self._integers([number]) for number in (start, stop, axis)]
        self._op("Slice", [x, *ends], node)

    def _transpose(self, node: Node, x: str, axes: tuple[int, ...]) -> None:
        self._op("Transpose", [x], node, perm=list(axes))

    def _reshape(self, node: Node, x: str) -> None:
        sizes = reshaped(node, np.zeros(len(node.inputs[0].shape), int))  # 0 keeps a length
        self._op("Reshape", [x, self._integers(sizes)], node)

    def _sum(self, node: Node, x: str, axis: int) -> None:  # since opset 13 its axes are an input
        self._op("ReduceSum", [x, self._integers([axis])], node, keepdims=1)

    def _sort(self, node: Node, x: str) -> None:
        out, size = node.outputs[0].name, self._integers([node.outputs[0].shape[-1]])
        self._op("TopK", [x, size], [out, f"{out}.places"], axis=-1, largest=0, sorted=1)


def _stacked(parts: list[Any], order: NDArray[np.int64]) -> Any:
    """Returns matrices of one format as one array, their rows in this order."""
    first = parts[0]
    if not isinstance(first, QuantizedMatrix):
        return np.stack([np.asarray(w)[order] for w in parts])
    codes, scales = (np.stack([getattr(w, n)[order] for w in parts]) for n in ("codes", "scales"))
    return QuantizedMatrix(codes, scales, first.weight_format)


def _activations(options: CellOptions, D: int) -> dict[str, Any]:
    """Returns the attributes for ONNX's activations: gates, candidate, output of each direction."""
    if options.layer_norm or options.zoneout != (0.0, 0.0):
        name = "layer_norm" if options.layer_norm else "zoneout"
        raise ConfigError(
            f"ONNX's LSTM has no `{name}`; export to another target, or train without it"
        )
    gates, other = options.recurrent_activation, options.activation
    if (gates, other) == ("sigmoid", "tanh"):
        return {}
    found = [_ACTIVATIONS[name] for name in (gates, other, other) * D]
    # Only functions with an alpha and a beta take one from these lists.
    pairs = [pair for _, pair in found if pair is not None]
    numbers = {"activation_alpha": [a for a, _ in pairs], "activation_beta": [b for _, b in pairs]}
    return {"activations": [name for name, _ in found], **(numbers if pairs else {})}


class OnnxRunner:
    """An ONNX file in ONNX Runtime, on one thread."""

    def __init__(self, path: Path) -> None:
        onnxruntime = needed("onnxruntime", "onnx")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self.version = f"onnxruntime {onnxruntime.__version__}, one thread"
        self._session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        self._names = [output.name for output in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        return dict(zip(self._names, self._session.run(None, dict(inputs)), strict=True))
