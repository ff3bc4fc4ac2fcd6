"""Tensors of the Open Inference Protocol: JSON, flat or nested, or binary behind the JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import counted, nearest_hint
from fastlstm.serve.http.errors import ApiError, shown, value_name
from fastlstm.serve.http.fields import Schema, check_names, object_schema, or_null, whole_number
from fastlstm.system.storage import MAX_JSON_DEPTH, is_deeper, unique_keys

_MAX_SIZE = (1 << 31) - 1
SIZE: Schema = {"type": "integer", "minimum": 0, "maximum": _MAX_SIZE}
FLOATS: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "FP64": np.dtype("<f8")}
"""Datatypes of numbers."""
_SLICE = 1 << 12
"""Numbers encoded at a time, with the interpreter held for some 5 ms."""
_MAX_KEYS, _MAX_LISTS = 1000, 100_000
_TENSOR_FIELDS = ("name", "shape", "datatype", "parameters", "data")
_NUMBERS = {int, float, type(None)}
_NAMES = {str, type(None)}


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a model.

    Attributes:
        name: of the tensor.
        datatype: FP32 or FP64, or BYTES for names.
        shape: -1 where any size will do.
        columns: of the last axis; empty where the request says them.
        may_miss: null and NaN stand for a missing value.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    columns: tuple[str, ...] = ()
    may_miss: bool = False

    def as_json(self) -> dict[str, Any]:
        """The protocol's tensor metadata; the columns are a parameter of it."""
        tensor = {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}
        return {**tensor, "parameters": {"columns": list(self.columns)}} if self.columns else tensor

    def wrong(self, what: str) -> ApiError:
        return _bad(f"input '{self.name}' {what}")

    def schema(self) -> Schema:
        element: Schema = {"type": "string" if self.datatype == "BYTES" else "number"}
        sizes = [SIZE if size == -1 else {"const": size} for size in self.shape]
        shape = {"prefixItems": sizes, "items": False, "minItems": len(sizes)}
        data = {"anyOf": [or_null(element) if self.may_miss else element, {"type": "array"}]}
        properties = {
            "name": {"const": self.name},
            "shape": {"type": "array", **shape},
            "datatype": {"const": self.datatype},
            "parameters": or_null(object_schema({})),
            "data": {"type": "array", "items": data},
        }
        schema = object_schema(properties, "name", "shape", "datatype", "data")
        about = f"last axis: {', '.join(self.columns)}; data may be nested like shape"
        return {**schema, "description": about}


def split_body(body: bytes, header_length: int | None) -> tuple[dict[str, Any], memoryview]:
    """Returns the JSON object of a body, of this length or all of it, and the bytes behind it."""
    length = len(body) if header_length is None else header_length
    if length > len(body):
        size = counted(len(body), "byte")
        raise _bad(f"Inference-Header-Content-Length is {length}, the body has only {size}")
    try:
        if body.count(b"[", 0, length) > _MAX_LISTS:
            raise ValueError(f"it has more than {_MAX_LISTS} lists; send data flat")
        text = body[:length].decode("utf-8")
        value = json.loads(text, object_pairs_hook=_Keys().read)
        is_too_deep = is_deeper(value, MAX_JSON_DEPTH)
    except RecursionError:
        is_too_deep = True
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        why = "a number has too many digits" if "digits" in str(error) else str(error)
        raise _bad(f"the request is not valid JSON: {shown(why)}") from None
    if is_too_deep:
        raise _bad(f"the JSON is nested deeper than {MAX_JSON_DEPTH} levels; send it flatter")
    if not isinstance(value, dict):
        raise _bad(f"the request is {value_name(value)}, expected a JSON object")
    return value, memoryview(body)[length:]


class _Keys:
    """Counts the keys of a request's objects while it is parsed."""

    def __init__(self) -> None:
        self._count = 0

    def read(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._count += 1 + len(pairs)
        if self._count > _MAX_KEYS:
            raise ValueError(f"its objects have more than {_MAX_KEYS} keys together")
        return unique_keys(pairs)


def read_inputs(
    listed: Any, binary: memoryview, specs: Mapping[str, TensorSpec]
) -> dict[str, NDArray[Any]]:
    """Returns the tensors of a request by name: floats, or objects (text or None) for BYTES.

    Args:
        listed: `inputs` of the request.
        binary: what lies behind its JSON.
        specs: what the model takes, by name.
    """
    if not isinstance(listed, list) or not all(isinstance(tensor, dict) for tensor in listed):
        came = "'inputs' is missing" if listed is None else f"inputs is {value_name(listed)}"
        raise _bad(f"{came}, expected a list of tensors: {', '.join(specs)}")
    tensors: dict[str, NDArray[Any]] = {}
    for tensor in listed:
        spec = _spec_of(tensor, specs)
        if spec.name in tensors:
            raise spec.wrong("comes twice; send it once")
        shape = _shape(tensor.get("shape"), spec)
        size = _binary_size(tensor, spec)
        if size is None:
            flat = _flat(tensor.get("data"), shape, spec)
            tensors[spec.name] = _array(flat, spec).reshape(shape)
            continue
        if "data" in tensor:
            raise spec.wrong("has data and binary_data_size; send one of them")
        if size > len(binary):
            left = counted(len(binary), "byte")
            raise spec.wrong(f"has binary_data_size {size}, only {left} left of the body")
        tensors[spec.name] = _from_binary(binary[:size], shape, spec)
        binary = binary[size:]
    if len(binary):
        left = counted(len(binary), "byte")
        raise _bad(f"behind the last tensor: {left}; send what its shape says")
    for spec in specs.values():
        if spec.name in tensors:
            _check_values(tensors[spec.name], spec)
    return tensors


def _spec_of(tensor: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> TensorSpec:
    name = tensor.get("name")
    if not isinstance(name, str) or name not in specs:
        hint = nearest_hint(name[:64], specs) if isinstance(name, str) else ""
        known = ", ".join(specs)
        raise _bad(f"there is no input {value_name(name)}{hint}; this model takes {known}")
    check_names(tensor, _TENSOR_FIELDS, of=f"input '{name}'")
    spec, datatype = specs[name], tensor.get("datatype")
    if datatype != spec.datatype:
        raise spec.wrong(f"has datatype {value_name(datatype)}, expected '{spec.datatype}'")
    return spec


def _shape(value: Any, spec: TensorSpec) -> tuple[int, ...]:
    listed = value if isinstance(value, list) else [None]
    sizes = [size for size in map(whole_number, listed) if size is not None]
    if len(sizes) < len(listed) or any(not 0 <= size <= _MAX_SIZE for size in sizes):
        expected = f"a list of whole numbers, 0 to {_MAX_SIZE}"
        raise spec.wrong(f"has shape {short(value)}, expected {expected}")
    fits = len(sizes) == len(spec.shape) and all(
        wanted in (-1, size) for size, wanted in zip(sizes, spec.shape, strict=True)
    )
    if not fits:
        expected = f"{list(spec.shape)}, the last axis being {shown(', '.join(spec.columns))}"
        raise spec.wrong(f"has shape {short(sizes)}, expected {expected}")
    return tuple(sizes)


def _flat(data: Any, shape: tuple[int, ...], spec: TensorSpec) -> list[Any]:
    """Returns the elements, row by row, of flat or nested lists."""
    if not isinstance(data, list):
        raise spec.wrong(f"has {value_name(data)} as data, expected a list")
    flat = data
    if data and isinstance(data[0], list):
        flat = [data]
        for axis, size in enumerate(shape):
            for part in flat:
                if not isinstance(part, list) or len(part) != size:
                    expected = f"its shape {list(shape)} says a list of {size}"
                    came = f"nested data with {value_name(part)} at axis {axis}"
                    raise spec.wrong(f"has {came}, {expected}")
            flat = list(chain.from_iterable(flat))
    if len(flat) != math.prod(shape):
        expected = f"its shape {list(shape)} says {math.prod(shape)}"
        raise spec.wrong(f"has {len(flat)} elements, {expected}")
    return flat


def _array(flat: list[Any], spec: TensorSpec) -> NDArray[Any]:
    good = _NUMBERS if spec.datatype in FLOATS else _NAMES
    if not good.issuperset(map(type, flat)):
        wrong = next(number for number, value in enumerate(flat) if type(value) not in good)
        expected = "numbers" if spec.datatype in FLOATS else "strings"
        raise spec.wrong(f"has {value_name(flat[wrong])} as element {wrong}, expected {expected}")
    if spec.datatype not in FLOATS:
        return np.array(flat, dtype=object)
    try:
        wide = np.array(flat, dtype=np.float64)  # null becomes NaN
    except OverflowError:
        raise spec.wrong("has a number beyond the range of float32") from None
    with np.errstate(over="ignore"):
        return wide.astype(FLOATS[spec.datatype])


def _from_binary(data: memoryview, shape: tuple[int, ...], spec: TensorSpec) -> NDArray[Any]:
    count = math.prod(shape)
    if spec.datatype in FLOATS:
        dtype = FLOATS[spec.datatype]
        if len(data) != dtype.itemsize * count:
            expected = f"its shape {list(shape)} of {spec.datatype} says {dtype.itemsize * count}"
            raise spec.wrong(f"has {counted(len(data), 'byte')}, {expected}")
        return np.frombuffer(data, dtype).astype(dtype.newbyteorder("=")).reshape(shape)
    names: list[str] = []
    while len(data) >= 4:
        end = 4 + int.from_bytes(data[:4], "little")
        if end > len(data):
            break
        try:
            names.append(bytes(data[4:end]).decode("utf-8"))
        except UnicodeDecodeError:
            raise _bad(f"element {len(names)} of input '{spec.name}' is not UTF-8") from None
        data = data[end:]
    if len(data) or len(names) != count:
        sent = f"{counted(len(names), 'whole element')} and {counted(len(data), 'more byte')}"
        raise spec.wrong(f"holds {sent}, its shape {list(shape)} says {count}")
    return np.array(names, dtype=object).reshape(shape)


def _check_values(values: NDArray[Any], spec: TensorSpec) -> None:
    if spec.datatype in FLOATS:
        with np.errstate(over="ignore"):  # the network computes in float32
            missing, infinite = np.isnan(values), np.isinf(values.astype(np.float32, copy=False))
        if infinite.any():
            place = np.argwhere(infinite)[0].tolist()
            raise spec.wrong(f"is infinite, or beyond the range of float32, at {place}")
    else:
        missing = values == np.array(None)
    if missing.any() and not spec.may_miss:
        place = np.argwhere(missing)[0].tolist()
        what = "none was missing when the model was trained; fill it"
        raise spec.wrong(f"has a missing value (null or NaN) at {place}, {what}")


def _binary_size(tensor: Mapping[str, Any], spec: TensorSpec) -> int | None:
    """Returns the `binary_data_size` of an input; None if it is JSON."""
    parameters = parameters_of(tensor, f"input '{spec.name}'", "binary_data_size")
    size = parameters.get("binary_data_size")
    if size is not None and (type(size) is not int or size < 0):
        raise spec.wrong(f"has binary_data_size {value_name(size)}, expected a whole number")
    return size


def parameters_of(value: Mapping[str, Any], what: str, *known: str) -> dict[str, Any]:
    """Returns the `parameters` of a request or tensor, only known ones if any are named."""
    parameters = value.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise _bad(f"parameters of {what} is {value_name(parameters)}, expected an object")
    if parameters and known:
        check_names(parameters, known, f"parameter of {what}")
    return parameters or {}


class Answer(NamedTuple):
    """The body of an answer.

    Attributes:
        parts: of the body, encoded one by one.
        length: of the body; None while it is not known, of several parts of JSON.
        json_length: of the JSON if binary data follows, else None.
    """

    parts: Iterator[bytes]
    length: int | None
    json_length: int | None


def encode_answer(
    head: Mapping[str, Any], outputs: Mapping[str, NDArray[np.floating]], binary: frozenset[str]
) -> Answer:
    """Returns the body of an answer: `head` and the outputs, those named in `binary` as bytes."""
    parts = _json_parts(head, outputs, binary)
    tail = [
        values.astype(FLOATS[_datatype(values)]).tobytes()
        for name, values in outputs.items()
        if name in binary
    ]
    if not tail and sum(values.size for values in outputs.values()) > _SLICE:
        return Answer(parts, None, None)
    text = b"".join(parts)
    whole = b"".join([text, *tail])
    return Answer(iter([whole]), len(whole), len(text) if tail else None)


def _json_parts(
    head: Mapping[str, Any], outputs: Mapping[str, NDArray[np.floating]], binary: frozenset[str]
) -> Iterator[bytes]:
    """Yields the JSON of an answer, so many numbers at a time."""
    text = _dumps(head)[:-1] + b',"outputs":['
    for place, (name, values) in enumerate(outputs.items()):
        tensor = {"name": name, "shape": list(values.shape), "datatype": _datatype(values)}
        text += b"," if place else b""
        if name in binary:
            text += _dumps({**tensor, "parameters": {"binary_data_size": values.nbytes}})
            continue
        text += _dumps(tensor)[:-1] + b',"data":['
        flat = values.ravel()
        for first in range(0, flat.size, _SLICE):
            part = _dumps(flat[first : first + _SLICE].tolist())[1:-1]
            yield text + (b"," + part if first else part)
            text = b""
        text += b"]}"
    yield text + b"]}"


def _datatype(values: NDArray[np.floating]) -> str:
    return f"FP{8 * values.itemsize}"


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def short(value: Any) -> str:
    """Returns a value as an error shows it, a short list by its elements."""
    return shown(str(value)) if isinstance(value, list) and len(value) < 9 else value_name(value)


def _bad(message: str) -> ApiError:
    return ApiError(400, message)
