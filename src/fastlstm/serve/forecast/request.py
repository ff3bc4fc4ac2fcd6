"""An inference request to a forecaster: its fields and tensors, checked and combined.

Tensors of the Open Inference Protocol come as JSON, flat or nested.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from fastlstm.errors import counted, nearest_hint
from fastlstm.report.markup import clipped
from fastlstm.serve.http.errors import MAX_SHOWN, ApiError, decode, refused

if TYPE_CHECKING:
    from fastlstm.forecast.window_forecaster import InputColumns, WindowForecaster

Floats = NDArray[np.floating]

_MAX_HINTS = 1000
_NAMES = "_names"
_MAX_ID = (1 << 64) - 1
OutputName = Literal["forecast", "quantiles"]
Name = Annotated[str, Meta(max_length=256)]
SequenceNumber = Annotated[int, Meta(ge=0, extra_json_schema={"maximum": _MAX_ID})]
Level = Annotated[float, Meta(ge=0.005, le=0.995)]
NO_BINARY = "binary tensors are not supported; send JSON (tritonclient: binary_data=False)"
FLOATS: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "FP64": np.dtype("<f8")}
Size = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
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
        datatype: FP32 or FP64, or BYTES for names.
        shape: -1 where any size will do.
        columns: names of the columns of the last axis; empty where the request gives them.
        may_miss: whether null may stand for a missing value.
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
        """Returns the type of this input in a request; the name of an input tells its type."""
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


class Parameters(Struct, forbid_unknown_fields=True):
    """Parameters of a request; null counts as left out."""

    quantiles: Annotated[list[Level], Meta(min_length=1, max_length=199)] | None = None
    sequence_id: SequenceNumber | Name | None = None
    sequence_start: bool | None = None
    sequence_end: bool | None = None
    binary_data_output: bool | None = None


class OutputParameters(Struct, forbid_unknown_fields=True):
    """Parameters of an output."""

    binary_data: bool | None = None


class RequestedOutput(Struct, forbid_unknown_fields=True):
    """An output that a request asks for."""

    name: OutputName
    parameters: OutputParameters | None = None


class InferFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """An inference request as it comes; `request_decoder` narrows its inputs."""

    id: Name | None = None
    parameters: Parameters | None = None
    inputs: list[Any]
    outputs: list[RequestedOutput] | None = None


NAMES = tuple(
    name
    for kind in (InferFields, Parameters, RequestedOutput, OutputParameters, Tensor)
    for name in kind.__struct_fields__
)


@dataclass(frozen=True)
class SequenceStep:
    """A request of the sequence `id`, perhaps the first or last; 7 and "7" are two sequences."""

    id: str | int
    starts: bool = False
    ends: bool = False


@dataclass(frozen=True)
class InferRequest:
    """A checked request.

    Attributes:
        past: rows in the table's units, names as their numbers, shape ``(B, n, columns)``; n is L,
            in a sequence at most L.
        future: shape ``(B, h, future covariates)``, or None where there are none.
        statics: shape ``(B, S)``, followed by the number of the series if the model knows several
            series; None where there are no static values, or where the sequence has them.
        levels: levels of the quantiles.
    """

    id: str | None
    past: Floats
    future: Floats | None
    statics: Floats | None
    outputs: tuple[str, ...]
    levels: tuple[float, ...]
    step: SequenceStep | None

    @property
    def rows_note(self) -> str:
        """Ends the message of an error that comes after the rows were stored."""
        return "" if self.step is None else "; its rows were added to the sequence"


def input_specs(model: WindowForecaster) -> dict[str, TensorSpec]:
    """Returns a forecaster's inputs by name; categorical columns are separate tensors."""
    groups = [
        ("past", (-1, -1), model.past, model.may_miss),
        ("future", (-1, model.horizon), model.future, model.may_miss),
        ("static", (-1,), model.static, True),
        ("series", (-1,), model.series, True),
    ]
    specs, floats = {}, f"FP{8 * model.dtype.itemsize}"
    for group, lead, columns, may_miss in groups:
        for name, datatype, listed in (
            (group, floats, columns.numbers),
            (group + _NAMES, "BYTES", columns.categorical),
        ):
            if listed:
                shape = (*lead, len(listed))
                specs[name] = TensorSpec(name, datatype, shape, listed, may_miss)
    return specs


def output_specs(model: WindowForecaster) -> dict[str, TensorSpec]:
    """Returns a forecaster's outputs by name."""
    shape, floats = (-1, model.horizon, len(model.targets)), f"FP{8 * model.dtype.itemsize}"
    return {
        "forecast": TensorSpec("forecast", floats, shape, model.targets),
        "quantiles": TensorSpec("quantiles", floats, (*shape, -1)),
    }


def request_decoder(inputs: Iterable[TensorSpec]) -> msgspec.json.Decoder[InferFields]:
    """Returns the decoder of requests with these inputs."""
    kinds = tuple(spec.struct() for spec in inputs)
    own = [("inputs", list[Union[kinds]])]  # type: ignore[valid-type]  # noqa: UP007
    kind = msgspec.defstruct(
        "Request", own, bases=(InferFields,), forbid_unknown_fields=True, kw_only=True
    )
    return msgspec.json.Decoder(kind)


def parse_request(
    body: bytes, model: WindowForecaster, decoder: msgspec.json.Decoder[InferFields]
) -> InferRequest:
    """Parses and checks a request; null counts as left out."""
    known = (f"{s.name} {s.datatype} {list(s.shape)}" for s in input_specs(model).values())
    place = f"GET /v2/models/{model.name} lists the inputs"
    notes = {"inputs": f"; expected {', '.join(known)}; {place}"}
    fields = decode(body, decoder, NAMES, notes=notes)
    parameters = fields.parameters or Parameters()
    if parameters.binary_data_output:
        raise refused("binary_data_output", NO_BINARY)
    step, inputs = _step(parameters), read_inputs(fields.inputs)
    past = _joined(model.past, "past", inputs)
    if past is None:
        raise _bad(f"the input 'past' is missing; this model takes {', '.join(input_specs(model))}")
    future = _joined(model.future, "future", inputs)
    statics = _joined(model.static, "static", inputs)
    _check_rows(past, model, step)
    if model.future.names and future is None:
        raise _bad(f"{_missing(model.future, 'future')} ahead")
    if model.static.names and statics is None and (step is None or step.starts):
        raise _bad(_missing(model.static, "static"))
    series = _joined(model.series, "series", inputs)
    for name, tensor in (("future", future), ("static", statics), ("series", series)):
        if tensor is not None and len(tensor) != len(past):
            windows = counted(len(tensor), "window")
            sent = name if name in inputs else name + _NAMES
            raise _bad(f"'{sent}' has {windows}, 'past' has {len(past)}; send as many")
    if model.series.names and (step is None or step.starts or statics is not None):
        unknown = np.full((len(past), 1), np.nan, dtype=past.dtype)
        parts = [
            part for part in (statics, unknown if series is None else series) if part is not None
        ]
        statics = np.concatenate(parts, 1)
    levels = tuple(parameters.quantiles or ())
    return InferRequest(
        id=fields.id,
        past=np.ascontiguousarray(past[:, -model.input_size :]),  # without the older rows
        future=future,
        statics=statics,
        outputs=_outputs(fields.outputs or [], levels),
        levels=levels,
        step=step,
    )


def _missing(columns: InputColumns, name: str) -> str:
    inputs = [f"'{name}'"] if columns.numbers else []
    inputs += [f"'{name}{_NAMES}'"] if columns.categorical else []
    what = f"inputs {' and '.join(inputs)} are" if len(inputs) == 2 else f"input {inputs[0]} is"
    return f"the {what} missing: {', '.join(columns.names)}"


def _joined(columns: InputColumns, name: str, inputs: Mapping[str, NDArray[Any]]) -> Floats | None:
    """Combines numbers and names in the network's order; None if neither was sent."""
    numbers, names = inputs.get(name), inputs.get(name + _NAMES)
    sent = names if numbers is None else numbers
    if sent is None:
        return None
    if (numbers is None and columns.numbers) or (names is None and columns.categorical):
        other = name if numbers is None else name + _NAMES
        raise _bad(f"the input '{other}' is missing, '{name}' and '{name}{_NAMES}' go together")
    if numbers is not None and names is not None and numbers.shape[:-1] != names.shape[:-1]:
        shapes = f"'{name}' has shape {list(numbers.shape)}, '{name}{_NAMES}' {list(names.shape)}"
        raise _bad(f"{shapes}; all axes but the last must agree")
    dtype = np.float32 if numbers is None else numbers.dtype
    joined = np.empty((*sent.shape[:-1], len(columns.names)), dtype=dtype)
    if numbers is not None:
        joined[..., [columns.names.index(column) for column in columns.numbers]] = numbers
    for place, column in enumerate(columns.categorical):
        assert names is not None
        codes = _codes(names[..., place], columns.codes[column], column)
        joined[..., columns.names.index(column)] = codes
    return joined


def _codes(names: NDArray[Any], known: Mapping[str, int], column: str) -> Floats:
    codes = []
    for name in names.ravel().tolist():
        code = float("nan") if name is None else known.get(name)
        if code is None:
            hint = nearest_hint(name[:64], known) if len(known) <= _MAX_HINTS else ""
            seen = f"training has seen {counted(len(known), 'name')} in it"
            raise _bad(f"column '{column}' knows no '{clipped(name, MAX_SHOWN)}'{hint}; {seen}")
        codes.append(code)
    return np.array(codes, dtype=np.float32).reshape(names.shape)


def _check_rows(past: Floats, model: WindowForecaster, step: SequenceStep | None) -> None:
    (windows, rows), input_size = past.shape[:2], model.input_size
    if windows == 0:
        raise _bad("'past' has no windows; send one or more")
    if step is None and rows < input_size:
        what = f"send {input_size}, or a few at a time as a sequence (sequence_id, sequence_start)"
        raise _bad(f"'past' has {counted(rows, 'row')}, the model reads {input_size}; {what}")
    if step is not None and windows != 1:
        raise _bad(f"'past' has {windows} windows, a sequence has one; send one sequence a request")
    is_empty = np.isnan(past[:, -input_size:, : len(model.targets)]).all(1)
    if is_empty.any() and (step is None or step.starts):  # there is no level to forecast from
        window, target = np.argwhere(is_empty)[0]
        name = model.targets[target]
        raise _bad(f"window {window} of 'past' has no value of '{name}'; send one or more")


def _step(parameters: Parameters) -> SequenceStep | None:
    name = parameters.sequence_id
    starts, ends = bool(parameters.sequence_start), bool(parameters.sequence_end)
    if isinstance(name, int) and name > _MAX_ID:
        raise refused("sequence_id", f"expected `int` <= {_MAX_ID}")
    if name:
        return SequenceStep(name, starts, ends)
    if starts or ends:
        raise _bad("sequence_start and sequence_end go with a sequence_id other than 0 and ''")
    return None


def _outputs(listed: list[RequestedOutput], levels: tuple[float, ...]) -> tuple[str, ...]:
    """Returns which outputs to answer, in their order."""
    names = tuple(output.name for output in listed)
    for output in listed:
        if output.name == "quantiles" and not levels:
            raise _bad("the output 'quantiles' needs the parameter quantiles, such as [0.1, 0.9]")
        if names.count(output.name) > 1:
            raise _bad(f"output '{output.name}' appears twice; name it once")
        if output.parameters and output.parameters.binary_data:
            raise refused("binary_data", NO_BINARY)
    return names or ("forecast", *(("quantiles",) if levels else ()))


def _bad(message: str) -> ApiError:
    return ApiError(400, message)


def read_inputs(listed: list[Tensor]) -> dict[str, NDArray[Any]]:
    """Returns the tensors of a request by name: floats, or objects (text or None) for BYTES."""
    tensors: dict[str, NDArray[Any]] = {}
    for tensor in listed:
        spec = tensor.spec
        if spec.name in tensors:
            raise spec.wrong("comes twice; send it once")
        flat, shape = _flat(tensor, spec), tensor.shape
        if len(flat) != math.prod(shape):
            expected = f"its shape {list(shape)} says {math.prod(shape)}"
            raise spec.wrong(f"has {len(flat)} elements, {expected}")
        is_number = spec.datatype in FLOATS
        values = np.array(flat, np.float64 if is_number else object)  # null becomes NaN
        with np.errstate(over="ignore"):
            values = values.astype(FLOATS.get(spec.datatype, object)).reshape(shape)
        _check_values(values, spec)
        tensors[spec.name] = values
    return tensors


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
