"""Tensors of the Open Inference Protocol as JSON, flat or nested."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from fastlstm.serve.http.errors import ApiError
from fastlstm.serve.http.structs import decode

FLOATS: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "FP64": np.dtype("<f8")}
"""Datatypes of numbers."""
Size = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
_SLICE = 1 << 12
"""Numbers encoded at a time."""
_NESTED = re.compile(rb"\[\s*\[")


class Nothing(Struct, forbid_unknown_fields=True):
    """Parameters of a tensor: none are known."""


class Tensor(Struct, forbid_unknown_fields=True, kw_only=True):
    """An input as it comes; `TensorSpec.struct` narrows it."""

    shape: tuple[Size, ...]
    datatype: str
    data: msgspec.Raw
    parameters: Nothing | None = None
    spec: ClassVar[TensorSpec]


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a model.

    Attributes:
        name: of the tensor.
        datatype: FP32 or FP64, or BYTES for names.
        shape: -1 where any size will do.
        columns: of the last axis; empty where the request says them.
        may_miss: null stands for a missing value.
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
        return ApiError(400, f"input '{self.name}' {what}", "inputs")

    def struct(self) -> type[Tensor]:
        """Returns the type of this input in a request, told from others by its name."""
        sizes = tuple(Size if size == -1 else Literal[size] for size in self.shape)
        element = {"type": ["string" if self.datatype == "BYTES" else "number"]}
        element["type"] += ["null"] * self.may_miss
        items = {"type": "array", "items": {"anyOf": [element, {"type": "array"}]}}
        about = f"last axis: {', '.join(self.columns)}; data may be nested like shape"
        data = Annotated[msgspec.Raw, Meta(description=about, extra_json_schema=items)]
        kind: Any = msgspec.defstruct(
            f"Input_{self.name}",
            [("shape", tuple[sizes]), ("datatype", Literal[self.datatype]), ("data", data)],  # type: ignore[valid-type]
            bases=(Tensor,),
            namespace={"spec": self},
            tag_field="name",
            tag=self.name,
            forbid_unknown_fields=True,
            kw_only=True,
        )
        return kind  # type: ignore[no-any-return]


def read_inputs(listed: list[Tensor]) -> dict[str, NDArray[Any]]:
    """Returns the tensors of a request by name: floats, or objects (text or None) for BYTES."""
    tensors: dict[str, NDArray[Any]] = {}
    for tensor in listed:
        spec = tensor.spec
        if spec.name in tensors:
            raise spec.wrong("comes twice; send it once")
        tensors[spec.name] = values = _array(tensor, spec)
        _check_values(values, spec)
    return tensors


def _array(tensor: Tensor, spec: TensorSpec) -> NDArray[Any]:
    flat, shape = _flat(tensor, spec), tensor.shape
    if len(flat) != math.prod(shape):
        expected = f"its shape {list(shape)} says {math.prod(shape)}"
        raise spec.wrong(f"has {len(flat)} elements, {expected}")
    if spec.datatype not in FLOATS:
        return np.array(flat, dtype=object).reshape(shape)
    wide = np.array(flat, dtype=np.float64)  # null becomes NaN
    with np.errstate(over="ignore"):
        return wide.astype(FLOATS[spec.datatype]).reshape(shape)


def _flat(tensor: Tensor, spec: TensorSpec) -> list[Any]:
    """Returns the elements, row by row, of flat or nested lists."""
    data, shape = tensor.data, tensor.shape
    kind: Any = float | None if spec.datatype in FLOATS else str | None
    depth = len(shape) if _NESTED.match(memoryview(data)) else 1
    for _ in range(depth):
        kind = list[kind]
    flat: list[Any] = decode(data, msgspec.json.Decoder(kind), within=f"input '{spec.name}' data")
    if depth == 1:
        return flat
    flat = [flat]
    for axis, size in enumerate(shape):
        for part in flat:
            if len(part) != size:
                came = f"nested data with a list of {len(part)} at axis {axis}"
                raise spec.wrong(f"has {came}, its shape {list(shape)} says a list of {size}")
        flat = list(chain.from_iterable(flat))
    return flat


def _check_values(values: NDArray[Any], spec: TensorSpec) -> None:
    if spec.datatype in FLOATS:
        with np.errstate(over="ignore"):  # the network computes in float32
            missing, infinite = np.isnan(values), np.isinf(values.astype(np.float32, copy=False))
        if infinite.any():
            place = np.argwhere(infinite)[0].tolist()
            raise spec.wrong(f"is beyond the range of float32 at {place}")
    else:
        missing = values == np.array(None)
    if missing.any() and not spec.may_miss:
        place = np.argwhere(missing)[0].tolist()
        what = "none was missing when the model was trained; fill it"
        raise spec.wrong(f"has a missing value (null) at {place}, {what}")


def answer_parts(
    head: Mapping[str, Any], outputs: Mapping[str, NDArray[np.floating]]
) -> Iterator[bytes]:
    """Yields the JSON of an answer, `head` and the outputs, so many numbers at a time."""
    encode = msgspec.json.encode
    text = encode(head)[:-1] + b',"outputs":['
    for place, (name, values) in enumerate(outputs.items()):
        datatype = f"FP{8 * values.itemsize}"
        tensor = {"name": name, "shape": list(values.shape), "datatype": datatype}
        text += (b"," if place else b"") + encode(tensor)[:-1] + b',"data":['
        flat = values.ravel()
        for first in range(0, flat.size, _SLICE):
            part = encode(flat[first : first + _SLICE].tolist())[1:-1]
            yield text + (b"," + part if first else part)
            text = b""
        text += b"]}"
    yield text + b"]}"
