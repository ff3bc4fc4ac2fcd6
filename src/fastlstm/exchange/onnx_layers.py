"""Nodes of an ONNX graph as layers, for inputs of given sizes: see `onnx_values`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import FormatError
from fastlstm.exchange.onnx_file import Operation
from fastlstm.exchange.onnx_lstm import lstm_layer
from fastlstm.exchange.onnx_operators import OPERATORS
from fastlstm.exchange.onnx_values import (
    FOLDED,
    MOVES,
    Aside,
    States,
    Stream,
    Unread,
    Value,
    computed,
    spread_columns,
)
from fastlstm.sequence.layer_stack import LSTMLayer

_THRESHOLDS = ("Min", "Less", "Greater")
"""Operators by which long sequences may be computed in another way than short ones."""
_NO_BOUND = 1 << 30
"""Exporters write numbers from here on for "to the end"."""


class LayerReader:
    """Reads nodes one after the other.

    Args:
        opset: version of the operators.

    Attributes:
        values: by name, of everything that was read.
        asides: inputs that were taken for states, and for lengths.
    """

    def __init__(self, opset: int, values: dict[str, Value]) -> None:
        self.values = values
        self.asides: dict[str, set[str]] = {"states": set(), "lengths": set()}
        self._opset = opset

    def read(self, operation: Operation) -> None:
        """Adds the outputs of a node."""
        inputs = [self.values[name] if name else None for name in operation.inputs]
        try:
            outputs = self._outputs(operation, inputs)
        except (FormatError, ValueError) as error:
            outputs = [Unread(str(error))] * len(operation.outputs)
        for name, value in zip(operation.outputs, outputs, strict=False):
            self.values[name] = value

    def _outputs(self, operation: Operation, inputs: list[Value]) -> list[Value]:
        kind, num = operation.kind, len(operation.outputs)
        unread = next((value for value in inputs if isinstance(value, Unread)), None)
        if unread is not None:
            return [unread] * num
        if kind == "LSTM":
            return list(self._lstm(operation, [*inputs, *[None] * 8][:8]))
        streams = [value for value in inputs if isinstance(value, Stream)]
        states = [value for value in inputs if isinstance(value, States)]
        asides = [value for value in inputs if isinstance(value, Aside)]
        if asides:
            return [_moved_aside(operation, inputs, asides)] * num
        if states and kind in MOVES and inputs[0] is states[0] and not streams:
            moved = computed(operation, [states[0].at, *inputs[1:]], self._opset)
            return [states[0].moved(at) for at in moved]
        if states:
            raise FormatError(f"{operation.label} joins the last outputs of several LSTMs")
        if not streams:
            if kind not in FOLDED:
                raise FormatError(f"{operation.label} is no operator that is imported")
            if kind in _THRESHOLDS:
                raise FormatError(f"{operation.label} compares the number of steps or of sequences")
            return list(computed(operation, inputs, self._opset))
        if kind in ("Shape", "Size"):
            shape = [s.at if isinstance(s, Stream) else s for s in inputs]
            return list(computed(operation, shape, self._opset))
        if kind == "Concat":
            return [self._concat(operation, inputs)]
        reader = OPERATORS.get(kind)
        if reader is not None and not (kind == "Gather" and isinstance(inputs[0], Stream)):
            return [reader(operation, inputs)] + [None] * (num - 1)
        if kind in MOVES and isinstance(inputs[0], Stream) and len(streams) == 1:
            _check_slice(operation, inputs)
            moved = computed(operation, [inputs[0].at, *inputs[1:]], self._opset)
            return [replace(inputs[0], at=np.asarray(at, np.int64)) for at in moved]
        raise FormatError(f"{operation.label} is no operator that is imported")

    def _concat(self, operation: Operation, inputs: list[Value]) -> Value:
        streams = [value for value in inputs if isinstance(value, Stream)]
        first = streams[0]
        if len(streams) == len(inputs) and all(s.layers is first.layers for s in streams):
            places = computed(operation, [s.at for s in streams], self._opset)[0]
            return replace(first, at=np.asarray(places, np.int64)).of_last_step()
        if len(streams) == len(inputs) and all(map(_is_state, streams)):
            return States.joined(streams, lambda ats: computed(operation, ats, self._opset)[0])
        raise FormatError(f"{operation.label} joins different paths; imported are models of one")

    def _lstm(self, operation: Operation, inputs: list[Value]) -> tuple[Value, ...]:
        x, W, R, B, lengths, h, c, P = inputs
        weights = [W, R, B, P]
        if any(isinstance(w, Stream | Aside) for w in weights) or W is None or R is None:
            raise FormatError(f"{operation.label} has weights that are no constants of the file")
        if not isinstance(x, Stream):
            raise FormatError(f"{operation.label} reads what no input of the model becomes")
        if x.is_last:
            raise FormatError(f"{operation.label} is behind a layer that writes the last step only")
        layer = lstm_layer(operation, weights)
        layout = operation.attributes.get("layout", 0)
        found = x.by_row()
        if found is None or found[0].ndim != 2 or len(found[1]) != layer.input_size:
            raise FormatError(
                f"{operation.label} has input_size {layer.input_size} and does not read the columns"
                " of each step"
            )
        rows = found[0].T if layout else found[0]
        columns, T = found[1], len(rows)
        axis, steps, is_flipped = _order_of_steps(operation, x, rows)
        self._check_state(operation, (h, c))
        self._check_lengths(operation, lengths, T)
        is_reverse = operation.attributes.get("direction") == b"reverse"
        if is_flipped and layer.backward is not None:
            raise FormatError(f"{operation.label} reads a reversed sequence in both directions")
        layer = _reading(layer, columns, x.width)
        layer = replace(layer, reverses=is_reverse != is_flipped)
        K, H = layer.output_size, layer.hidden_size
        D, B_ = K // H, rows.shape[1]
        common = replace(x, width=K, time_axis=axis, is_tokens=False)
        # An operator that reads from the end writes in the order of its input, a layer as it reads.
        rows = steps[::-1] if is_reverse else steps
        ways = np.arange(K).reshape(D, H)
        at = rows[:, None, :, None] * K + ways[None, :, None, :]
        last = np.arange(B_)[None, :, None] * K + ways[:, None, :]
        if layout:
            at, last = at.transpose(2, 0, 1, 3), last.transpose(1, 0, 2)
        final = replace(layer, every_step=False)
        y = replace(common, layers=(*x.layers, layer), at=at)
        y_h = replace(common, layers=(*x.layers, final), at=last, is_last=True)
        return y, y_h, Aside(operation.name, is_written=True)

    def _check_state(self, operation: Operation, states: tuple[Value, ...]) -> None:
        for state in states:
            if isinstance(state, Aside) and not state.is_written:
                self.asides["states"].add(state.name)
            elif isinstance(state, Stream | States | Aside):
                raise FormatError(f"{operation.label} starts from a state that another LSTM writes")
            elif not isinstance(state, np.ndarray | None) or (state is not None and state.any()):
                what = "stored, and not zero" if isinstance(state, np.ndarray) else "computed"
                raise FormatError(f"{operation.label} starts from a state that is {what}")

    def _check_lengths(self, operation: Operation, lengths: Value, T: int) -> None:
        if isinstance(lengths, Aside):
            self.asides["lengths"].add(lengths.name)
        elif lengths is not None and (
            not isinstance(lengths, np.ndarray) or np.not_equal(lengths, T).any()
        ):
            raise FormatError(
                f"{operation.label} has sequence_lens that are not the input's length"
            )


def _moved_aside(operation: Operation, inputs: list[Value], asides: list[Aside]) -> Aside:
    """Returns a state or lengths that an operator moves, or joins with other states.

    Raises:
        FormatError: it computes something from them.
    """
    first = next((aside for aside in asides if aside.is_written), asides[0])
    others = [value for value in inputs if not isinstance(value, Aside)]
    are_streams = [isinstance(value, Stream | States) for value in others]
    if operation.kind == "Concat":
        is_state = (
            isinstance(v, States) or (isinstance(v, Stream) and _is_state(v)) for v in others
        )
        if all(is_state):
            return replace(first, is_written=first.is_written or bool(others))
    elif operation.kind in (*MOVES, "Cast") and inputs[0] is asides[0] and not any(are_streams):
        return first
    if any(are_streams):
        raise FormatError(f"{operation.label} joins the layers and '{first.name}'")
    raise FormatError(
        f"{operation.label} computes something from '{first.name}', a state or lengths: a first"
        " state that is computed, or a second output, is not imported"
    )


def _check_slice(operation: Operation, inputs: list[Value]) -> None:
    """Refuses bounds beyond an axis that are numbers: they cut what is longer than that.

    A graph is read for short sequences, so that the last 50 steps are all of them there.
    """
    x, get = inputs[0], operation.attributes.get
    if operation.kind != "Slice" or not isinstance(x, Stream):
        return
    given: Iterable[Any] = inputs[1:4] if len(inputs) > 1 else map(get, ("starts", "ends", "axes"))
    starts, ends, axes = [*(None if v is None else np.atleast_1d(v) for v in given), None][:3]
    if starts is None or ends is None:
        return
    for k, axis in enumerate(range(len(starts)) if axes is None else axes):
        size = x.at.shape[int(axis)]
        if any(size < abs(int(bound[k])) < _NO_BOUND for bound in (starts, ends)):
            raise FormatError(
                f"{operation.label} cuts sequences that are longer than a fixed number of steps"
            )


def _order_of_steps(
    operation: Operation, x: Stream, rows: NDArray[np.int64]
) -> tuple[int, NDArray[np.int64], bool]:
    """Returns the axis of time, the steps in that order `(T, B)`, whether the rows are reversed."""
    numbers = np.arange(x.sizes[0] * x.sizes[1]).reshape(x.sizes)
    for axis in (1, 0) if x.time_axis is None else (x.time_axis,):
        steps = numbers if axis == 0 else numbers.T
        for is_flipped in (False, True):
            if np.array_equal(rows, steps[::-1] if is_flipped else steps):
                return axis, steps, is_flipped
    raise FormatError(f"{operation.label} does not read the sequence step by step")


def _reading(layer: LSTMLayer, columns: NDArray[np.int64], width: int) -> LSTMLayer:
    """Returns a layer that reads these columns of `width`, in this order."""
    if np.array_equal(columns, np.arange(width)):
        return layer
    first, second = (
        cell and replace(cell, weight_ih=spread_columns(cell.weight_ih, columns, width))
        for cell in (layer.forward, layer.backward)
    )
    assert first is not None
    return replace(layer, forward=first, backward=second)


def _is_state(stream: Stream) -> bool:
    """Whether a value is the last output of an LSTM and nothing more."""
    last = stream.layers[-1] if stream.layers else None
    return stream.is_last and isinstance(last, LSTMLayer)
