"""`LiteRTOperations`: LiteRT's built-in operations, each a call that returns its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastlstm.exchange.litert_file import LiteRTFile, Tensor
from fastlstm.runs.weight_formats import QuantizedMatrix

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from fastlstm.exchange.graph import Size

_REDUCTIONS = {"sum": "SUM", "mean": "MEAN", "max": "REDUCE_MAX"}
_SMALLEST_SCALE = np.finfo(np.float32).tiny
"""The kernels refuse scales of 0 and below float32's normal range."""


class LiteRTOperations:
    """Writes operations into a file.

    Args:
        file: that they go to.
        weights: arrays and matrices in int8, by name, as in `Graph`.
    """

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
