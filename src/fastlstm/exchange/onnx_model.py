"""An ONNX file as a layer stack: its nodes are read for inputs of two sizes, which must agree."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import FormatError
from fastlstm.exchange.onnx_file import OnnxFile, OnnxInput, read_onnx_file
from fastlstm.exchange.onnx_layers import LayerReader
from fastlstm.exchange.onnx_values import FOLDED, Aside, States, Stream, Unread, Value, computed
from fastlstm.sequence.layer_stack import Layer, LayerStack, LSTMLayer, Steps
from fastlstm.sequence.packed_stack import pack

_SIZES = ((3, 4), (5, 2))
"""Lengths of the first two axes of the input that a graph is read for, where the file leaves them
open. What does not come out the same for both is not read."""
Packed = tuple[dict[str, NDArray[Any]], dict[str, Any]]
_MAX_PLACES = 1 << 24


def read_onnx(
    data: bytes, folder: Path, allow: Callable[[int], None]
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Returns the layers of a file, packed; arguments and errors as of `read_onnx_file`."""
    file = read_onnx_file(data, folder, allow)
    values = _folded(file)
    main = _main_input(file)
    first, second = _read_twice(lambda sizes: pack(_stack(file, values, main, sizes)))
    same = first[1] == second[1] and first[0].keys() == second[0].keys()
    if not same or any(not np.array_equal(a, second[0][n]) for n, a in first[0].items()):
        raise FormatError("what it computes depends on the number of steps or of sequences")
    return first


def _read_twice(read: Callable[[tuple[int, int]], Packed]) -> list[Packed]:
    """Returns what is read for both sizes; for one alone: a size was frozen by an exporter."""
    found, problems = [], []
    for sizes in _SIZES:
        try:
            found.append(read(sizes))
        except FormatError as error:
            problems.append(error)
    if len(problems) == 1:
        raise FormatError(
            f"its nodes work for some numbers of steps only ({problems[0]}): the exporter wrote"
            " those of its example into them; export with fixed sizes, or with torch's dynamo=False"
        )
    if problems:
        raise problems[0]
    return found


def _folded(file: OnnxFile) -> dict[str, Value]:
    """Returns all values that depend on no input; each is computed once."""
    values: dict[str, Value] = dict(file.constants)
    for operation in file.operations:
        if operation.kind in FOLDED and all(not n or n in values for n in operation.inputs):
            inputs = [values[name] if name else None for name in operation.inputs]
            try:
                outputs = computed(operation, inputs, file.opset)
            except ValueError:
                continue  # is reported where it is used
            values |= zip(operation.outputs, outputs, strict=False)
    return values


def _main_input(file: OnnxFile) -> OnnxInput:
    """Returns the input that the first LSTM reads: others are states or lengths."""
    sources = {item.name: {item.name} for item in file.inputs}
    for operation in file.operations:
        read = [sources.get(name, set()) for name in operation.inputs]
        if operation.kind == "LSTM":
            found = [item for item in file.inputs if read and item.name in read[0]]
            if not found:
                raise FormatError(f"{operation.label} reads what no input of the model becomes")
            return found[0]
        sources |= dict.fromkeys(operation.outputs, set().union(*read))
    kinds = sorted({operation.kind for operation in file.operations})
    has_loop = {"Loop", "Scan", "If"} & set(kinds)
    raise FormatError(
        "it has no LSTM operator"
        + (f" outside of its {' and '.join(sorted(has_loop))}" if has_loop else "")
        + f"; its operators are {', '.join(kinds[:12])}{', …' if len(kinds) > 12 else ''}"
    )


def _stack(
    file: OnnxFile, values: dict[str, Value], main: OnnxInput, free: tuple[int, int]
) -> LayerStack:
    """Returns the layers, read for an input of these lengths."""
    shape = main.shape
    if shape is None or not 1 <= len(shape) <= 3 or (len(shape) == 3 and shape[2] is None):
        raise FormatError(
            f"its input '{main.name}' has the shape {shape or 'unknown'}, expected two axes of"
            " steps and sequences, and a third one of a fixed number of columns"
        )
    lengths = [size or free[k] for k, size in enumerate(shape[:2])]
    n0, n1 = ([1] if len(shape) == 1 else []) + lengths
    width = shape[2] if len(shape) == 3 else 1
    assert width is not None
    if n0 * n1 * width > _MAX_PLACES:
        raise FormatError(
            f"its input '{main.name}' has the fixed sizes {shape}, too many to follow; export it"
            " with steps and sequences of any number"
        )
    at = np.arange(n0 * n1 * width).reshape([*lengths, width][: len(shape)])
    start = Stream((), at, width, (n0, n1), is_tokens=main.is_integer)
    others: dict[str, Value] = {i.name: Aside(i.name) for i in file.inputs}
    reader = LayerReader(file.opset, {**values, **others, main.name: start})
    for operation in file.operations:
        if any(name not in values for name in operation.outputs if name):
            reader.read(operation)
    end = _main_output(file, reader.values)
    layers = _ordered(end)
    names = [item.name for item in file.inputs]
    states, ignored = (
        [n for n in names if n in reader.asides[what]] for what in ("states", "lengths")
    )
    if len(shape) == 1 and not states and (n0, end.time_axis) == (1, 0):
        raise FormatError("its LSTM reads one step and has no state before it: it is no sequence")
    window = shape[end.time_axis] if end.time_axis is not None and len(shape) > 1 else None
    return LayerStack(
        layers, file.made_by, None if window == 1 else window,
        is_time_major=end.time_axis == 0 and len(shape) > 1,
        notes=_notes(states, ignored),
    )  # fmt: skip


def _main_output(file: OnnxFile, values: dict[str, Value]) -> Stream:
    """Returns the one output that is no state."""
    ends = {name: values[name] for name in file.outputs}
    found = {n: v for n, v in ends.items() if not isinstance(v, Aside) and not _is_state(v)}
    found = found or {n: v for n, v in ends.items() if isinstance(v, Stream)}
    for value in found.values():
        if isinstance(value, Unread):
            raise FormatError(value.reason)
    streams = {name: v for name, v in found.items() if isinstance(v, Stream)}
    if len(streams) != 1 or len(found) != 1:
        names = ", ".join(f"'{name}'" for name in (*found, *ends)[:6])
        raise FormatError(f"its outputs are {names}; imported are models of one, beside the state")
    return next(iter(streams.values()))


def _is_state(value: Value) -> bool:
    if isinstance(value, States):
        return True
    if not isinstance(value, Stream) or not value.is_last:
        return False
    return isinstance(value.layers[-1], LSTMLayer)


def _ordered(end: Stream) -> tuple[Layer, ...]:
    """Returns the layers, with one more where the output has other steps than theirs.

    Raises:
        FormatError: the output is no arrangement of the steps.
    """
    width, flat = end.width, end.at.ravel()
    if end.is_last:
        assert end.time_axis is not None
        B = end.sizes[1 - end.time_axis]
        if _is_arranged(flat, np.arange(B * width).reshape(B, width)):
            return end.layers
    elif end.time_axis is not None:
        steps = np.arange(end.sizes[0] * end.sizes[1] * width).reshape(*end.sizes, width)
        if _is_arranged(flat, steps):
            return end.layers
        if _is_arranged(flat, np.flip(steps, end.time_axis)):
            return (*end.layers, Steps("steps", "reversed"))
        if _is_arranged(flat, np.take(steps, np.array(-1), end.time_axis)):
            return _of_last_step(end.layers)
    raise FormatError(
        "its output is neither that of every step nor that of the last one, with all columns"
    )


def _is_arranged(flat: NDArray[np.int64], places: NDArray[np.int64]) -> bool:
    """Whether an output, as a row, has these places, its axes in any order."""
    if flat.size != places.size:
        return False
    orders = itertools.permutations(range(places.ndim))
    return any(np.array_equal(places.transpose(order).ravel(), flat) for order in orders)


def _of_last_step(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Returns layers that write the last step only: what is behind the last LSTM is the same for
    every step, and the last output of one that reads both ways is no last step."""
    k = max(k for k, layer in enumerate(layers) if isinstance(layer, LSTMLayer))
    last = layers[k]
    assert isinstance(last, LSTMLayer)
    if last.backward is not None:
        return (*layers, Steps("steps", "last"))
    return (*layers[:k], replace(last, every_step=False), *layers[k + 1 :])


def _notes(states: list[str], lengths: list[str]) -> tuple[str, ...]:
    notes = []
    if states:
        names = ", ".join(f"'{name}'" for name in states)
        notes.append(
            f"the inputs {names} are taken for the state before the first step: a sequence starts"
            " from zero here, a text run carries it"
        )
    if lengths:
        names = ", ".join(f"'{name}'" for name in lengths)
        notes.append(f"the input {names} has the lengths of sequences: here all are read in full")
    return tuple(notes)
