"""The body of an inference request to a forecaster: every field checked, tensors put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import counted, nearest_hint
from fastlstm.serve.forecast.sequence_store import Step
from fastlstm.serve.forecast.tensors import (
    FLOATS,
    Spec,
    check_names,
    parameters_of,
    read_inputs,
    short,
    split_body,
)
from fastlstm.serve.http.errors import ApiError, value_name

if TYPE_CHECKING:
    from fastlstm.forecast.window_forecaster import Columns, WindowForecaster

Floats = NDArray[np.floating]

MAX_LEVELS = 199
LOWEST_LEVEL, HIGHEST_LEVEL = 0.005, 0.995
MAX_NAME = 256
FIELDS = ("id", "parameters", "inputs", "outputs")
PARAMETERS = (
    *("quantiles", "timeout", "sequence_id", "sequence_start", "sequence_end"),
    "binary_data_output",
)
OUTPUTS = ("forecast", "quantiles")
_MAX_HINTS = 1000
_LONGEST_TIMEOUT = (1 << 53) - 1
_NAMES = "_names"


@dataclass(frozen=True)
class Asked:
    """What a client asks for, checked.

    Attributes:
        id: of the request, or None.
        past: rows in the table's units, names as their numbers, shape ``(B, n, columns)``; n is L,
            in a sequence at most L.
        future: shape ``(B, h, columns known ahead)``, or None where there are none.
        statics: shape ``(B, S)``, or None where there are none, or those of the sequence hold.
        outputs: which to answer, and whether binary.
        levels: of the quantiles.
        step: what is said of a sequence, or None.
        timeout_s: within which the answer is wanted, or None.
    """

    id: str | None
    past: Floats
    future: Floats | None
    statics: Floats | None
    outputs: dict[str, bool]
    levels: tuple[float, ...]
    step: Step | None
    timeout_s: float | None


def input_specs(model: WindowForecaster) -> dict[str, Spec]:
    """Returns what a forecaster takes, by name; names stand in tensors of their own."""
    groups = [
        ("past", (-1, -1), model.past, model.may_miss),
        ("future", (-1, model.horizon), model.future, model.may_miss),
        ("static", (-1,), model.static, True),
    ]
    found, floats = {}, _datatype(model)
    for name, lead, columns, may_miss in groups:
        for own, datatype, listed in (
            (name, floats, columns.numbers),
            (name + _NAMES, "BYTES", columns.categorical),
        ):
            if listed:
                found[own] = Spec(own, datatype, (*lead, len(listed)), listed, may_miss)
    return found


def output_specs(model: WindowForecaster) -> dict[str, Spec]:
    """Returns what a forecaster gives, by name."""
    shape, floats = (-1, model.horizon, len(model.targets)), _datatype(model)
    return {
        "forecast": Spec("forecast", floats, shape, model.targets),
        "quantiles": Spec("quantiles", floats, (*shape, -1)),
    }


def _datatype(model: WindowForecaster) -> str:
    return next(name for name, dtype in FLOATS.items() if dtype == model.dtype)


def parse_request(
    body: bytes, header_length: int | None, model: WindowForecaster, specs: Mapping[str, Spec]
) -> Asked:
    """Checks a request.

    Args:
        body: as it came.
        header_length: bytes of JSON in it; None for all.
        model: the forecaster.
        specs: of its inputs.

    Raises:
        ApiError: 400, says what came and what was expected.
    """
    request, binary = split_body(body, header_length)
    check_names(request, FIELDS, "field")
    parameters = {k: v for k, v in parameters_of(request, "the request").items() if v is not None}
    check_names(parameters, PARAMETERS, "parameter")
    step = _step(parameters)
    levels = _levels(parameters.get("quantiles"))
    inputs = read_inputs(request.get("inputs"), binary, specs)
    past = _joined(model.past, "past", inputs)
    if past is None:
        raise _bad(f"the input 'past' is missing; this model takes {', '.join(specs)}")
    future = _joined(model.future, "future", inputs)
    statics = _joined(model.static, "static", inputs)
    _check_rows(past, model.input_size, step)
    if model.future.names and future is None:
        raise _bad(f"the input 'future' is missing: {', '.join(model.future.names)} ahead")
    if model.static.names and statics is None and (step is None or step.starts):
        raise _bad(f"the input 'static' is missing: {', '.join(model.static.names)}")
    for name, found in (("future", future), ("static", statics)):
        if found is not None and len(found) != len(past):
            raise _bad(
                f"'{name}' has {counted(len(found), 'window')}, 'past' has {len(past)}; send as"
                " many"
            )
    return Asked(
        id=_text(request.get("id"), "id"),
        past=np.ascontiguousarray(past[:, -model.input_size :]),  # without the older rows
        future=future,
        statics=statics,
        outputs=_outputs(request.get("outputs"), parameters, levels),
        levels=levels,
        step=step,
        timeout_s=_timeout(parameters.get("timeout")),
    )


def _joined(columns: Columns, name: str, inputs: Mapping[str, NDArray[Any]]) -> Floats | None:
    """Puts numbers and names together in the network's order; None where nothing was sent."""
    numbers, names = inputs.get(name), inputs.get(name + _NAMES)
    if numbers is None and names is None:
        return None
    if (numbers is None and columns.numbers) or (names is None and columns.categorical):
        other = name if numbers is None else name + _NAMES
        raise _bad(f"the input '{other}' is missing, '{name}' and '{name}{_NAMES}' go together")
    if numbers is not None and names is not None and numbers.shape[:-1] != names.shape[:-1]:
        raise _bad(
            f"'{name}' has shape {list(numbers.shape)} and '{name}{_NAMES}' {list(names.shape)};"
            " all axes but the last must agree"
        )
    given = numbers if numbers is not None else names
    assert given is not None
    dtype = np.float32 if numbers is None else numbers.dtype
    found = np.empty((*given.shape[:-1], len(columns.names)), dtype=dtype)
    for place, column in enumerate(columns.names):
        if column in columns.codes:
            assert names is not None
            found[..., place] = _codes(
                names[..., columns.categorical.index(column)], columns, column
            )
        else:
            assert numbers is not None
            found[..., place] = numbers[..., columns.numbers.index(column)]
    return found


def _codes(names: NDArray[Any], columns: Columns, column: str) -> Floats:
    known = columns.codes[column]
    codes = []
    for name in names.ravel().tolist():
        code = float("nan") if name is None else known.get(name)
        if code is None:
            hint = nearest_hint(name[:64], known) if len(known) <= _MAX_HINTS else ""
            raise _bad(
                f"column '{column}' knows no {value_name(name)}{hint}; training has seen"
                f" {counted(len(known), 'name')} in it"
            )
        codes.append(code)
    return np.array(codes, dtype=np.float32).reshape(names.shape)


def _check_rows(past: Floats, input_size: int, step: Step | None) -> None:
    windows, rows = past.shape[:2]
    if windows == 0:
        raise _bad("'past' has no windows; send one or more")
    if step is None and rows < input_size:
        raise _bad(
            f"'past' has {counted(rows, 'row')}, the model reads {input_size}; send {input_size},"
            " or the rows of a sequence (sequence_id, sequence_start) bit by bit"
        )
    if step is not None and windows != 1:
        raise _bad(f"'past' has {windows} windows, a sequence has one; send one sequence a request")


def _step(parameters: Mapping[str, Any]) -> Step | None:
    name = parameters.get("sequence_id", 0)
    flags = {}
    for key in ("sequence_start", "sequence_end"):
        flags[key] = _flag(parameters.get(key, False), key)
    is_number = type(name) is int and 0 <= name < 1 << 64
    if not is_number and not (type(name) is str and len(name) <= MAX_NAME):
        raise _bad(
            f"sequence_id is {value_name(name)}, expected a whole number below 2^64 or a string of"
            f" at most {MAX_NAME} characters"
        )
    if name:
        return Step(name, flags["sequence_start"], flags["sequence_end"])
    if any(flags.values()):
        raise _bad("sequence_start and sequence_end go with a sequence_id other than 0 and ''")
    return None


def _levels(value: Any) -> tuple[float, ...]:
    if value is None:
        return ()
    listed = value if isinstance(value, list) else []
    good = 1 <= len(listed) <= MAX_LEVELS and all(
        type(level) in (int, float) and LOWEST_LEVEL <= level <= HIGHEST_LEVEL for level in listed
    )
    if not good:
        raise _bad(
            f"quantiles is {short(value)}, expected a list of 1 to {MAX_LEVELS} numbers from"
            f" {LOWEST_LEVEL} to {HIGHEST_LEVEL}"
        )
    return tuple(float(level) for level in listed)


def _outputs(
    listed: Any, parameters: Mapping[str, Any], levels: tuple[float, ...]
) -> dict[str, bool]:
    """Returns which outputs to answer, in their order, and whether binary."""
    binary = _flag(parameters.get("binary_data_output", False), "binary_data_output")
    if listed is None or listed == []:
        return dict.fromkeys(OUTPUTS if levels else OUTPUTS[:1], binary)
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise _bad(f"outputs is {value_name(listed)}, expected a list of objects with a name")
    found: dict[str, bool] = {}
    for one in listed:
        check_names(one, ("name", "parameters"), "field of outputs")
        name = one.get("name")
        if name not in OUTPUTS:
            raise _bad(
                f"there is no output {value_name(name)}; this model has {', '.join(OUTPUTS)}"
            )
        if name == "quantiles" and not levels:
            raise _bad("the output 'quantiles' needs the parameter quantiles, such as [0.1, 0.9]")
        if name in found:
            raise _bad(f"output '{name}' is asked for twice; once will do")
        what = f"output '{name}'"
        own = parameters_of(one, what)
        check_names(own, ("binary_data",), f"parameter of {what}")
        found[name] = _flag(own.get("binary_data", binary), "binary_data")
    return found


def _timeout(value: Any) -> float | None:
    if value is None or value == 0:
        return None
    if type(value) is not int or not 0 < value <= _LONGEST_TIMEOUT:
        raise _bad(
            f"timeout is {value_name(value)}, expected a whole number of microseconds, 0 to"
            f" {_LONGEST_TIMEOUT}"
        )
    return value / 1e6


def _text(value: Any, name: str) -> str | None:
    if value is not None and (not isinstance(value, str) or len(value) > MAX_NAME):
        raise _bad(
            f"{name} is {value_name(value)}, expected a string of at most {MAX_NAME} characters"
        )
    return value


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise _bad(f"{name} is {value_name(value)}, expected true or false")
    return value


def _bad(message: str) -> ApiError:
    return ApiError(400, message)
