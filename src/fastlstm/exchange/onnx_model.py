"""ONNX files with LSTM operators as layer stacks.

`read_onnx` runs in the process of `converter`: ONNX Runtime folds the constants, the operators that
have weights become layers, and ONNX Runtime answers random inputs of two sizes. Operators that only
move values are not interpreted. `proved` tries the few arrangements that are left (axis of time,
last step or every step, directions) and returns the one with ONNX Runtime's answers.
"""

from __future__ import annotations

import itertools
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import FastLSTMError, FormatError
from fastlstm.ops.cell_options import Activation
from fastlstm.sequence.layer_stack import (
    CellWeights,
    Dense,
    Embedding,
    Function,
    Layer,
    LayerNorm,
    LayerStack,
    LSTMLayer,
    Merge,
    Steps,
)
from fastlstm.sequence.packed_stack import pack, unpack

Packed = tuple[dict[str, NDArray[Any]], dict[str, Any]]
_SIZES = ((7, 3), (4, 6))
"""Lengths of the first two axes of the inputs that are answered, where they are open."""
_MAX_NODES, _TO_THE_END, _LIMIT = 20_000, 1 << 30, 1e-4
_MOVES = (
    *("Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Gather"),
    *("Split", "ReverseSequence", "Cast", "Dropout"),
)
_ON_SIZES = (*_MOVES, "Shape", "Concat", "Add", "Sub", "Mul", "Div", "ConstantOfShape", "Expand")
_FUNCTIONS = {
    "Relu": "relu", "Tanh": "tanh", "Sigmoid": "sigmoid", "Softsign": "softsign",
    "Softplus": "softplus", "Exp": "exponential", "Elu": "elu", "Gelu": "gelu",
    "HardSigmoid": "hard_sigmoid_0.2", "Softmax": "softmax", "LogSoftmax": "log_softmax",
}  # fmt: skip
_SAID = {
    "state": "taken for the state before the first step: a sequence starts from zero here, a text"
    " run carries it",
    "lengths": "the lengths of sequences: here all are read in full",
}
_GATES = (0, 2, 3, 1)
"""Gates i, f, g, o in ONNX's order i, o, f, c."""
_ACTIVATIONS: dict[str, Activation] = {
    "sigmoid": "sigmoid", "tanh": "tanh", "relu": "relu", "softsign": "softsign",
    "hardsigmoid": "hard_sigmoid", "affine": "linear",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Stream:
    """The output of layers, in any arrangement; `is_state`: the last output of an LSTM, alone."""

    layers: tuple[Layer, ...]
    width: int
    is_state: bool = False

    @property
    def last(self) -> Layer | None:
        return self.layers[-1] if self.layers else None

    def then(self, layer: Layer, width: int | None = None) -> _Stream:
        return _Stream((*self.layers, layer), width or self.width)

    def with_last(self, layer: Layer, width: int | None = None) -> _Stream:
        return _Stream((*self.layers[:-1], layer), width or self.width, self.is_state)


class _Aside(NamedTuple):
    """Inputs beside the main one ("input"), what an LSTM writes as its cell ("state"), or sizes of
    the input ("size")."""

    kind: str
    inputs: frozenset[str] = frozenset()


def read_onnx(data: bytes, folder: Path, allow: Callable[[int], None]) -> Packed:
    """Returns the layers of a file and ONNX Runtime's answers, for `proved`.

    Arrays outside the file are read from `folder` and from below only; `allow` is told how many
    bytes they have, before they are read.
    """
    import onnx

    try:
        model = onnx.load_model_from_string(data)
    except Exception as error:  # protobuf's own DecodeError
        raise FormatError(f"it is damaged, or no ONNX file ({_line(error)})") from None
    if len(model.graph.node) > _MAX_NODES:
        raise FormatError(f"it has {len(model.graph.node)} nodes; were its loops unrolled?")
    _load_arrays_beside(onnx, model, folder, allow)
    session, folded = _folded(onnx, model)
    reader = _Reader(onnx, folded.graph)
    stack, about = reader.stack()
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), "?")
    maker = _printable(f"{model.producer_name} {model.producer_version}") or "ONNX"
    arrays, about["stack"] = pack(replace(stack, made_by=f"{maker}, opset {opset}"))
    answers, about["orders"] = _answers(session, reader, about["output"])
    return {**arrays, **answers}, about


def _load_arrays_beside(onnx: Any, model: Any, folder: Path, allow: Callable[[int], None]) -> None:
    """Reads arrays outside the file as onnx does: no link, no other directory, within bounds."""
    helper = onnx.external_data_helper
    try:
        places = {
            folder / helper.ExternalDataInfo(tensor).location
            for tensor in model.graph.initializer
            if helper.uses_external_data(tensor)
        }
        allow(sum(place.stat().st_size for place in places if place.is_file()))
        helper.load_external_data_for_model(model, str(folder))
    except (ValueError, OSError, onnx.checker.ValidationError) as error:
        raise FormatError(f"its arrays beside the file are not read: {_line(error)}") from None


def _folded(onnx: Any, model: Any) -> tuple[Any, Any]:
    """Returns a session of the model, and the model with its constants folded."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level, options.enable_cpu_mem_arena = 4, False
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.add_session_config_entry("session.disable_quant_qdq", "1")  # fold DequantizeLinear
    with tempfile.TemporaryDirectory() as directory:
        options.optimized_model_filepath = f"{directory}/folded.onnx"
        try:
            session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
            folded = onnx.load(options.optimized_model_filepath)
            return session, onnx.shape_inference.infer_shapes(folded)
        except Exception as error:  # ONNX Runtime has many kinds
            raise FormatError(f"ONNX Runtime cannot load it: {_line(error)}") from None


def _answers(
    session: Any, reader: _Reader, output: str
) -> tuple[dict[str, NDArray[Any]], list[bool | None]]:
    """Returns random inputs and ONNX Runtime's outputs, and for which axis of time each is: the
    states and lengths that belong to an input depend on it."""
    (dtype, shape), B = reader.inputs[reader.main], reader.num_sequences
    arrays: dict[str, NDArray[Any]] = {}
    orders: list[bool | None] = []
    for seed, free in enumerate(_SIZES):
        sizes = [int(size or B or n) for size, n in zip(shape[:2], free, strict=False)]
        rng, problem, known = np.random.default_rng(seed), "", len(orders)
        if reader.num_tokens:
            x = rng.integers(0, reader.num_tokens, sizes).astype(dtype)
        else:
            x = rng.normal(size=[*sizes, shape[2]]).astype(dtype)  # type: ignore[list-item]
        for is_time_major in (False, True) if reader.asides else (None,):
            num = sizes[-1] if is_time_major else sizes[0]
            feeds = {reader.main: x, **reader.others(num, math.prod(sizes) // num)}
            try:
                (y,) = session.run([output], feeds)
            except Exception as error:  # ONNX Runtime has many kinds
                problem = problem or _line(error)
                continue
            arrays |= {f"x{len(orders)}": x, f"y{len(orders)}": np.asarray(y)}
            orders.append(is_time_major)
        if len(orders) == known:
            shown = " × ".join(map(str, sizes))
            raise FormatError(
                f"ONNX Runtime cannot run it on {shown} steps and sequences ({problem}): where the"
                " exporter wrote the sizes of its example into nodes, export with torch's"
                " dynamo=False, or with fixed sizes"
            )
    return arrays, orders


class _Reader:
    """Turns the nodes of a folded graph into layers.

    Attributes:
        inputs: dtype and shape by name; a size is None where callers choose it.
        main: the input that the first LSTM reads.
        asides: inputs that are taken for states ("state") and for lengths ("lengths").
        num_tokens: V of a model that reads token ids, else 0.
    """

    def __init__(self, onnx: Any, graph: Any) -> None:
        self._onnx, self._graph = onnx, graph
        self.asides: dict[str, str] = {}
        self.num_tokens, self._reverses, self._half = 0, False, -1
        self._shapes = {v.name: _shape(v) for v in (*graph.value_info, *graph.input, *graph.output)}
        to_array, helper = onnx.numpy_helper.to_array, onnx.helper
        self._values: dict[str, Any] = {t.name: to_array(t) for t in graph.initializer}
        kinds = {item.name: item.type.tensor_type.elem_type for item in graph.input}
        self.inputs = {
            name: (helper.tensor_dtype_to_np_dtype(kind), self._shapes[name])
            for name, kind in kinds.items()
            if name not in self._values
        }
        self.main = self._main_input()

    def stack(self) -> tuple[LayerStack, dict[str, Any]]:
        """Returns the layers, and what `proved` needs to know."""
        shape = self.inputs[self.main][1]
        if not 1 <= len(shape) <= 3 or (len(shape) == 3 and shape[2] is None):
            raise FormatError(
                f"its input '{self.main}' has the shape {shape or 'unknown'}, expected two axes of"
                " steps and sequences, and a third one of a fixed number of columns"
            )
        self._values |= {name: _Aside("input", frozenset([name])) for name in self.inputs}
        self._values[self.main] = _Stream((), (shape[2] or 0) if len(shape) == 3 else 0)
        for node in self._graph.node:
            inputs = [self._values.get(name) if name else None for name in node.input]
            try:
                outputs = self._outputs(node, inputs)
            except FormatError as error:  # is raised where the value is used
                outputs = [error] * len(node.output)
            self._values.update(zip(node.output, outputs, strict=False))
        output, end = self._output()
        if len(shape) == 1 and "state" not in self.asides.values():
            raise FormatError("it reads one step and has no state before it: it is no sequence")
        about = {"output": output, "reverses": self._reverses, "half": self._half}
        about["sizes"] = [*shape[:2]] if len(shape) > 1 else [1, 1]
        return LayerStack(end.layers, "", notes=tuple(self._notes())), about

    @property
    def num_sequences(self) -> int | None:
        """B, where the states have a fixed one."""
        states = (self.inputs[name][1] for name, kind in self.asides.items() if kind == "state")
        return next((shape[1] for shape in states if len(shape) == 3 and shape[1]), None)

    def others(self, B: int, T: int) -> dict[str, NDArray[Any]]:
        """Returns the inputs beside the main one: states of zero, full lengths."""
        return {
            name: np.full(
                [size or B for size in shape], T if self.asides.get(name) == "lengths" else 0, dtype
            )
            for name, (dtype, shape) in self.inputs.items()
            if name != self.main
        }  # fmt: skip

    def _main_input(self) -> str:
        """Returns the input that the first LSTM reads: others are states or lengths."""
        sources: dict[str, set[str]] = {name: {name} for name in self.inputs}
        for node in self._graph.node:
            read = [sources.get(name, set()) for name in node.input]
            if node.op_type == "LSTM":
                found = [name for name in self.inputs if read and name in read[0]]
                if not found:
                    raise FormatError(f"{_label(node)} reads what no input of the model becomes")
                return str(found[0])
            sources |= dict.fromkeys(node.output, set().union(*read))
        kinds = sorted({node.op_type for node in self._graph.node})
        shown = ", ".join((*kinds[:12], "…") if len(kinds) > 12 else kinds)
        raise FormatError(f"it has no LSTM operator outside of loops; its operators are {shown}")

    def _output(self) -> tuple[str, _Stream]:
        """Returns the one output that is no state."""
        ends = {item.name: self._values.get(item.name) for item in self._graph.output}
        for value in ends.values():
            if isinstance(value, FormatError):
                raise value
        streams = {name: value for name, value in ends.items() if isinstance(value, _Stream)}
        found = {name: value for name, value in streams.items() if not value.is_state} or streams
        if len(found) != 1:
            names = ", ".join(f"'{_printable(name)}'" for name in [*ends][:6])
            raise FormatError(f"its outputs are {names}; imported are models of one beside a state")
        return next(iter(found.items()))

    def _notes(self) -> Iterator[str]:
        for kind, text in _SAID.items():
            names = [f"'{_printable(n)}'" for n in self.inputs if self.asides.get(n) == kind]
            if names:
                yield f"the inputs {', '.join(names)} are {text}"

    def _outputs(self, node: Any, inputs: list[Any]) -> list[Any]:
        kind, num, label = node.op_type, len(node.output), _label(node)
        unread = next((value for value in inputs if isinstance(value, FormatError)), None)
        if unread is not None:
            return [unread] * num
        get = {a.name: self._onnx.helper.get_attribute_value(a) for a in node.attribute}.get
        if node.domain not in ("", "ai.onnx"):
            raise FormatError(f"{label} is no operator of ONNX itself, and is not imported")
        if kind == "LSTM":
            return list(self._lstm(label, get, [*inputs, *[None] * 8][:8]))
        streams = [value for value in inputs if isinstance(value, _Stream)]
        asides = [value for value in inputs if isinstance(value, _Aside)]
        if kind in ("Shape", "Size") or not (streams or asides):
            return [_Aside("size") if kind in _ON_SIZES else _unknown(label)] * num
        if kind == "Concat" and len(streams) + len(asides) == len(inputs):
            return [_joined(label, streams, asides)]
        if not streams and kind in _ON_SIZES and all(aside.kind == "size" for aside in asides):
            return [_Aside("size")] * num
        if not streams and kind in _MOVES and inputs[0] is asides[0] and len(asides) == 1:
            return [asides[0]] * num
        if any(aside.kind != "size" for aside in asides):
            raise FormatError(
                f"{label} computes something from a state or from lengths: a first state that is"
                " computed, or a second output, is not imported"
            )
        if asides and kind not in ("Reshape", "ReverseSequence"):
            raise FormatError(f"{label} computes something from the number of steps or sequences")
        return [self._of_streams(node, get, inputs)] * num

    def _of_streams(self, node: Any, get: Callable[..., Any], inputs: list[Any]) -> _Stream:
        kind, label, name = node.op_type, _label(node), _printable(node.name or node.output[0])
        x, second, third = [*inputs, None, None][:3]
        if kind == "Gather" and isinstance(second, _Stream):
            is_table = isinstance(x, np.ndarray) and x.ndim == 2
            if not is_table or second.layers or second.width:
                raise FormatError(f"{label} is no embedding: it needs a table (V, E) and tokens")
            self.num_tokens = len(x)
            return second.then(Embedding(name, np.asarray(x, np.float32)), x.shape[1])
        if kind in ("MatMul", "Gemm"):
            return self._dense(label, name, get, x, second, third)
        if kind in ("Add", "Sub", "Mul", "Div"):
            return _arithmetic(label, kind, x, second)
        if kind in _MOVES:
            self._check_move(node, get, inputs)
            return x  # type: ignore[no-any-return]
        if kind == "LayerNormalization":
            scale = np.asarray(second, np.float32).reshape(-1)
            shift = np.zeros_like(scale) if third is None else np.asarray(third, np.float32)
            epsilon = float(np.float32(get("epsilon", 1e-5)))
            return x.then(LayerNorm(name, scale, shift.reshape(-1), epsilon))  # type: ignore[no-any-return]
        if kind not in _FUNCTIONS:
            raise _unknown(label)
        is_new = kind == "HardSigmoid" and abs(get("alpha", 0.2) - 1 / 6) < 1e-6
        return x.then(Function(name, "hard_sigmoid" if is_new else _FUNCTIONS[kind]))  # type: ignore[no-any-return]

    def _dense(
        self, label: str, name: str, get: Callable[..., Any], x: Any, weight: Any, bias: Any
    ) -> _Stream:
        is_known = isinstance(weight, np.ndarray) and isinstance(bias, np.ndarray | None)
        if not isinstance(x, _Stream) or not is_known or weight.ndim != 2 or get("transA", 0):
            raise FormatError(f"{label} is imported as steps times a matrix of the file")
        weight = np.asarray(weight if get("transB", 0) else weight.T, np.float32)
        weight = weight if get("alpha", 1.0) == 1 else weight * np.float32(get("alpha"))
        is_both = isinstance(x.last, LSTMLayer) and x.last.backward is not None
        if is_both and 2 * weight.shape[1] == x.width:
            self._half = len(x.layers)  # `proved` finds out which half is read
            weight = np.concatenate([np.zeros_like(weight), weight], 1)
        if weight.shape[1] != x.width:
            raise FormatError(
                f"{label} has a matrix for {weight.shape[1]} columns and does not read the"
                f" {x.width} columns of each step"
            )
        K = len(weight)
        y = x.then(Dense(name, np.ascontiguousarray(weight), np.zeros(K, np.float32)), K)
        if bias is None:
            return y
        beta = np.float32(get("beta", 1.0))
        return _scaled(label, y, None, bias if beta == 1 else beta * bias)

    def _check_move(self, node: Any, get: Callable[..., Any], inputs: list[Any]) -> None:
        """Refuses cuts of long sequences: the inputs that are answered are short ones."""
        kind, label = node.op_type, _label(node)
        self._reverses |= kind == "ReverseSequence"
        if kind == "Dropout" and len(inputs) > 2 and np.any(inputs[2]):
            raise FormatError(f"{label} is in training mode; export the model after eval()")
        if kind not in ("Slice", "Gather"):
            return
        given = inputs[1:] if len(inputs) > 1 else map(get, ("starts", "ends", "axes"))
        parts: list[Any] = [None if part is None else np.ravel(part) for part in given]
        if kind == "Gather":
            bounds, axes, step = parts[:1], [get("axis", 0)] * len(parts[0]), None
        else:
            (*bounds, axes, step) = [*parts, None, None][:4]
            axes = [*range(len(bounds[0]))] if axes is None else axes
        self._reverses |= step is not None and bool((step < 0).any())
        shape = self._shapes.get(node.input[0], ())
        for k, axis in enumerate(map(int, axes)):
            is_known = -len(shape) <= axis < len(shape) and shape[axis] is not None
            if not is_known and any(1 < abs(int(part[k])) < _TO_THE_END for part in bounds):
                raise FormatError(
                    f"{label} cuts sequences that are longer than a fixed number of steps"
                )

    def _lstm(self, label: str, get: Callable[..., Any], inputs: list[Any]) -> tuple[Any, ...]:
        x, W, R, B, lengths, h, c, P = inputs
        constants = [part for part in (W, R, B, P) if part is not None]
        if not all(isinstance(part, np.ndarray) for part in constants) or R is None or R.ndim != 3:
            raise FormatError(f"{label} has weights that are no constants of the file")
        if not isinstance(x, _Stream):
            raise FormatError(f"{label} reads what no input of the model becomes")
        layer = _lstm_layer(label, get, W, R, B, P)
        if layer.input_size != x.width or x.is_state:
            raise FormatError(
                f"{label} has input_size {layer.input_size} and does not read the columns of each"
                " step"
            )
        for state in (h, c):
            if isinstance(state, _Stream) or getattr(state, "kind", "") == "state":
                raise FormatError(f"{label} starts from a state that another LSTM writes")
            if isinstance(state, np.ndarray) and state.any():
                raise FormatError(f"{label} starts from a state that is stored, and not zero")
        if not isinstance(lengths, _Aside | None):
            raise FormatError(f"{label} has sequence_lens that are not the input's length")
        for aside, kind in ((h, "state"), (c, "state"), (lengths, "lengths")):
            if isinstance(aside, _Aside):
                self.asides |= dict.fromkeys(aside.inputs, kind)
        self._reverses |= get("direction") == b"reverse"
        y = x.then(layer, layer.output_size)
        return y, replace(y, is_state=True), _Aside("state")


def _joined(label: str, streams: list[_Stream], asides: list[_Aside]) -> Any:
    """Returns both directions of one LSTM, or the states of several."""
    if not asides and all(stream.layers == streams[0].layers for stream in streams):
        return streams[0]
    if all(stream.is_state for stream in streams) and all(a.kind != "size" for a in asides):
        if not asides:
            return max(streams, key=lambda stream: len(stream.layers))
        is_input = not streams and all(aside.kind == "input" for aside in asides)
        inputs = frozenset[str]().union(*(aside.inputs for aside in asides))
        return _Aside("input" if is_input else "state", inputs)
    if not streams:
        return _Aside("size")
    raise FormatError(f"{label} joins different paths; imported are models of one")


def _arithmetic(label: str, kind: str, a: Any, b: Any) -> _Stream:
    """Returns a layer's output with constants, or both ways of an LSTM as one."""
    if isinstance(a, _Stream) and isinstance(b, _Stream):
        merges: dict[str, Merge] = {"Add": "sum", "Mul": "mul"}
        last, merge = a.last, merges.get(kind)
        is_both = isinstance(last, LSTMLayer) and last.backward is not None
        if a.layers != b.layers or not is_both or merge is None or last.merge != "concat":  # type: ignore[union-attr]
            raise FormatError(f"{label} joins different paths; imported are models of one")
        assert isinstance(last, LSTMLayer)
        return a.with_last(replace(last, merge=merge), last.hidden_size)
    x, array = (a, b) if isinstance(a, _Stream) else (b, a)
    is_turned = kind in ("Sub", "Div") and x is b
    if not isinstance(array, np.ndarray) or is_turned or (kind == "Div" and not array.all()):
        raise FormatError(f"{label} is imported with a constant, as its second input")
    if kind in ("Add", "Sub"):
        return _scaled(label, x, None, array if kind == "Add" else -array)
    return _scaled(label, x, array if kind == "Mul" else np.float32(1) / array, None)


def _scaled(label: str, x: _Stream, scale: Any, shift: Any) -> _Stream:
    """Returns `x * scale` or `x + shift`, with one number for each column or one for all."""
    given = np.asarray(shift if scale is None else scale, np.float32)
    if given.size not in (1, x.width) or x.width == 0:
        raise FormatError(f"{label} has constants that are not those of a column")
    values = np.broadcast_to(given.reshape(-1), (x.width,)).copy()
    last = x.last
    if isinstance(last, Dense) and scale is None:
        return x.with_last(replace(last, bias=last.bias + values if last.bias.any() else values))
    is_sum = isinstance(last, LSTMLayer) and last.merge == "sum"
    if isinstance(last, LSTMLayer) and is_sum and scale is not None and (values == 0.5).all():
        return x.with_last(replace(last, merge="ave"))
    diagonal = np.eye(x.width, dtype=np.float32) if scale is None else np.diag(values)
    return x.then(Dense(label, diagonal, values if scale is None else np.zeros_like(values)))


def _lstm_layer(label: str, get: Callable[..., Any], W: Any, R: Any, B: Any, P: Any) -> LSTMLayer:
    D, H = R.shape[0], R.shape[2]
    for name, is_so in {
        "peepholes (its input P)": P is not None and P.any(), "clip": get("clip"),
        "input_forget": get("input_forget"),
    }.items():  # fmt: skip
        if is_so:
            raise FormatError(f"{label} has {name}, which is not imported")
    given = get("activations") or [b"sigmoid", b"tanh", b"tanh"] * D
    names = [name.decode("utf-8", "replace").lower() for name in given]
    if not set(names) <= _ACTIVATIONS.keys() or names[:3] != names[-3:] or names[1] != names[2]:
        raise FormatError(
            f"{label} has the activations {', '.join(names)}; imported are"
            f" {', '.join(_ACTIVATIONS)}, alike for candidate and cell and for both directions"
        )
    order = np.concatenate([np.arange(H) + k * H for k in _GATES])
    factor, added = np.ones(4 * H, np.float32), np.zeros(4 * H, np.float32)
    if names[0] == "hardsigmoid":
        # clip(alpha x + beta) is clip(y / 6 + 0.5) at y = 6 alpha x + 6 (beta - 0.5)
        is_gate = np.repeat([True, True, False, True], H)
        alpha, beta = (
            (get(f"activation_{n}") or [d])[0] for n, d in (("alpha", 0.2), ("beta", 0.5))
        )
        if abs(alpha - 1 / 6) > 1e-6 or beta != 0.5:
            factor[is_gate], added[is_gate] = 6 * alpha, 6 * (beta - 0.5)
    cells = []
    for d in range(D):
        w, r = (np.asarray(part[d], np.float32)[order] * factor[:, None] for part in (W, R))
        b = np.zeros(4 * H, np.float32) if B is None else (B[d, : 4 * H] + B[d, 4 * H :])[order]
        cells.append(CellWeights(w, r, np.asarray(b * factor + added, np.float32)))
    return LSTMLayer(
        label, cells[0], cells[1] if D == 2 else None,
        activation=_ACTIVATIONS[names[1]], recurrent_activation=_ACTIVATIONS[names[0]],
    )  # fmt: skip


def _shape(item: Any) -> tuple[int | None, ...]:
    dims = item.type.tensor_type.shape.dim
    return tuple(dim.dim_value if dim.dim_value > 0 else None for dim in dims)


def _unknown(label: str) -> FormatError:
    return FormatError(
        f"{label} is no operator that is imported; imported are LSTM, Gather of tokens, MatMul,"
        " Gemm, LayerNormalization, functions, and constants added or multiplied"
    )


def _label(node: Any) -> str:
    name = node.name or next((out for out in node.output if out), "")
    return f"{_printable(node.op_type)} '{_printable(name)}'"


def _line(error: Exception) -> str:
    """Returns an error as one line, without ONNX Runtime's own places."""
    if isinstance(error, MemoryError) or "bad_alloc" in str(error):
        raise MemoryError
    line = (str(error) or type(error).__name__).splitlines()[0]
    return _printable(re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : |/\S+:\d+ .*?\) ", "", line), 200)


def _printable(text: str, length: int = 80) -> str:
    """Returns a text of the file for people: one line, not endless."""
    return "".join(c if c.isprintable() else " " for c in text).strip()[:length]


def proved(arrays: dict[str, NDArray[Any]], about: dict[str, Any]) -> LayerStack:
    """Returns the layers in the arrangement that gives ONNX Runtime's answers."""
    stack = unpack(arrays, about["stack"])
    answers = [(order, arrays[f"x{k}"], arrays[f"y{k}"]) for k, order in enumerate(about["orders"])]
    for candidate in _candidates(stack, about["reverses"], about["half"]):
        own = [case for case in answers if case[0] in (None, candidate.is_time_major)]
        if own and all(_is_answer(candidate, x, y) for _, x, y in own):
            window = about["sizes"][0 if candidate.is_time_major else 1]
            return replace(candidate, window=None if window == 1 else window)
    kinds = ", ".join(type(layer).__name__ for layer in stack.layers)
    raise FormatError(
        f"its layers ({kinds}) do not give ONNX Runtime's answers, neither at every step nor at the"
        " last one: it computes something between them that is not imported"
    )


def _candidates(stack: LayerStack, reverses: bool, half: int) -> Iterator[LayerStack]:
    """Yields what the operators that move values may have made of the layers."""
    lstms = {k: layer for k, layer in enumerate(stack.layers) if isinstance(layer, LSTMLayer)}
    one_way = [k for k, layer in lstms.items() if layer.backward is None][:4]
    flips = itertools.product((False, True), repeat=len(one_way)) if reverses else [()]
    halves = (False, True) if half >= 0 else (False,)
    last = max(lstms)
    for is_time_major, flip, is_first in itertools.product((False, True), [*flips], halves):
        layers = list(stack.layers)
        flipped = zip(one_way, flip, strict=False)
        own = lstms | {k: replace(lstms[k], reverses=is_flipped) for k, is_flipped in flipped}
        for k, layer in own.items():
            layers[k] = layer
        if is_first:
            dense = layers[half]
            assert isinstance(dense, Dense)
            weight = np.roll(dense.weight, dense.weight.shape[1] // 2, 1)
            layers[half] = replace(dense, weight=weight)
        before, after = layers[:last], layers[last + 1 :]
        for ways in (
            layers,
            [*before, replace(own[last], every_step=False), *after],
            [*before, own[last], Steps("steps", "last"), *after],
            *([[*layers, Steps("steps", "reversed")]] if reverses else []),
        ):
            yield replace(stack, layers=tuple(ways), is_time_major=is_time_major)


def _is_answer(stack: LayerStack, x: NDArray[Any], y: NDArray[Any]) -> bool:
    """Whether the layers give these outputs, whatever the order of their axes."""
    import torch

    from fastlstm.sequence.stack_module import ImportedModel

    given = torch.from_numpy(x if x.ndim > 1 else x[None] if stack.is_time_major else x[:, None])
    try:
        with torch.no_grad():
            got = ImportedModel(stack)(given)
    except FastLSTMError:
        return False
    if stack.ends_in_softmax:
        is_log = stack.layers[-1] == Function(stack.layers[-1].name, "log_softmax")
        got = got.log_softmax(-1) if is_log else got.softmax(-1)
    values, flat = got.numpy(), np.asarray(y, np.float32).ravel()
    if values.size != flat.size:
        return False
    limit = _LIMIT * max(1.0, float(np.abs(flat).max(initial=0.0)))
    return any(
        bool((np.abs(values.transpose(order).ravel() - flat) <= limit).all())
        for order in itertools.permutations(range(values.ndim))
    )
