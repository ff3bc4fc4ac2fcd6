"""LiteRT files (.tflite): writes a `Graph` with built-in operations only, and runs files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import ConfigError, FormatError
from fastlstm.exchange.graph import (
    CELL_EPSILON,
    Direction,
    Graph,
    GraphBuilder,
    Node,
    Size,
    Value,
    composed,
    function,
    interpret,
)
from fastlstm.exchange.source import needed
from fastlstm.ops.cell_options import CellOptions
from fastlstm.runs.weight_formats import QuantizedMatrix

SCHEMA_VERSION, IDENTIFIER = 3, b"TFL3"
SIGNATURE = "serving_default"
ALIGNMENT = 16
"""In bytes; the schema asks for this alignment in every buffer."""
LARGEST_FILE = (1 << 31) - 1
"""Offsets in a flatbuffer are signed 32-bit numbers."""
_SMALLEST_SCALE = np.finfo(np.float32).tiny
"""The kernels refuse scales of 0 and below float32's normal range."""
_OPERATORS = {
    **{"add": "ADD", "sub": "SUB", "mul": "MUL", "div": "DIV", "maximum": "MAXIMUM"},
    **{"minimum": "MINIMUM", "equal": "EQUAL", "less": "LESS", "where": "SELECT_V2"},
    **{"relu": "RELU", "sigmoid": "LOGISTIC", "tanh": "TANH", "exp": "EXP", "log": "LOG"},
    **{"sqrt": "SQRT", "rsqrt": "RSQRT", "abs": "ABS", "neg": "NEG", "not": "LOGICAL_NOT"},
}
_REDUCTIONS = {"sum": "SUM", "mean": "MEAN", "max": "REDUCE_MAX"}
_OPTIONS = {
    **{"ADD": "Add", "SUB": "Sub", "MUL": "Mul", "DIV": "Div", "MAXIMUM": "MaximumMinimum"},
    **{"MINIMUM": "MaximumMinimum", "EQUAL": "Equal", "NOT_EQUAL": "NotEqual", "LESS": "Less"},
    **{"LOGICAL_NOT": "LogicalNot", "SELECT_V2": "SelectV2", "EXP": "Exp", "NEG": "Neg"},
    **{"ABS": "Abs", "CAST": "Cast", "DEQUANTIZE": "Dequantize", "GATHER": "Gather"},
    **{"FULLY_CONNECTED": "FullyConnected", "CONCATENATION": "Concatenation"},
    **{"SLICE": "Slice", "SPLIT": "Split", "RESHAPE": "Reshape", "TRANSPOSE": "Transpose"},
    **{"SUM": "Reducer", "MEAN": "Reducer", "REDUCE_MAX": "Reducer", "TOPK_V2": "TopKV2"},
    **dict.fromkeys(["RELU", "LOGISTIC", "TANH", "LOG", "SQRT", "RSQRT"]),
}
"""Operation -> its options table in the schema."""


def write_litert(graph: Graph) -> bytes:
    """Returns the graph as a .tflite file.

    The caller resizes named axes. The signature has the graph's names of inputs and outputs.
    """
    for value in graph.inputs:
        if "T" in value.shape:
            raise ConfigError(
                f"input '{value.name}' has any number of time steps, and a LiteRT model has a"
                " fixed number: give it as `length`, or export to onnx"
            )
    return _LiteRtWriter(composed(graph, _COMPOSED)).file()


class _LiteRtWriter:
    """Collects the tensors, referred to by number, and the operations of a model."""

    def __init__(self, graph: Graph) -> None:
        self._schema = needed("ai_edge_litert.schema_py_generated", "litert")
        self._graph = graph
        self._tensors: list[Any] = []
        self._operators: list[Any] = []
        self._codes: dict[tuple[str, int], int] = {}
        self._buffers: dict[bytes, int] = {b"": 0}  # shared by tensors without values
        self._constants: dict[tuple[int, str, tuple[int, ...]], int] = {}
        self._made: dict[str, int] = {}

    def file(self) -> bytes:
        schema, inputs = self._schema, {v.name: self._result(v) for v in self._graph.inputs}
        outputs = interpret(self._graph, inputs, self._written)
        graph, signature, model = schema.SubGraphT(), schema.SignatureDefT(), schema.ModelT()
        graph.name, graph.tensors, graph.operators = (
            self._graph.name, self._tensors, self._operators,
        )  # fmt: skip
        graph.inputs, graph.outputs = list(inputs.values()), list(outputs.values())
        signature.signatureKey, signature.subgraphIndex = SIGNATURE, 0
        signature.inputs, signature.outputs = (
            [schema.TensorMapT(name=name, tensorIndex=place) for name, place in places.items()]
            for places in (inputs, outputs)
        )
        model.version, model.description = SCHEMA_VERSION, "written by fastlstm"
        model.subgraphs, model.signatureDefs = [graph], [signature]
        model.operatorCodes = [_code(schema, *key) for key in self._codes]
        model.metadata = [
            schema.MetadataT(name=name, buffer=self._buffer(text.encode()))
            for name, text in self._graph.metadata.items()
        ]
        arrays = (np.frombuffer(data, np.uint8) if data else None for data in self._buffers)
        model.buffers = [schema.BufferT(data=array) for array in arrays]
        return _packed(model, sum(map(len, self._buffers)))

    def _buffer(self, data: bytes) -> int:
        return self._buffers.setdefault(data, len(self._buffers))

    def _tensor(
        self,
        name: str,
        dtype: str,
        shape: Sequence[Size],
        buffer: int = 0,
        quantization: Any = None,
    ) -> int:
        tensor = self._schema.TensorT()
        tensor.name, tensor.buffer, tensor.quantization = name, buffer, quantization
        tensor.type, tensor.hasRank = self._dtype(dtype), True
        tensor.shape = [1 if isinstance(size, str) else size for size in shape]
        if any(isinstance(size, str) for size in shape):
            tensor.shapeSignature = [-1 if isinstance(size, str) else size for size in shape]
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def _result(self, value: Value) -> int:
        return self._tensor(value.name, value.dtype, value.shape)

    def _dtype(self, dtype: str) -> int:
        return int(getattr(self._schema.TensorType, dtype.upper()))

    def _constant(self, array: Any, name: str = "constant") -> int:
        """Adds a constant tensor; equal constants are stored once."""
        array = np.asarray(array)
        buffer = self._buffer(np.ascontiguousarray(array).tobytes())
        key = (buffer, str(array.dtype), array.shape)
        if key not in self._constants:
            self._constants[key] = self._tensor(name, key[1], array.shape, buffer)
        return self._constants[key]

    def _integers(self, numbers: Any) -> int:
        return self._constant(np.asarray(numbers, np.int32), "integers")

    def _op(
        self, kind: str, inputs: Sequence[int], outputs: Any, version: int = 1, **options: Any
    ) -> Any:
        """Adds a built-in operation in the first version that supports it.

        Returns its outputs: the tensor for a `Value`, or the given list of tensors. The input -1
        means none; `options` are the fields of the operation's options table.
        """
        if isinstance(outputs, Value):
            outputs = self._result(outputs)
        schema, operator = self._schema, self._schema.OperatorT()
        operator.opcodeIndex = self._codes.setdefault((kind, version), len(self._codes))
        operator.inputs = list(inputs)
        operator.outputs = outputs if isinstance(outputs, list) else [outputs]
        if table := _OPTIONS[kind]:
            operator.builtinOptionsType = getattr(schema.BuiltinOptions, f"{table}Options")
            operator.builtinOptions = getattr(schema, f"{table}OptionsT")(**options)
        self._operators.append(operator)
        return outputs

    def _written(self, node: Node, *inputs: int) -> Any:
        kind, out = node.kind, node.outputs[0]
        if kind in _OPERATORS:
            return self._op(_OPERATORS[kind], inputs, out)
        if kind in _REDUCTIONS:
            places = [*inputs, self._integers([node.attributes["axis"]])]
            return self._op(_REDUCTIONS[kind], places, out, keepDims=True)
        if kind == "concat":
            return self._op("CONCATENATION", inputs, out, axis=node.attributes["axis"])
        write = getattr(self, f"_{kind}", None)
        if write is None:
            raise ConfigError(f"LiteRT files hold no operation '{kind}'; export to onnx")
        return write(node, *inputs, **node.attributes)

    def _weight(self, node: Node, weight: str) -> int:
        return self._floats(weight)

    def _is_nan(self, node: Node, x: int) -> Any:
        return self._op("NOT_EQUAL", [x, x], node.outputs[0])

    def _reshape(self, node: Node, x: int) -> Any:
        sizes = [-1 if isinstance(size, str) else size for size in node.outputs[0].shape]
        return self._op("RESHAPE", [x, self._integers(sizes)], node.outputs[0], newShape=sizes)

    _identity = _reshape

    def _cast(self, node: Node, x: int, to: str) -> Any:
        dtypes = {"inDataType": self._dtype(node.inputs[0].dtype), "outDataType": self._dtype(to)}
        return self._op("CAST", [x], node.outputs[0], **dtypes)

    def _slice(self, node: Node, x: int, axis: int, start: int, stop: int) -> Any:
        begin, size = ([n] * len(node.inputs[0].shape) for n in (0, -1))
        begin[axis], size[axis] = start, stop - start
        places = [x, self._integers(begin), self._integers(size)]
        return self._op("SLICE", places, node.outputs[0], 5 if len(begin) > 4 else 1)

    def _split(self, node: Node, x: int) -> Any:
        places = [self._integers(len(node.inputs[0].shape) - 1), x]
        results = [self._result(value) for value in node.outputs]
        return tuple(self._op("SPLIT", places, results, numSplits=len(results)))

    def _transpose(self, node: Node, x: int, axes: Sequence[int]) -> Any:
        version = {5: 4, 6: 6}.get(len(axes), 3 if node.inputs[0].dtype == "bool" else 1)
        return self._op("TRANSPOSE", [x, self._integers(axes)], node.outputs[0], version)

    def _sort(self, node: Node, x: int) -> Any:
        """Sorts the last axis in ascending order; TOPK_V2 gives the largest first."""
        value = node.outputs[0]
        places = [self._op("NEG", [x], value), self._integers(value.shape[-1])]
        results = [self._tensor("topk_v2", dtype, value.shape) for dtype in (value.dtype, "int32")]
        return self._op("NEG", [self._op("TOPK_V2", places, results)[0]], value)

    def _linear(self, node: Node, x: int, weight: str, bias: str | None) -> Any:
        """Adds `x @ weight^T + bias` along the last axis.

        The kernels multiply int8 weights in int8 and round `x` row by row, which takes a third of
        the time of float32.
        """
        is_int8 = _is_int8(self._graph.weights[weight])
        matrix = self._int8(weight) if is_int8 else self._floats(weight)
        added = -1 if bias is None else self._floats(bias)
        version = 12 if is_int8 else 6 if bias is None else 5
        places = [x, matrix, added]
        return self._op("FULLY_CONNECTED", places, node.outputs[0], version, keepNumDims=True)

    def _gather(self, node: Node, indices: int, table: str) -> Any:
        w, out = self._graph.weights[table], node.outputs[0]
        if not isinstance(w, QuantizedMatrix) or w.weight_format != "int8":
            return self._op("GATHER", [self._floats(table), indices], out)
        codes, scales = self._constant(w.codes, table), w.scales.astype(np.float32)[:, None]
        rows, factors = (
            self._tensor("gather", dtype, (*out.shape[:-1], width))
            for dtype, width in (("int8", out.shape[-1]), ("float32", 1))
        )
        self._op("GATHER", [codes, indices], rows, 2)
        self._op("GATHER", [self._constant(scales, f"{table}.scales"), indices], factors)
        dtypes = {"inDataType": self._dtype("int8"), "outDataType": self._dtype("float32")}
        return self._op("MUL", [self._op("CAST", [rows], out, 3, **dtypes), factors], out)

    def _floats(self, weight: str) -> int:
        """Returns a weight as float32; the file stores its format."""
        if weight not in self._made:
            w = self._graph.weights[weight]
            result = Value("dequantize", "float32", w.shape)
            if _is_int8(w):
                stored = self._op("DEQUANTIZE", [self._int8(weight)], result, 5)
            else:
                w = w.dequantized() if isinstance(w, QuantizedMatrix) else w
                stored = self._constant(w, weight)
                if w.dtype == np.float16:
                    stored = self._op("DEQUANTIZE", [stored], result, 3)
            self._made[weight] = stored
        return self._made[weight]

    def _int8(self, weight: str) -> int:
        """Returns a matrix as int8 with a scale for every row."""
        w, name = self._graph.weights[weight], f"{weight}.codes"
        assert isinstance(w, QuantizedMatrix)
        if name not in self._made:
            scales = self._schema.QuantizationParametersT()
            # The smallest scale is of rows of zeros.
            scales.scale = np.maximum(w.scales, _SMALLEST_SCALE).astype(np.float32)
            scales.zeroPoint, scales.quantizedDimension = np.zeros(len(w.scales), np.int64), 0
            buffer = self._buffer(np.ascontiguousarray(w.codes).tobytes())
            self._made[name] = self._tensor(weight, "int8", w.shape, buffer, scales)
        return self._made[name]


def _is_int8(w: Any) -> bool:
    return isinstance(w, QuantizedMatrix) and w.weight_format == "int8"


def _code(schema: Any, kind: str, version: int) -> Any:
    code = schema.OperatorCodeT()
    code.builtinCode = getattr(schema.BuiltinOperator, kind)
    code.deprecatedBuiltinCode = min(code.builtinCode, 127)  # what older runtimes read
    code.version = version
    return code


def _packed(model: Any, num_bytes: int) -> bytes:
    """Returns a `ModelT` of the schema as a file; its buffers have `num_bytes` bytes."""
    from flatbuffers import Builder

    if num_bytes > LARGEST_FILE:
        raise ConfigError(
            f"{num_bytes} bytes of weights are more than a .tflite file can hold, {LARGEST_FILE};"
            " export with fewer bits per weight, or to onnx"
        )

    class AlignedBuilder(Builder):  # type: ignore[misc]
        """A builder that aligns vectors of bytes, which are the buffers."""

        def StartVector(self, size: int, length: int, alignment: int) -> Any:  # noqa: N802
            return super().StartVector(size, length, ALIGNMENT if size == 1 else alignment)

    builder = AlignedBuilder(num_bytes + (64 << 10))
    builder.Finish(model.Pack(builder), IDENTIFIER)
    return bytes(builder.Output())


def _softplus(g: GraphBuilder, x: Value) -> list[Value]:
    """max(x, 0) + log(1 + exp(-|x|)), which does not overflow."""
    powers = g.unary("exp", g.unary("neg", g.unary("abs", x)))
    rest = g.unary("log", powers + 1.0)
    return [g.unary("relu", x) + rest]


def _normalised(g: GraphBuilder, x: Value, gamma: str, eps: float) -> Value:
    """Returns `x` with mean 0 and variance 1 along its last axis, times a weight."""
    centred = x - g.reduce("mean", x, -1)
    variance = g.reduce("mean", centred * centred, -1)
    factors = g.unary("rsqrt", variance + eps)
    return centred * factors * g.weight(gamma)


def _layer_norm(g: GraphBuilder, x: Value, weight: str, bias: str, eps: float) -> list[Value]:
    return [_normalised(g, x, weight, eps) + g.weight(bias)]


def _lstm(
    g: GraphBuilder, x: Value, h: Value, c: Value, lengths: Value | None = None, *,
    directions: Any, options: CellOptions, hidden_size: int,
) -> list[Value]:  # fmt: skip
    """Writes the steps of an LSTM one after the other; T is known.

    Values of a step keep three axes, `(1, B, …)`, so that nothing is reshaped.
    """
    T = x.shape[0]
    assert isinstance(T, int)
    masks = None
    if lengths is not None:  # per step: which sequences it belongs to, `(1, B, 1)`
        by_row = g.reshape(lengths, (1, lengths.shape[0], 1))
        masks = [g.binary("less", g.constant(np.int32(t)), by_row) for t in range(T)]
    outputs, hs, cs = [], [], []
    for d, direction in enumerate(directions):
        products = _input_products(g, x, direction, options)
        ys, h_d, c_d = [], g.slice(h, 0, d, d + 1), g.slice(c, 0, d, d + 1)
        for t in reversed(range(T)) if d else range(T):
            part = g.slice(products, 0, t, t + 1)
            y, new_c = _step(g, part, h_d, c_d, direction, options)
            if masks is None:
                h_d, c_d = y, new_c
            else:
                h_d, c_d = g.where(masks[t], y, h_d), g.where(masks[t], new_c, c_d)
                y = g.where(masks[t], y, 0.0)
            ys.append(y)
        outputs.append(g.concat(ys[::-1] if d else ys, 0))
        hs.append(h_d)
        cs.append(c_d)
    return [g.concat(outputs, 2), g.concat(hs, 0), g.concat(cs, 0)]


def _input_products(g: GraphBuilder, x: Value, direction: Direction, options: CellOptions) -> Value:
    """Returns the input's part of the gates with the bias, for all steps at once."""
    w_ih, _, biases = direction
    bias = f"{w_ih}.bias" if biases else None
    if bias is not None:
        total = sum(np.asarray(g.graph.weights[name], np.float32) for name in biases)
        g.graph.weights[bias] = np.asarray(total)
    if not options.layer_norm:
        return g.linear(x, w_ih, bias)
    gamma = w_ih.replace("weight_ih", "gamma_ih")
    products = _normalised(g, g.linear(x, w_ih), gamma, CELL_EPSILON)
    return products if bias is None else products + g.weight(bias)


def _step(
    g: GraphBuilder, products: Value, h: Value, c: Value, direction: Direction,
    options: CellOptions,
) -> tuple[Value, Value]:  # fmt: skip
    """Returns h and c after a step."""
    w_ih, w_hh, _ = direction
    gamma_hh, gamma_c, beta_c = (
        w_ih.replace("weight_ih", name) for name in ("gamma_hh", "gamma_c", "beta_c")
    )
    recurrent = g.linear(h, w_hh)
    if options.layer_norm:
        recurrent = _normalised(g, recurrent, gamma_hh, CELL_EPSILON)
    parts = g.split(products + recurrent, 4)
    i, f, o = (function(g, options.recurrent_activation, parts[k]) for k in (0, 1, 3))
    added = i * function(g, options.activation, parts[2])
    shown = new_c = f * c + added
    if options.layer_norm:
        shown = _normalised(g, new_c, gamma_c, CELL_EPSILON) + g.weight(beta_c)
    new_h = o * function(g, options.activation, shown)
    pairs = zip(options.zoneout, (h, c), (new_h, new_c), strict=True)
    kept_h, kept_c = (new if p == 0 else old * p + new * (1 - p) for p, old, new in pairs)
    return kept_h, kept_c


_COMPOSED: dict[str, Any] = {"lstm": _lstm, "layer_norm": _layer_norm, "softplus": _softplus}


class LitertRunner:
    """A .tflite file in LiteRT's interpreter, on one thread; `is_exact` multiplies in float32."""

    def __init__(self, path: Path, *, is_exact: bool = False) -> None:
        interpreter = needed("ai_edge_litert.interpreter", "litert").Interpreter
        self.version = f"ai_edge_litert {version('ai-edge-litert')}, one thread"
        self._path = path
        try:
            model: dict[str, Any] = {"model_path": str(path)}
            if is_exact:
                model = {"model_content": with_float_products(path.read_bytes())}
            self._run = interpreter(**model, num_threads=1).get_signature_runner(SIGNATURE)
        except (ValueError, RuntimeError) as error:
            raise self._refused(error) from None

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        try:
            return dict(self._run(**{k: np.ascontiguousarray(a) for k, a in inputs.items()}))
        except (ValueError, RuntimeError) as error:
            raise self._refused(error) from None

    def _refused(self, error: Exception) -> FormatError:
        reason = " ".join(str(error).split())
        return FormatError(f"{self._path}: LiteRT cannot run it ({reason:.200})")


def with_float_products(data: bytes) -> bytes:
    """Returns the file with float32 products in place of int8 products.

    Weights and scales stay the same. The file must be a trusted one.
    """
    schema = needed("ai_edge_litert.schema_py_generated", "litert")
    model = schema.ModelT.InitFromPackedBuf(data)
    graph = model.subgraphs[0]
    model.operatorCodes.append(_code(schema, "DEQUANTIZE", 5))
    operators, floats = [], dict[int, int]()
    for operator in graph.operators:
        kind = model.operatorCodes[operator.opcodeIndex].builtinCode
        place = operator.inputs[1] if kind == schema.BuiltinOperator.FULLY_CONNECTED else None
        if place is not None and graph.tensors[place].type == schema.TensorType.INT8:
            if place not in floats:
                floats[place] = len(graph.tensors)
                shape = graph.tensors[place].shape
                graph.tensors.append(schema.TensorT(shape=shape, name="floats", hasRank=True))
                dequantize = schema.OperatorT(opcodeIndex=len(model.operatorCodes) - 1)
                dequantize.inputs, dequantize.outputs = [place], [floats[place]]
                operators.append(dequantize)
            operator.inputs = [operator.inputs[0], floats[place], *operator.inputs[2:]]
        operators.append(operator)
    graph.operators = operators
    return _packed(model, len(data))
