"""A .tflite file built tensor by tensor, by the schema that LiteRT brings along (`LiteRTFile`), and
LiteRT's built-in operations, each a call that returns its result (`LiteRTOperations`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import ConfigError, MissingExtraError
from fastlstm.exchange.graph import Size
from fastlstm.runs.weight_formats import QuantizedMatrix

SCHEMA_VERSION, IDENTIFIER = 3, b"TFL3"
SIGNATURE = "serving_default"
ALIGNMENT = 16
"""Of every buffer in the file, as the schema asks for."""
LARGEST_FILE = (1 << 31) - 1
"""Offsets in a flatbuffer are 32-bit numbers with a sign."""
_REDUCTIONS = {"sum": "SUM", "mean": "MEAN", "max": "REDUCE_MAX"}
_SMALLEST_SCALE = np.finfo(np.float32).tiny
"""The kernels refuse scales of 0 and below float32's normal range."""
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
"""Every operation that is written -> the table of its options in the schema."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file: its place, its dtype and its shape."""

    index: int
    dtype: str
    shape: tuple[Size, ...]


class LiteRTFile:
    """Collects tensors and operations of a model."""

    def __init__(self, name: str) -> None:
        try:
            from ai_edge_litert import schema_py_generated as schema
        except ImportError:
            raise missing() from None
        self._schema, self._name = schema, name
        self._tensors: list[Any] = []
        self._operators: list[Any] = []
        self._codes: dict[tuple[str, int], int] = {}
        self._buffers: dict[bytes, int] = {b"": 0}  # the first is that of tensors without values
        self._constants: dict[tuple[int, str, tuple[int, ...]], Tensor] = {}
        self._metadata: list[Any] = []

    def tensor(self, name: str, dtype: str, shape: Sequence[Size]) -> Tensor:
        """Adds a tensor that is computed or given."""
        return self._tensor(name, dtype, shape, 0)

    def constant(
        self, array: NDArray[Any], name: str = "constant", scales: NDArray[Any] | None = None
    ) -> Tensor:
        """Adds a tensor with values; the same values are stored once. An int8 matrix has a scale
        for each row."""
        buffer = self._buffer(np.ascontiguousarray(array).tobytes())
        dtype = str(array.dtype)
        if scales is not None:
            return self._tensor(name, dtype, array.shape, buffer, self._quantization(scales))
        key = (buffer, dtype, array.shape)
        if key not in self._constants:
            self._constants[key] = self._tensor(name, dtype, array.shape, buffer)
        return self._constants[key]

    def op(
        self, kind: str, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor],
        version: int = 1, **options: Any,
    ) -> None:  # fmt: skip
        """Adds a built-in operation of the schema, with the first version that can do this; an
        input that is None is left out, `options` are the fields of its table of options."""
        schema, operator = self._schema, self._schema.OperatorT()
        operator.opcodeIndex = self._codes.setdefault((kind, version), len(self._codes))
        operator.inputs = [-1 if tensor is None else tensor.index for tensor in inputs]
        operator.outputs = [tensor.index for tensor in outputs]
        if table := _OPTIONS[kind]:
            operator.builtinOptionsType = getattr(schema.BuiltinOptions, f"{table}Options")
            operator.builtinOptions = getattr(schema, f"{table}OptionsT")(**options)
        self._operators.append(operator)

    def code(self, dtype: str) -> int:
        """Returns the schema's number for a dtype."""
        code: int = getattr(self._schema.TensorType, dtype.upper())
        return code

    def add_metadata(self, name: str, text: str) -> None:
        """Stores a text under a name."""
        entry = self._schema.MetadataT()
        entry.name, entry.buffer = name, self._buffer(text.encode())
        self._metadata.append(entry)

    def to_bytes(self, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> bytes:
        """Returns the file, whose inputs and outputs have these names in its signature."""
        schema = self._schema
        graph, signature, model = schema.SubGraphT(), schema.SignatureDefT(), schema.ModelT()
        graph.name, graph.tensors, graph.operators = self._name, self._tensors, self._operators
        graph.inputs = [tensor.index for tensor in inputs.values()]
        graph.outputs = [tensor.index for tensor in outputs.values()]
        signature.signatureKey, signature.subgraphIndex = SIGNATURE, 0
        signature.inputs = self._named(inputs)
        signature.outputs = self._named(outputs)
        model.version, model.description = SCHEMA_VERSION, "written by fastlstm"
        model.subgraphs, model.signatureDefs = [graph], [signature]
        model.operatorCodes = [self._code(*key) for key in self._codes]
        model.metadata = self._metadata
        model.buffers = [schema.BufferT(data=_values(data)) for data in self._buffers]
        return packed(model, sum(map(len, self._buffers)))

    def _tensor(
        self, name: str, dtype: str, shape: Sequence[Size], buffer: int, quantization: Any = None
    ) -> Tensor:
        tensor = self._schema.TensorT()
        tensor.name, tensor.buffer, tensor.quantization = name, buffer, quantization
        tensor.type, tensor.hasRank = self.code(dtype), True
        tensor.shape = [1 if isinstance(size, str) else size for size in shape]
        if any(isinstance(size, str) for size in shape):
            tensor.shapeSignature = [-1 if isinstance(size, str) else size for size in shape]
        self._tensors.append(tensor)
        return Tensor(len(self._tensors) - 1, dtype, tuple(shape))

    def _buffer(self, data: bytes) -> int:
        return self._buffers.setdefault(data, len(self._buffers))

    def _quantization(self, scales: NDArray[Any]) -> Any:
        made = self._schema.QuantizationParametersT()
        made.scale = scales.astype(np.float32)
        made.zeroPoint = np.zeros(len(scales), np.int64)
        made.quantizedDimension = 0
        return made

    def _named(self, tensors: dict[str, Tensor]) -> list[Any]:
        return [
            self._schema.TensorMapT(name=name, tensorIndex=tensor.index)
            for name, tensor in tensors.items()
        ]

    def _code(self, kind: str, version: int) -> Any:
        code = self._schema.OperatorCodeT()
        code.builtinCode = getattr(self._schema.BuiltinOperator, kind)
        code.deprecatedBuiltinCode = min(code.builtinCode, 127)  # what older runtimes read
        code.version = version
        return code


def _values(data: bytes) -> NDArray[np.uint8] | None:
    return np.frombuffer(data, np.uint8) if data else None


def packed(model: Any, num_bytes: int) -> bytes:
    """Returns a `ModelT` of the schema as a file; its buffers have `num_bytes` bytes."""
    from flatbuffers import Builder

    if num_bytes > LARGEST_FILE:
        raise ConfigError(
            f"{num_bytes} bytes of weights are more than a .tflite file can hold, {LARGEST_FILE};"
            " export with fewer bits per weight, or to onnx"
        )

    class AlignedBuilder(Builder):  # type: ignore[misc]
        """A builder whose vectors of bytes, the buffers, are aligned."""

        def StartVector(self, size: int, length: int, alignment: int) -> Any:  # noqa: N802
            return super().StartVector(size, length, ALIGNMENT if size == 1 else alignment)

    builder = AlignedBuilder(num_bytes + (64 << 10))
    builder.Finish(model.Pack(builder), IDENTIFIER)
    return bytes(builder.Output())


def missing() -> MissingExtraError:
    """Returns the error that ai-edge-litert is not installed."""
    return MissingExtraError("--to litert needs ai_edge_litert: pip install 'fastlstm[litert]'")


class LiteRTOperations:
    """Writes operations into a file, with the weights of a `Graph`."""

    def __init__(
        self, file: LiteRTFile, weights: Mapping[str, NDArray[Any] | QuantizedMatrix]
    ) -> None:
        self.weights = weights
        self._file = file
        self._made: dict[str, Tensor] = {}

    def op(
        self, kind: str, inputs: Sequence[Tensor | None], shape: Sequence[Size],
        dtype: str = "float32", *, version: int = 1, name: str | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Writes an operation of the schema with one result."""
        out = self._file.tensor(name or kind.lower(), dtype, shape)
        self._file.op(kind, inputs, [out], version, **options)
        return out

    def constant(self, array: Any, name: str = "constant") -> Tensor:
        """Returns a constant."""
        return self._file.constant(np.asarray(array), name)

    def binary(self, kind: str, a: Tensor, b: Tensor | float) -> Tensor:
        """Returns `a` and `b`, which is as large or smaller, combined."""
        other = b if isinstance(b, Tensor) else self.constant(np.asarray(b, a.dtype))
        return self.op(kind, [a, other], a.shape, a.dtype)

    def unary(self, kind: str, x: Tensor) -> Tensor:
        """Returns a function of `x`."""
        return self.op(kind, [x], x.shape, x.dtype)

    def where(self, condition: Tensor, a: Tensor, b: Tensor | float) -> Tensor:
        """Returns `a`, where the condition is False `b`."""
        other = b if isinstance(b, Tensor) else self.constant(np.asarray(b, a.dtype))
        return self.op("SELECT_V2", [condition, a, other], a.shape, a.dtype)

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        """Returns `x` in another dtype."""
        version = 3 if x.dtype == "int8" else 1
        before, after = self._file.code(x.dtype), self._file.code(dtype)
        return self.op(
            "CAST", [x], x.shape, dtype, version=version, inDataType=before, outDataType=after
        )

    def reduce(self, kind: str, x: Tensor, axis: int) -> Tensor:
        """Returns the "sum", "mean" or "max" along an axis, which stays with length 1."""
        shape = [1 if k == axis else size for k, size in enumerate(x.shape)]
        inputs = [x, self._integers([axis])]
        return self.op(_REDUCTIONS[kind], inputs, shape, x.dtype, keepDims=True)

    def normalised(self, x: Tensor, eps: float) -> Tensor:
        """Returns `x` with mean 0 and variance 1 along its last axis."""
        axis = len(x.shape) - 1
        centred = self.binary("SUB", x, self.reduce("mean", x, axis))
        variance = self.reduce("mean", self.binary("MUL", centred, centred), axis)
        factors = self.unary("RSQRT", self.binary("ADD", variance, eps))
        return self.binary("MUL", centred, factors)

    def slice(self, x: Tensor, axis: int, start: int, stop: int) -> Tensor:
        """Returns a part along an axis of known length."""
        if (start, stop) == (0, x.shape[axis]):
            return x
        begin, size = [0] * len(x.shape), [-1] * len(x.shape)
        begin[axis], size[axis] = start, stop - start
        inputs = [x, self._integers(begin), self._integers(size)]
        version = 5 if len(x.shape) > 4 else 1
        return self.op(
            "SLICE", inputs, _with(x.shape, axis, stop - start), x.dtype, version=version
        )

    def split(self, x: Tensor, axis: int, parts: int) -> list[Tensor]:
        """Returns equal parts along an axis of known length."""
        shape = _with(x.shape, axis, _known(x.shape[axis]) // parts)
        results = [self._file.tensor("split", x.dtype, shape) for _ in range(parts)]
        self._file.op("SPLIT", [self._integers(axis), x], results, numSplits=parts)
        return results

    def concat(self, tensors: Sequence[Tensor], axis: int) -> Tensor:
        """Joins tensors along an axis of known lengths."""
        first = tensors[0]
        if len(tensors) == 1:
            return first
        shape = _with(first.shape, axis, sum(_known(tensor.shape[axis]) for tensor in tensors))
        return self.op("CONCATENATION", tensors, shape, first.dtype, axis=axis)

    def reshape(self, x: Tensor, shape: Sequence[Size], name: str | None = None) -> Tensor:
        """Returns the same numbers in another shape, of which at most one axis has a name."""
        sizes = [-1 if isinstance(size, str) else size for size in shape]
        inputs = [x, self._integers(sizes)]
        return self.op("RESHAPE", inputs, shape, x.dtype, name=name, newShape=sizes)

    def transpose(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        """Returns `x` with its axes in this order."""
        shape = [x.shape[axis] for axis in axes]
        version = {5: 4, 6: 6}.get(len(axes), 3 if x.dtype == "bool" else 1)
        return self.op("TRANSPOSE", [x, self._integers(axes)], shape, x.dtype, version=version)

    def sort(self, x: Tensor) -> Tensor:
        """Returns `x` in ascending order along its last axis: TOPK_V2 has the largest first."""
        negative = self.unary("NEG", x)
        results = [self._file.tensor("topk_v2", t, x.shape) for t in (x.dtype, "int32")]
        self._file.op("TOPK_V2", [negative, self._integers(_known(x.shape[-1]))], results)
        return self.unary("NEG", results[0])

    def linear(self, x: Tensor, weight: str, bias: Tensor | None) -> Tensor:
        """Returns `x @ weight^T + bias` along the last axis.

        The kernels multiply int8 weights in int8, with `x` rounded row by row: a third of the time
        that the same weights take in float32.
        """
        w = self.weights[weight]
        is_int8 = isinstance(w, QuantizedMatrix) and w.weight_format == "int8"
        matrix = self._codes(weight) if is_int8 else self.floats(weight)
        version = 12 if is_int8 else 6 if bias is None else 5
        shape = (*x.shape[:-1], w.shape[0])
        return self.op(
            "FULLY_CONNECTED", [x, matrix, bias], shape, version=version, keepNumDims=True
        )

    def gather(self, table: str, indices: Tensor) -> Tensor:
        """Returns rows of a weight as float32."""
        w = self.weights[table]
        shape = (*indices.shape, w.shape[1])
        if not isinstance(w, QuantizedMatrix) or w.weight_format != "int8":
            return self.op("GATHER", [self.floats(table), indices], shape)
        rows = self.op("GATHER", [self.constant(w.codes, table), indices], shape, "int8", version=2)
        factors = self.constant(w.scales.astype(np.float32)[:, None], f"{table}.scales")
        factor = self.op("GATHER", [factors, indices], (*indices.shape, 1))
        return self.binary("MUL", self.cast(rows, "float32"), factor)

    def floats(self, weight: str) -> Tensor:
        """Returns a weight as float32, which the file holds in its own format."""
        if weight not in self._made:
            self._made[weight] = self._floats(weight)
        return self._made[weight]

    def _floats(self, weight: str) -> Tensor:
        w = self.weights[weight]
        if isinstance(w, QuantizedMatrix):
            if w.weight_format == "int8":
                return self.op("DEQUANTIZE", [self._codes(weight)], w.shape, version=5)
            w = w.dequantized()
        stored = self.constant(w, weight)
        if stored.dtype == "float16":
            return self.op("DEQUANTIZE", [stored], w.shape, version=3)
        return stored

    def _codes(self, weight: str) -> Tensor:
        """Returns a matrix as int8 with a scale for every row."""
        w, name = self.weights[weight], f"{weight}.codes"
        assert isinstance(w, QuantizedMatrix)
        if name not in self._made:
            scales = np.maximum(w.scales, _SMALLEST_SCALE)  # the codes of a scale of 0 are 0
            self._made[name] = self._file.constant(w.codes, weight, scales)
        return self._made[name]

    def _integers(self, numbers: Any) -> Tensor:
        return self.constant(np.asarray(numbers, np.int32), "integers")


def _with(shape: tuple[Size, ...], axis: int, size: int) -> tuple[Size, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _known(size: Size) -> int:
    assert isinstance(size, int), f"axis {size} has no known length"
    return size
