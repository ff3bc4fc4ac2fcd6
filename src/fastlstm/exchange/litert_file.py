"""`LiteRTFile`: a .tflite file built tensor by tensor, by the schema that LiteRT brings along."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastlstm.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fastlstm.exchange.graph import Size

SCHEMA_VERSION, IDENTIFIER = 3, b"TFL3"
SIGNATURE = "serving_default"
ALIGNMENT = 16
"""Of every buffer in the file, as the schema asks for."""
LARGEST_FILE = (1 << 31) - 1
"""Offsets in a flatbuffer are 32-bit numbers with a sign."""
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
    """Collects tensors and operations of a model.

    Args:
        name: of the model.

    Raises:
        MissingExtraError: ai-edge-litert is not installed.
    """

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
        """Adds a tensor with values; the same values are stored once.

        Args:
            array: of any dtype.
            name: of the tensor.
            scales: of an int8 matrix, one per row.
        """
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
        """Adds an operation.

        Args:
            kind: name in the schema's list of built-in operations.
            inputs: in the schema's order; None is one left out.
            outputs: tensors that it computes.
            version: the first one of the operation that can do this.
            options: fields of its table of options.
        """
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
        """Returns the file, whose inputs and outputs have these names in its signature.

        Raises:
            ConfigError: it would be too large for the format.
        """
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
    """Returns a `ModelT` of the schema as a file.

    Args:
        model: of which the buffers have `num_bytes` bytes.
        num_bytes: of the weights.

    Raises:
        ConfigError: it would be too large for the format.
    """
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
