"""Formats of stored weights: fp32, fp16, int8, int4; each whole or block-sparse. No torch.

Matrices are quantized, 1-d tensors (biases, norms) stay fp32 (fp16 in fp16 files). For a matrix
NAME of shape (rows, columns), a file holds:

- fp32, fp16: ``NAME``.
- int8: ``NAME`` I8 (rows, columns) in [-127, 127], ``NAME.scales`` F32 (rows,).
- int4: ``NAME`` U8 (rows, ceil(columns / 2)), codes in [-7, 7] stored as code + 8, the even column
  in the low four bits; ``NAME.scales`` F16 (rows, ceil(columns / 64)).
- block-sparse (not int4): ``NAME.blocks`` (blocks, 16, 4) in the format's dtype, ``NAME.columns``
  U16 (blocks,) first column / 4, ascending in each row of blocks, ``NAME.starts`` I32 (rows of
  blocks + 1,) and with int8 ``NAME.scales``. The rows of a block belong to one gate.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors
import safetensors.numpy

from fastlstm.errors import ConfigError, CorruptFileError, FormatError, NonFiniteError, nearest_hint
from fastlstm.system.fields import is_number

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMATS_IN_FILES = ("fp32", "fp16", "int8", "int4")
GROUP = 64
"""Successive values of a row that share an int4 scale."""
BLOCK_ROWS, BLOCK_COLUMNS = 16, 4
_LARGEST_CODE = {"int8": 127, "int4": 7}
_FLOAT16_NORMAL, _FLOAT16_SMALLEST = 2.0**-14, 2.0**-24
_MATRIX_DTYPES = {"fp32": "F32", "fp16": "F16", "int8": "I8", "int4": "U8"}
_NUMPY_DTYPES = {
    **{"F32": np.float32, "F16": np.float16, "I8": np.int8, "U8": np.uint8},
    **{"U16": np.uint16, "I32": np.int32},
}
_STRUCTURES = ("none", "blocks", "units")
_FREE_BYTES, _MAX_GROWTH = 64 << 20, 2000
"""Limits of what a block-sparse file may describe: bytes, and times its own size."""


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A matrix as integers and scales.

    Attributes:
        codes: int8 `(rows, columns)`, in [-127, 127] or [-7, 7].
        scales: int8: float32 `(rows,)`; int4: float16 `(rows, ceil(columns / 64))`.
        weight_format: "int8" or "int4".
    """

    codes: NDArray[np.int8]
    scales: NDArray[Any]
    weight_format: str

    @property
    def shape(self) -> tuple[int, ...]:
        """`(rows, columns)`."""
        return self.codes.shape

    @property
    def ndim(self) -> int:
        return 2

    def dequantized(self) -> NDArray[np.float32]:
        """Returns the matrix as float32 `(rows, columns)`."""
        return self.codes * _by_value(self.scales, self.shape[1])


def check_format(weight_format: Any, known: Sequence[str] = FORMATS_IN_FILES) -> None:
    """Raises ConfigError unless this is one of the known formats."""
    if weight_format not in known:
        raise ConfigError(
            f"weights are {weight_format!r}{nearest_hint(weight_format, known)}, expected one of"
            f" {', '.join(known)}"
        )


def quantize(w: NDArray[Any], weight_format: str) -> QuantizedMatrix:
    """Rounds a matrix `(rows, columns)` to int8 or int4.

    int8 has one scale per row, max / 127. int4 has one scale per 64 values of a row: max / 7,
    rounded to fp16; below fp16's normal range it is rounded up to a power of two. Rounding again
    thus gives the same codes and scales. Rows or groups with NaN, or values beyond every scale, get
    the scale NaN.
    """
    w = np.asarray(w, np.float32)
    largest = _LARGEST_CODE[weight_format]
    with np.errstate(invalid="ignore", over="ignore"):
        if weight_format == "int8":
            scales = abs(w).max(axis=1, initial=0.0) / np.float32(largest)
        else:
            scales = _half_scales(_grouped(abs(w)).max(axis=2, initial=0.0) / np.float32(largest))
        scales[~np.isfinite(scales * np.float32(largest))] = np.nan
        by_value = np.broadcast_to(_by_value(scales, w.shape[1]), w.shape)
        codes = np.divide(w, by_value, out=np.zeros_like(w), where=by_value > 0)
    codes = np.clip(np.rint(codes), -largest, largest).astype(np.int8)
    if weight_format == "int4":  # groups of tiny values, which all become 0
        scales[np.isfinite(scales) & ~_grouped(codes).any(axis=2)] = 0
    return QuantizedMatrix(codes, scales, weight_format)


def _half_scales(exact: NDArray[np.float32]) -> NDArray[np.float16]:
    # Not by log2, whose last bit differs between machines.
    fraction, exponent = np.frexp(np.maximum(exact, np.float32(_FLOAT16_SMALLEST)))
    powers = np.ldexp(np.float32(1.0), exponent - (fraction == 0.5))
    return np.where((exact > 0) & (exact < _FLOAT16_NORMAL), powers, exact).astype(np.float16)


def _grouped(values: NDArray[Any]) -> NDArray[Any]:
    """Rows as `(rows, groups, 64)`, padded with zeros."""
    rows, columns = values.shape
    padded = np.zeros((rows, -(-columns // GROUP) * GROUP), values.dtype)
    padded[:, :columns] = values
    return padded.reshape(rows, -1, GROUP) if padded.size else padded.reshape(rows, 0, GROUP)


def _by_value(scales: NDArray[Any], columns: int) -> NDArray[np.float32]:
    """Scales as float32, one per value or per row."""
    whole = scales.astype(np.float32)
    return whole[:, None] if scales.ndim == 1 else np.repeat(whole, GROUP, axis=1)[:, :columns]


def as_floats(weights: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    """Returns all weights as float32."""
    return {
        name: w.dequantized() if isinstance(w, QuantizedMatrix) else np.asarray(w, np.float32)
        for name, w in weights.items()
    }


def rounded(weights: Mapping[str, Any], weight_format: str) -> dict[str, NDArray[np.float32]]:
    """Returns the weights after rounding to a format, as float32."""
    return as_floats(in_format(weights, weight_format))


def in_format(weights: Mapping[str, Any], weight_format: str) -> dict[str, Any]:
    """Returns weights as a file holds them: float32, float16 or QuantizedMatrix.

    Raises ConfigError: an unknown format, or a value beyond its range; NonFiniteError: a weight is
    NaN or Inf.
    """
    check_format(weight_format)
    return {name: _one_in_format(name, w, weight_format) for name, w in weights.items()}


def _one_in_format(name: str, w: Any, weight_format: str) -> Any:
    if isinstance(w, QuantizedMatrix) and w.weight_format == weight_format:
        if not np.isfinite(w.scales).all():
            raise _not_finite(name)
        return w
    floats = w.dequantized() if isinstance(w, QuantizedMatrix) else np.asarray(w, np.float32)
    if not np.isfinite(floats).all():
        raise _not_finite(name)
    stored: Any = floats
    if weight_format == "fp16":
        with np.errstate(over="ignore"):
            stored = floats.astype(np.float16)
    elif weight_format != "fp32" and floats.ndim == 2:
        stored = quantize(floats, weight_format)
    if not np.isfinite(stored.scales if isinstance(stored, QuantizedMatrix) else stored).all():
        raise ConfigError(
            f"'{name}' holds {abs(floats).max():g}, too large for {weight_format}; store these"
            " weights as int8 or fp32"
        )
    return stored


def _not_finite(name: str) -> NonFiniteError:
    return NonFiniteError(f"'{name}' holds NaN or Inf; weights in a file are finite")


def encode_weights(
    weights: Mapping[str, Any], weight_format: str, block_sparse: Collection[str] = ()
) -> bytes:
    """Returns a safetensors file of weights (float arrays or `QuantizedMatrix`) in a format.

    The zero blocks of the matrices `block_sparse` are left out. Raises ConfigError: an unknown
    format, block-sparse int4, or a value beyond the format's range; NonFiniteError: a weight is NaN
    or Inf.
    """
    if block_sparse and weight_format == "int4":
        raise ConfigError("int4 weights cannot be block-sparse; use int8, fp16 or fp32")
    tensors: dict[str, NDArray[Any]] = {}
    for name, w in in_format(weights, weight_format).items():
        values = w
        if isinstance(w, QuantizedMatrix):
            values = _pack_nibbles(w.codes) if weight_format == "int4" else w.codes
            tensors[f"{name}.scales"] = w.scales
        if name in block_sparse:
            blocks, columns, starts = to_blocks(values, num_gates(name, len(values)))
            tensors[f"{name}.blocks"] = blocks
            tensors[f"{name}.columns"], tensors[f"{name}.starts"] = columns, starts
        else:
            tensors[name] = values
    return bytes(safetensors.numpy.save({n: np.ascontiguousarray(t) for n, t in tensors.items()}))


def _pack_nibbles(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    rows, columns = codes.shape
    padded = np.full((rows, columns + columns % 2), 8, np.uint8)
    padded[:, :columns] = codes + 8
    packed: NDArray[np.uint8] = padded[:, ::2] | padded[:, 1::2] << 4
    return packed


def _unpack_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.int8]:
    nibbles = np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1)
    return nibbles.astype(np.int8) - np.int8(8)


def num_gates(name: str, rows: int) -> int:
    """Returns the number of equal parts of a matrix's rows that no block crosses."""
    is_lstm = "weight_ih" in name or "weight_hh" in name
    return 4 if is_lstm and rows % 4 == 0 else 1


def block_grid(values: NDArray[Any], gates: int) -> NDArray[Any]:
    """Returns a matrix as `(rows of blocks, columns of blocks, 16, 4)`, padded with zeros."""
    rows, columns = values.shape
    per_gate = -(-rows // (gates * BLOCK_ROWS))
    across = -(-columns // BLOCK_COLUMNS)
    padded = np.zeros((gates, per_gate * BLOCK_ROWS, across * BLOCK_COLUMNS), values.dtype)
    padded[:, : rows // gates, :columns] = values.reshape(gates, -1, columns)
    return padded.reshape(gates * per_gate, BLOCK_ROWS, across, BLOCK_COLUMNS).swapaxes(1, 2)


def may_be_blocks(values: NDArray[Any]) -> bool:
    """Returns whether an array can be stored as blocks: their columns have 16-bit numbers."""
    return values.ndim == 2 and values.shape[1] <= BLOCK_COLUMNS << 16


def to_blocks(
    values: NDArray[Any], gates: int
) -> tuple[NDArray[Any], NDArray[np.uint16], NDArray[np.int32]]:
    """Returns the blocks of a matrix that are not all zero, their columns and the rows' starts."""
    grid = block_grid(values, gates)
    is_kept = (grid != 0).any(axis=(2, 3))
    starts = np.concatenate([[0], is_kept.sum(axis=1).cumsum()]).astype(np.int32)
    return grid[is_kept], np.nonzero(is_kept)[1].astype(np.uint16), starts


def from_blocks(
    blocks: NDArray[Any],
    columns: NDArray[np.uint16],
    starts: NDArray[np.int32],
    shape: tuple[int, ...],
    gates: int,
) -> NDArray[Any]:
    """Returns the matrix of shape `shape` with these blocks, else zeros."""
    grid = block_grid(np.zeros(shape, blocks.dtype), gates)
    grid[np.repeat(np.arange(len(starts) - 1), np.diff(starts)), columns] = blocks
    padded = grid.swapaxes(1, 2).reshape(gates, -1, grid.shape[1] * BLOCK_COLUMNS)
    return padded[:, : shape[0] // gates, : shape[1]].reshape(shape)


def decode_weights(
    data: bytes, shapes: Mapping[str, tuple[int, ...]], weight_format: str, origin: Path
) -> dict[str, NDArray[np.float32] | QuantizedMatrix]:
    """Parses a safetensors file of weights and checks every code, scale and index.

    Returns float32 arrays; for int8 and int4 a `QuantizedMatrix` for each matrix. Messages name
    `origin`. Raises CorruptFileError: not a safetensors file, or values that fastlstm never writes;
    FormatError: other tensors, shapes or dtypes.
    """
    check_format(weight_format)
    try:
        tensors = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    except (safetensors.SafetensorError, ValueError, OverflowError) as error:
        raise CorruptFileError(f"{origin}: not a valid safetensors file ({error})") from None
    reader = _WeightReader(tensors, weight_format, origin)
    dense = sum(
        4 * int(np.prod(shape)) for name, shape in shapes.items() if f"{name}.blocks" in tensors
    )
    if dense > _FREE_BYTES + _MAX_GROWTH * len(data):
        raise CorruptFileError(f"{origin}: {len(data)} bytes describe {dense} bytes of weights")
    weights = {name: reader.weight(name, shape) for name, shape in shapes.items()}
    if tensors:
        unknown = min(tensors)
        raise FormatError(
            f"{origin}: has a tensor '{unknown}' that a model in {weight_format} lacks"
            f"{nearest_hint(unknown, shapes)}; config.json is of another model"
        )
    return weights


@dataclass
class _WeightReader:
    """Takes and checks the tensors of a parsed file."""

    tensors: dict[str, Any]
    weight_format: str
    origin: Path

    def weight(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32] | QuantizedMatrix:
        is_quantized = len(shape) == 2 and self.weight_format in _LARGEST_CODE
        if f"{name}.blocks" in self.tensors and len(shape) == 2 and self.weight_format != "int4":
            values = self._blocks(name, shape)
        elif is_quantized and self.weight_format == "int4":
            codes = _unpack_nibbles(self._take(name, "U8", (shape[0], -(-shape[1] // 2))))
            values = codes[:, : shape[1]]
            is_good = (codes != -8).all() and (codes[:, shape[1] :] == 0).all()
            self._check(is_good, name, "has codes outside -7 … 7, or padding that is not 0")
        else:
            is_float = not is_quantized and self.weight_format != "fp16"
            format_of_values = "fp32" if is_float else self.weight_format
            values = self._take(name, _MATRIX_DTYPES[format_of_values], shape)
        if not is_quantized:
            return values.astype(np.float32, copy=False)
        if self.weight_format == "int8":
            scales = self._take(f"{name}.scales", "F32", shape[:1])
            self._check((values != -128).all(), name, "has codes outside -127 … 127")
        else:
            scales = self._take(f"{name}.scales", "F16", (shape[0], -(-shape[1] // GROUP)))
        with np.errstate(over="ignore"):
            largest = scales.astype(np.float32) * np.float32(_LARGEST_CODE[self.weight_format])
        is_scale = np.isfinite(largest) & (scales >= 0)
        fault = "has a scale that is negative, NaN, Inf or too large"
        self._check(is_scale.all(), f"{name}.scales", fault)
        return QuantizedMatrix(values, scales, self.weight_format)

    def _blocks(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        gates = num_gates(name, shape[0])
        across = -(-shape[1] // BLOCK_COLUMNS)
        down = gates * -(-shape[0] // (gates * BLOCK_ROWS))
        starts = self._take(f"{name}.starts", "I32", (down + 1,))
        steps = np.diff(starts.astype(np.int64))
        is_ascending = starts[0] == 0 and ((steps >= 0) & (steps <= across)).all()
        self._check(is_ascending, f"{name}.starts", "does not ascend from 0 within the matrix")
        num = int(starts[-1])
        columns = self._take(f"{name}.columns", "U16", (num,))
        is_first = np.zeros(num, bool)
        is_first[starts[:-1][steps > 0]] = True
        is_after = np.diff(columns.astype(np.int64), prepend=-1) > 0
        is_good = (columns < across).all() and (is_first | is_after).all()
        self._check(is_good, f"{name}.columns", "does not ascend within the matrix")
        dtype = _MATRIX_DTYPES[self.weight_format]
        blocks = self._take(f"{name}.blocks", dtype, (num, BLOCK_ROWS, BLOCK_COLUMNS))
        values = from_blocks(blocks, columns, starts, shape, gates)
        is_good = np.count_nonzero(values) == np.count_nonzero(blocks)
        self._check(is_good, f"{name}.blocks", "has padding that is not 0")
        return values

    def _take(self, name: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        if name not in self.tensors:
            raise FormatError(f"{self.origin}: lacks '{name}'; config.json is of another model")
        view = self.tensors.pop(name)
        if tuple(view["shape"]) != shape or view["dtype"] != dtype:
            raise FormatError(
                f"{self.origin}: '{name}' is {tuple(view['shape'])} {view['dtype']}, expected"
                f" {shape} {dtype} in a model in {self.weight_format}; it is of another model"
            )
        return np.frombuffer(view["data"], _NUMPY_DTYPES[dtype]).reshape(shape)

    def _check(self, is_good: Any, name: str, problem: str) -> None:
        if not is_good:
            raise CorruptFileError(f"{self.origin}: '{name}' {problem}")


def checked_compression(value: Any) -> dict[str, Any]:
    """Returns the valid value of `compression` in config.json; else raises ValueError."""
    about = _object(value, "compression")
    weights, share, structured = (about.get(n) for n in ("weights", "prune", "structured"))
    if weights not in FORMATS_IN_FILES:
        raise ValueError(
            f"compression.weights is {weights!r:.80}, expected one of {', '.join(FORMATS_IN_FILES)}"
        )
    is_share = isinstance(share, float) and 0 < share < 1
    if not ((share is None and structured is None) or (is_share and structured in _STRUCTURES)):
        raise ValueError(
            f"compression.prune is {share!r:.80} and compression.structured {structured!r:.80},"
            f" expected a share and one of {', '.join(_STRUCTURES)}"
        )
    _object(about.get("options"), "compression.options")
    source = _object(about.get("source"), "compression.source")
    for name in ("path", "model_sha256"):
        if not isinstance(text := source.get(name), str):
            raise ValueError(f"compression.source.{name} is {text!r:.80}, expected a text")
    rate = source.get("learning_rate")
    if rate is not None and not (is_number(rate) and 0 <= rate < 1e3):
        raise ValueError(f"compression.source.learning_rate is {rate!r:.80}, expected a number")
    return about


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r:.80}, expected a JSON object")
    return value
