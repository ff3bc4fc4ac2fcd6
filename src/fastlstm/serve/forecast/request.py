"""An inference request to a forecaster: its fields, checked, and its tensors put together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import counted, nearest_hint
from fastlstm.serve.forecast.sequence_store import SequenceStep
from fastlstm.serve.forecast.tensors import (
    FLOATS,
    TensorSpec,
    parameters_of,
    read_inputs,
    short,
    split_body,
)
from fastlstm.serve.http import fields
from fastlstm.serve.http.errors import ApiError, value_name

if TYPE_CHECKING:
    from fastlstm.forecast.window_forecaster import Columns, WindowForecaster

Floats = NDArray[np.floating]

MAX_NAME = 256
_MAX_LEVELS, _LEVEL = 199, fields.Number(0.005, 0.995)
_MAX_HINTS = 1000
_NAMES = "_names"
_OUTPUTS = ("forecast", "quantiles")


class _Levels(fields.Field):
    def parse(self, name: str, value: Any) -> tuple[float, ...]:
        levels = value if isinstance(value, list) else []
        if not 1 <= len(levels) <= _MAX_LEVELS or not all(
            type(level) in (int, float) and _LEVEL.low <= level <= _LEVEL.high for level in levels
        ):
            bounds = f"{_LEVEL.low} to {_LEVEL.high}"
            expected = f"a list of 1 to {_MAX_LEVELS} numbers from {bounds}"
            raise _bad(f"{name} is {short(value)}, expected {expected}")
        return tuple(map(float, levels))

    def schema(self) -> fields.Schema:
        items = _LEVEL.schema()
        return {"type": "array", "items": items, "minItems": 1, "maxItems": _MAX_LEVELS}


class _SequenceId(fields.Field):
    def parse(self, name: str, value: Any) -> int | str:
        is_number = type(value) is int and 0 <= value < 1 << 64
        if not is_number and not (type(value) is str and len(value) <= MAX_NAME):
            expected = f"a whole number below 2^64 or a string of at most {MAX_NAME} characters"
            raise fields.unexpected(name, value, expected)
        return cast("int | str", value)

    def schema(self) -> fields.Schema:
        return {"anyOf": [fields.Integer(0, (1 << 64) - 1).schema(), _ID.schema()]}


_ID = fields.Text(MAX_NAME)
_PARAMETERS: dict[str, fields.Field] = {
    "quantiles": _Levels(),
    "timeout": fields.Integer(0, (1 << 53) - 1, " of microseconds", "microseconds; 0 is none"),
    "sequence_id": _SequenceId(),
    "sequence_start": fields.Flag(),
    "sequence_end": fields.Flag(),
    "binary_data_output": fields.Flag(),
}


@dataclass(frozen=True)
class InferRequest:
    """A checked request.

    Attributes:
        id: of the request, or None.
        past: rows in the table's units, names as their numbers, shape ``(B, n, columns)``; n is L,
            in a sequence at most L.
        future: shape ``(B, h, future covariates)``, or None where there are none.
        statics: shape ``(B, S)``, with the number of the series behind them if the model knows
            several; or None where there are none, or the sequence has them.
        outputs: which to answer, and whether binary.
        levels: of the quantiles.
        step: of a sequence, or None.
        timeout_s: from the request's headers, or None.
    """

    id: str | None
    past: Floats
    future: Floats | None
    statics: Floats | None
    outputs: dict[str, bool]
    levels: tuple[float, ...]
    step: SequenceStep | None
    timeout_s: float | None

    @property
    def rows_note(self) -> str:
        """Ends the message of an error that comes after the rows were stored."""
        return "" if self.step is None else "; its rows were added to the sequence"


def input_specs(model: WindowForecaster) -> dict[str, TensorSpec]:
    """Returns a forecaster's inputs by name; categorical columns are tensors of their own."""
    groups = [
        ("past", (-1, -1), model.past, model.may_miss),
        ("future", (-1, model.horizon), model.future, model.may_miss),
        ("static", (-1,), model.static, True),
        ("series", (-1,), model.series, True),
    ]
    specs, floats = {}, _datatype(model)
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
    shape, floats = (-1, model.horizon, len(model.targets)), _datatype(model)
    return {
        "forecast": TensorSpec("forecast", floats, shape, model.targets),
        "quantiles": TensorSpec("quantiles", floats, (*shape, -1)),
    }


def _datatype(model: WindowForecaster) -> str:
    return next(name for name, dtype in FLOATS.items() if dtype == model.dtype)


def request_schema(inputs: Iterable[TensorSpec]) -> fields.Schema:
    """Returns the JSON schema of a request with these inputs."""
    parameters = fields.object_schema({"binary_data": fields.Flag().schema()})
    output = {"name": {"enum": list(_OUTPUTS)}, "parameters": fields.or_null(parameters)}
    outputs = {"type": "array", "items": fields.object_schema(output, "name")}
    properties = {
        "id": fields.or_null(_ID.schema()),
        "parameters": fields.or_null(fields.fields_schema(_PARAMETERS)),
        "inputs": {"type": "array", "items": {"anyOf": [spec.schema() for spec in inputs]}},
        "outputs": fields.or_null(outputs),
    }
    return fields.object_schema(properties, "inputs")


def parse_request(
    body: bytes, header_length: int | None, model: WindowForecaster, specs: Mapping[str, TensorSpec]
) -> InferRequest:
    """Parses and checks a request with `header_length` bytes of JSON; null counts as left out."""
    request, binary = split_body(body, header_length)
    fields.check_names(request, ("id", "parameters", "inputs", "outputs"))
    values = fields.parse_fields(parameters_of(request, "the request"), _PARAMETERS, "parameter")
    step = _step(values)
    inputs = read_inputs(request.get("inputs"), binary, specs)
    past = _joined(model.past, "past", inputs)
    if past is None:
        raise _bad(f"the input 'past' is missing; this model takes {', '.join(specs)}")
    future = _joined(model.future, "future", inputs)
    statics = _joined(model.static, "static", inputs)
    _check_rows(past, model.input_size, step)
    if step is None or step.starts:
        _check_targets(past[:, -model.input_size :], model.targets)
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
    levels, request_id = values.get("quantiles", ()), request.get("id")
    is_binary = values.get("binary_data_output", False)
    return InferRequest(
        id=None if request_id is None else _ID.parse("id", request_id),
        past=np.ascontiguousarray(past[:, -model.input_size :]),  # without the older rows
        future=future,
        statics=statics,
        outputs=_outputs(request.get("outputs"), levels, is_binary=is_binary),
        levels=levels,
        step=step,
        timeout_s=values["timeout"] / 1e6 if values.get("timeout") else None,
    )


def _missing(columns: Columns, name: str) -> str:
    """Returns which inputs lack: of numbers, of names, or both."""
    inputs = [f"'{name}'"] if columns.numbers else []
    inputs += [f"'{name}{_NAMES}'"] if columns.categorical else []
    what = f"inputs {' and '.join(inputs)} are" if len(inputs) == 2 else f"input {inputs[0]} is"
    return f"the {what} missing: {', '.join(columns.names)}"


def _joined(columns: Columns, name: str, inputs: Mapping[str, NDArray[Any]]) -> Floats | None:
    """Puts numbers and names together in the network's order; None where nothing was sent."""
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
    for place, column in enumerate(columns.names):
        if column in columns.codes:
            assert names is not None
            own = names[..., columns.categorical.index(column)]
            joined[..., place] = _codes(own, columns.codes[column], column)
        else:
            assert numbers is not None
            joined[..., place] = numbers[..., columns.numbers.index(column)]
    return joined


def _codes(names: NDArray[Any], known: Mapping[str, int], column: str) -> Floats:
    codes = []
    for name in names.ravel().tolist():
        code = float("nan") if name is None else known.get(name)
        if code is None:
            hint = nearest_hint(name[:64], known) if len(known) <= _MAX_HINTS else ""
            seen = f"training has seen {counted(len(known), 'name')} in it"
            raise _bad(f"column '{column}' knows no {value_name(name)}{hint}; {seen}")
        codes.append(code)
    return np.array(codes, dtype=np.float32).reshape(names.shape)


def _check_rows(past: Floats, input_size: int, step: SequenceStep | None) -> None:
    windows, rows = past.shape[:2]
    if windows == 0:
        raise _bad("'past' has no windows; send one or more")
    if step is None and rows < input_size:
        what = f"send {input_size}, or a few at a time as a sequence (sequence_id, sequence_start)"
        raise _bad(f"'past' has {counted(rows, 'row')}, the model reads {input_size}; {what}")
    if step is not None and windows != 1:
        raise _bad(f"'past' has {windows} windows, a sequence has one; send one sequence a request")


def _step(values: Mapping[str, Any]) -> SequenceStep | None:
    name = values.get("sequence_id", 0)
    starts, ends = (values.get(key, False) for key in ("sequence_start", "sequence_end"))
    if name:
        return SequenceStep(name, starts, ends)
    if starts or ends:
        raise _bad("sequence_start and sequence_end go with a sequence_id other than 0 and ''")
    return None


def _outputs(listed: Any, levels: tuple[float, ...], *, is_binary: bool) -> dict[str, bool]:
    """Returns which outputs to answer, in their order, and whether binary."""
    if listed is None or listed == []:
        return dict.fromkeys(_OUTPUTS if levels else _OUTPUTS[:1], is_binary)
    if not isinstance(listed, list) or not all(isinstance(output, dict) for output in listed):
        raise fields.unexpected("outputs", listed, "a list of objects with a name")
    outputs: dict[str, bool] = {}
    for output in listed:
        fields.check_names(output, ("name", "parameters"), "field of outputs")
        name = output.get("name")
        if name not in _OUTPUTS:
            known = ", ".join(_OUTPUTS)
            raise _bad(f"there is no output {value_name(name)}; this model has {known}")
        if name == "quantiles" and not levels:
            raise _bad("the output 'quantiles' needs the parameter quantiles, such as [0.1, 0.9]")
        if name in outputs:
            raise _bad(f"output '{name}' appears twice; name it once")
        parameters = parameters_of(output, f"output '{name}'", "binary_data")
        outputs[name] = fields.Flag().parse("binary_data", parameters.get("binary_data", is_binary))
    return outputs


def _check_targets(past: Floats, targets: Sequence[str]) -> None:
    """Refuses windows without any value of a target: there is no level to forecast from."""
    is_empty = np.isnan(past[:, :, : len(targets)]).all(1)
    if is_empty.any():
        window, target = np.argwhere(is_empty)[0]
        raise _bad(
            f"window {window} of 'past' has no value of '{targets[target]}'; send one or more"
        )


def _bad(message: str) -> ApiError:
    return ApiError(400, message)
