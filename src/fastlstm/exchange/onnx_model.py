"""ONNX files with LSTM operators as layer stacks.

`read_onnx` runs in the `converter` process: ONNX Runtime folds constants, operators with weights
become layers, and ONNX Runtime computes the outputs of random inputs of two sizes. Operators that
only move values are not interpreted. `proved` tries the few possible arrangements (axis of time,
last step or every step, directions) and returns the one with ONNX Runtime's outputs.
"""

from __future__ import annotations

import itertools
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import FastLSTMError, FormatError
from fastlstm.ops.cell_options import Activation
from fastlstm.sequence import layer_stack as ls
from fastlstm.sequence.layer_stack import pack, unpack

Packed = tuple[dict[str, NDArray[Any]], dict[str, Any]]
_SIZES = ((7, 3), (4, 6))
"""Lengths of the first two input axes, where callers choose them."""
_MAX_NODES, _TO_THE_END, _LIMIT = 20_000, 1 << 30, 1e-4
_MOVES = (
    *("Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Gather"),
    *("Split", "ReverseSequence", "Cast", "Dropout", "Concat"),
)
_ON_SIZES = (*_MOVES, "Add", "Sub", "Mul", "Div", "ConstantOfShape", "Expand")
_FUNCTIONS = {
    "Relu": "relu", "Tanh": "tanh", "Sigmoid": "sigmoid", "Softsign": "softsign",
    "Softplus": "softplus", "Exp": "exponential", "Elu": "elu", "Gelu": "gelu",
    "HardSigmoid": "hard_sigmoid_0.2", "Softmax": "softmax", "LogSoftmax": "log_softmax",
}  # fmt: skip
_GATES = (0, 2, 3, 1)
"""Gates i, f, g, o in ONNX's order i, o, f, c."""
_ACTIVATIONS: dict[str, Activation] = {
    "sigmoid": "sigmoid", "tanh": "tanh", "relu": "relu", "softsign": "softsign",
    "hardsigmoid": "hard_sigmoid", "affine": "linear",
}  # fmt: skip


def read_onnx(data: bytes, folder: Path, allow: Callable[[int], None]) -> Packed:
    """Returns the layers of a file and ONNX Runtime's outputs, for `proved`.

    Arrays outside the file must be in `folder` or below; `allow` gets their bytes before they are
    read.
    """
    import onnx

    try:
        model = onnx.load_model_from_string(data)
    except Exception as error:  # protobuf's DecodeError
        raise FormatError(f"it is damaged, or no ONNX file ({_line(error)})") from None
    if len(model.graph.node) > _MAX_NODES:
        raise FormatError(f"it has {len(model.graph.node)} nodes; were its loops unrolled?")
    _load_arrays_beside(onnx, model, folder, allow)
    session, folded = _folded(onnx, model)
    reader = _OnnxReader(onnx, folded.graph)
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), "?")
    maker = _printable(f"{model.producer_name} {model.producer_version}") or "ONNX"
    stack = ls.LayerStack(tuple(reader.layers), f"{maker}, opset {opset}", notes=reader.notes())
    arrays, about = pack(stack)
    answers, orders = _answers(session, reader)
    more = {"orders": orders, "reverses": reader.reverses, "half": reader.half}
    sizes = [*reader.shape[:2]] if len(reader.shape) > 1 else [1, 1]
    return {**arrays, **answers}, {"stack": about, "sizes": sizes, **more}


def _load_arrays_beside(onnx: Any, model: Any, folder: Path, allow: Callable[[int], None]) -> None:
    """Reads arrays outside the file, with onnx's checks: no link, no other directory."""
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
    """Returns a session of the model, and the model with folded constants."""
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
    session: Any, reader: _OnnxReader
) -> tuple[dict[str, NDArray[Any]], list[bool | None]]:
    """Returns random inputs and ONNX Runtime's outputs, and each input's axis of time: states and
    lengths beside the input depend on it."""
    states = [shape for kind, shape in reader.others.values() if kind.kind == "f"]
    B = next((shape[1] for shape in states if len(shape) == 3 and shape[1]), None)
    arrays: dict[str, NDArray[Any]] = {}
    orders: list[bool | None] = []
    for seed, free in enumerate(_SIZES):
        sizes = [int(size or B or n) for size, n in zip(reader.shape[:2], free, strict=False)]
        rng, problem, known = np.random.default_rng(seed), "", len(orders)
        if reader.num_tokens:
            x = rng.integers(0, reader.num_tokens, sizes).astype(reader.dtype)
        else:
            x = rng.normal(size=[*sizes, *reader.shape[2:]]).astype(reader.dtype)  # type: ignore[list-item]
        for is_time_major in (False, True) if reader.others else (None,):
            num = sizes[-1] if is_time_major else sizes[0]
            feeds = {reader.main: x}
            for name, (dtype, shape) in reader.others.items():
                value = 0 if dtype.kind == "f" else math.prod(sizes) // num
                feeds[name] = np.full([n or num for n in shape], value, dtype)
            try:
                found = session.run(reader.outputs, feeds)
            except Exception as error:  # ONNX Runtime has many kinds
                problem = problem or _line(error)
                continue
            arrays[f"x{len(orders)}"] = x
            arrays |= {f"y{len(orders)}.{k}": np.asarray(y) for k, y in enumerate(found)}
            orders.append(is_time_major)
        if len(orders) == known:
            shown = " × ".join(map(str, sizes))
            raise FormatError(
                f"ONNX Runtime cannot run it on {shown} steps and sequences ({problem}): where the"
                " exporter wrote the sizes of its example into nodes, export with torch's"
                " dynamo=False, or with fixed sizes"
            )
    return arrays, orders


class _OnnxReader:
    """Turns the nodes of a folded graph into layers, in order.

    If the graph is not one path, the outputs will not match.

    Attributes:
        main: input of the first LSTM, with `dtype` and `shape`; None is a size that callers choose.
        others: other inputs by name: states are floats, lengths of sequences integers.
        num_tokens: V of a model that reads token ids, else 0.
        reverses: something reads or writes a sequence backwards.
        half: number of the layer that reads one direction of an LSTM, or -1.
    """

    def __init__(self, onnx: Any, graph: Any) -> None:
        self._onnx = onnx
        self.layers: list[ls.Layer] = []
        self.num_tokens, self.reverses, self.half = 0, False, -1
        self.outputs = [item.name for item in graph.output]
        self._shapes = {v.name: _shape(v) for v in (*graph.value_info, *graph.input, *graph.output)}
        self._constants: dict[str, Any] = {
            tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer
        }
        kinds = {item.name: item.type.tensor_type.elem_type for item in graph.input}
        self.others = {
            name: (np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind)), self._shapes[name])
            for name, kind in kinds.items()
            if name not in self._constants
        }
        self._read_by = self._sources(graph)
        self.main = self._main_input(graph)
        self.dtype, self.shape = self.others.pop(self.main)
        if not 1 <= len(self.shape) <= 3 or (len(self.shape) == 3 and self.shape[2] is None):
            raise FormatError(
                f"its input '{self.main}' has the shape {self.shape or 'unknown'}, expected two"
                " axes of steps and sequences, and a third one of a fixed number of columns"
            )
        if len(self.shape) == 1 and not self.others:
            raise FormatError("it reads one step and has no state before it: it is no sequence")
        self._width = int(self.shape[2] or 0) if len(self.shape) == 3 else 0
        for node in graph.node:
            self._read(node)

    def notes(self) -> tuple[str, ...]:
        """Returns how the inputs beside the main one are read."""
        said = {
            "f": "taken for the state before the first step: here a sequence starts from zero,"
            " and a text run carries the state",
            "i": "the lengths of sequences: here all are read in full",
        }
        notes = []
        for kind, text in said.items():
            names = [n for n, (dtype, _) in self.others.items() if dtype.kind == kind]
            shown = ", ".join(f"'{_printable(name)}'" for name in names)
            notes += [f"the inputs {shown} are {text}"] if names else []
        return tuple(notes)

    def _sources(self, graph: Any) -> dict[str, set[str]]:
        """Returns the inputs that each value depends on; a dependence on sizes does not count."""
        sources = {name: {name} for name in self.others}
        for node in graph.node:
            read = [sources.get(name, set()) for name in node.input]
            found = set() if node.op_type in ("Shape", "Size") else set().union(*read)
            sources |= {name: found for name in node.output if name}
        return sources

    def _main_input(self, graph: Any) -> str:
        """Returns the input of the first LSTM; other inputs are states or lengths."""
        for node in graph.node:
            if node.op_type == "LSTM":
                read = self._read_by.get(node.input[0], set())
                found = [name for name in self.others if name in read]
                if not found:
                    raise FormatError(f"{_label(node)} reads what no input of the model becomes")
                return str(found[0])
        kinds = sorted({node.op_type for node in graph.node})
        shown = ", ".join((*kinds[:12], "…") if len(kinds) > 12 else kinds)
        raise FormatError(f"it has no LSTM operator outside of loops; its operators are {shown}")

    @property
    def _last(self) -> ls.Layer | None:
        return self.layers[-1] if self.layers else None

    def _add(self, layer: ls.Layer, width: int | None = None) -> None:
        self.layers.append(layer)
        self._width = width or self._width

    def _read(self, node: Any) -> None:
        kind, label, name = node.op_type, _label(node), _printable(node.name or node.output[0])
        get = {a.name: self._onnx.helper.get_attribute_value(a) for a in node.attribute}.get
        inputs = [self._constants.get(given) for given in node.input]
        is_on_path = any(self.main in self._read_by.get(given, ()) for given in node.input)
        if node.domain not in ("", "ai.onnx"):
            raise FormatError(f"{label} is no operator of ONNX itself, and is not imported")
        if kind == "LSTM":
            return self._lstm(label, node, get, inputs)
        if kind in ("Shape", "Size") or (not is_on_path and kind in _ON_SIZES):
            return None  # sizes and states
        if kind == "Gather" and inputs[0] is not None:
            if self.layers or self._width or inputs[0].ndim != 2:
                raise FormatError(f"{label} is no embedding: it needs a table (V, E) and tokens")
            self.num_tokens, table = len(inputs[0]), np.asarray(inputs[0], np.float32)
            return self._add(ls.Embedding(name, table), table.shape[1])
        if kind in _MOVES:
            return self._check_move(label, node, get, inputs)
        if kind in ("MatMul", "Gemm"):
            return self._dense(label, name, get, *[*inputs, None][:3])
        if kind in ("Add", "Sub", "Mul", "Div"):
            return self._arithmetic(label, kind, *inputs)
        if kind == "LayerNormalization":
            scale, shift = [*inputs[1:], None][:2]
            shift = np.zeros_like(scale) if shift is None else shift
            scale, shift = (np.asarray(part, np.float32).reshape(-1) for part in (scale, shift))
            return self._add(
                ls.LayerNorm(name, scale, shift, float(np.float32(get("epsilon", 1e-5))))
            )
        if kind not in _FUNCTIONS:
            raise FormatError(
                f"{label} is no operator that can be imported; expected LSTM, Gather of tokens,"
                " MatMul, Gemm, LayerNormalization, functions, and constants added or multiplied"
            )
        is_new = kind == "HardSigmoid" and abs(get("alpha", 0.2) - 1 / 6) < 1e-6
        return self._add(ls.Function(name, "hard_sigmoid" if is_new else _FUNCTIONS[kind]))

    def _dense(self, label: str, name: str, get: Any, x: Any, weight: Any, bias: Any) -> None:
        if x is not None or weight is None or weight.ndim != 2 or get("transA", 0):
            raise FormatError(f"{label} is imported as steps times a matrix of the file")
        weight = np.asarray(weight if get("transB", 0) else weight.T, np.float32)
        weight = weight if get("alpha", 1.0) == 1 else weight * np.float32(get("alpha"))
        is_both = isinstance(self._last, ls.LSTMLayer) and self._last.backward is not None
        if is_both and 2 * weight.shape[1] == self._width:
            self.half = len(self.layers)  # `proved` finds out which half is read
            weight = np.concatenate([np.zeros_like(weight), weight], 1)
        if weight.shape[1] != self._width:
            raise FormatError(
                f"{label} has a matrix for {weight.shape[1]} columns and does not read the"
                f" {self._width} columns of each step"
            )
        K = len(weight)
        self._add(ls.Dense(name, np.ascontiguousarray(weight), np.zeros(K, np.float32)), K)
        if bias is not None:
            beta = np.float32(get("beta", 1.0))
            self._arithmetic(label, "Add", None, bias if beta == 1 else beta * bias)

    def _arithmetic(self, label: str, kind: str, a: Any, b: Any) -> None:
        """Reads arithmetic with a constant, or the merge of an LSTM's two directions."""
        last, array = self._last, b if a is None else a
        if array is None:
            merges: dict[str, ls.Merge] = {"Add": "sum", "Mul": "mul"}
            if not isinstance(last, ls.LSTMLayer) or last.backward is None or kind not in merges:
                raise FormatError(f"{label} joins different paths; expected a model of one path")
            self.layers[-1], self._width = replace(last, merge=merges[kind]), last.hidden_size
            return
        is_turned = kind in ("Sub", "Div") and a is not None
        if is_turned or array.size not in (1, self._width) or (kind == "Div" and not array.all()):
            raise FormatError(f"{label} has constants that do not belong to a column")
        array = np.asarray(array, np.float32).reshape(-1)
        array = -array if kind == "Sub" else np.float32(1) / array if kind == "Div" else array
        values, is_shift = np.broadcast_to(array, (self._width,)).copy(), kind in ("Add", "Sub")
        is_half = not is_shift and bool((values == 0.5).all())
        if isinstance(last, ls.Dense) and is_shift:
            bias = last.bias + values if last.bias.any() else values
            self.layers[-1] = replace(last, bias=bias)
        elif isinstance(last, ls.LSTMLayer) and last.merge == "sum" and is_half:
            self.layers[-1] = replace(last, merge="ave")
        else:
            diagonal = np.eye(self._width, dtype=np.float32) if is_shift else np.diag(values)
            self._add(ls.Dense(label, diagonal, values if is_shift else np.zeros_like(values)))

    def _check_move(self, label: str, node: Any, get: Any, inputs: list[Any]) -> None:
        """Refuses cuts of long sequences, which the short random inputs would not show."""
        kind = node.op_type
        self.reverses |= kind == "ReverseSequence"
        if kind == "Dropout" and np.any(inputs[2:]):
            raise FormatError(f"{label} is in training mode; export the model after eval()")
        if kind not in ("Slice", "Gather"):
            return
        given = inputs[1:] if len(inputs) > 1 else map(get, ("starts", "ends", "axes"))
        parts: list[Any] = [None if part is None else np.ravel(part) for part in given]
        if parts[0] is None or (kind == "Slice" and parts[1] is None):
            raise FormatError(f"{label} cuts a sequence at a place that is computed")
        if kind == "Gather":
            bounds, axes, step = parts[:1], [get("axis", 0)] * len(parts[0]), None
        else:
            (*bounds, axes, step) = [*parts, None, None][:4]
            axes = [*range(len(bounds[0]))] if axes is None else axes
        self.reverses |= step is not None and bool((step < 0).any())
        shape = self._shapes.get(node.input[0], ())
        for k, axis in enumerate(map(int, axes)):
            is_known = -len(shape) <= axis < len(shape) and shape[axis] is not None
            if not is_known and any(1 < abs(int(part[k])) < _TO_THE_END for part in bounds):
                raise FormatError(
                    f"{label} cuts sequences that are longer than a fixed number of steps"
                )

    def _lstm(self, label: str, node: Any, get: Any, inputs: list[Any]) -> None:
        _, W, R, B, lengths, h, c, P = [*inputs, *[None] * 8][:8]
        names = [*node.input, *[""] * 8][:8]
        if W is None or R is None or any(names[k] and inputs[k] is None for k in (3, 7)):
            raise FormatError(f"{label} has weights that are no constants of the file")
        if any(self.main in self._read_by.get(names[k], ()) for k in (5, 6)):
            raise FormatError(f"{label} starts from a state that is computed from the input")
        if any(state is not None and state.any() for state in (h, c)):
            raise FormatError(f"{label} starts from a state that is stored, and not zero")
        layer = _lstm_layer(label, get, W, R, B, P)
        if lengths is not None:
            raise FormatError(f"{label} has sequence_lens that are not the input's length")
        if layer.input_size != self._width:
            raise FormatError(
                f"{label} has input_size {layer.input_size} and does not read the columns of each"
                " step"
            )
        self.reverses |= get("direction") == b"reverse"
        self._add(layer, layer.output_size)


def _lstm_layer(label: str, get: Any, W: Any, R: Any, B: Any, P: Any) -> ls.LSTMLayer:
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
        cells.append(ls.CellWeights(w, r, np.asarray(b * factor + added, np.float32)))
    return ls.LSTMLayer(
        label, cells[0], cells[1] if D == 2 else None,
        activation=_ACTIVATIONS[names[1]], recurrent_activation=_ACTIVATIONS[names[0]],
    )  # fmt: skip


def _shape(item: Any) -> tuple[int | None, ...]:
    dims = item.type.tensor_type.shape.dim
    return tuple(dim.dim_value if dim.dim_value > 0 else None for dim in dims)


def _label(node: Any) -> str:
    name = node.name or next((out for out in node.output if out), "")
    return f"{_printable(node.op_type)} '{_printable(name)}'"


def _line(error: Exception) -> str:
    """Returns an error as one line, without ONNX Runtime's source positions."""
    if isinstance(error, MemoryError) or "bad_alloc" in str(error):
        raise MemoryError
    line = (str(error) or type(error).__name__).splitlines()[0]
    return _printable(re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : |/\S+:\d+ .*?\) ", "", line), 200)


def _printable(text: str, length: int = 80) -> str:
    """Returns a text from the file as one short printable line."""
    return "".join(c if c.isprintable() else " " for c in text).strip()[:length]


def proved(arrays: dict[str, NDArray[Any]], about: dict[str, Any]) -> ls.LayerStack:
    """Returns the layers in the arrangement that gives ONNX Runtime's outputs."""
    stack = unpack(arrays, about["stack"])
    for candidate in _candidates(stack, about["reverses"], about["half"]):
        is_time_major = candidate.is_time_major
        cases = [k for k, order in enumerate(about["orders"]) if order in (None, is_time_major)]
        found = [_answered(candidate, k, arrays) for k in cases]
        if found and set.intersection(*found):
            window = about["sizes"][0 if candidate.is_time_major else 1]
            return replace(candidate, window=None if window == 1 else window)
    kinds = ", ".join(type(layer).__name__ for layer in stack.layers)
    raise FormatError(
        f"its layers ({kinds}) do not give ONNX Runtime's answers, neither at every step nor at the"
        " last one: it computes something between them that is not imported"
    )


def _candidates(stack: ls.LayerStack, reverses: bool, half: int) -> Iterator[ls.LayerStack]:
    """Yields the arrangements of the layers that are possible when operators move values."""
    lstms = {k: layer for k, layer in enumerate(stack.layers) if isinstance(layer, ls.LSTMLayer)}
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
            assert isinstance(dense, ls.Dense)
            weight = np.roll(dense.weight, dense.weight.shape[1] // 2, 1)
            layers[half] = replace(dense, weight=weight)
        before, after = layers[:last], layers[last + 1 :]
        for ways in (
            layers,
            [*before, replace(own[last], every_step=False), *after],
            [*before, own[last], ls.Steps("steps", "last"), *after],
            *([[*layers, ls.Steps("steps", "reversed")]] if reverses else []),
        ):
            yield replace(stack, layers=tuple(ways), is_time_major=is_time_major)


def _answered(stack: ls.LayerStack, case: int, arrays: dict[str, NDArray[Any]]) -> set[int]:
    """Returns the numbers of the outputs that the layers reproduce, in any order of axes."""
    import torch

    from fastlstm.sequence.stack_module import ImportedModel

    x = arrays[f"x{case}"]
    given = torch.from_numpy(x if x.ndim > 1 else x[None] if stack.is_time_major else x[:, None])
    try:
        with torch.no_grad():
            got = ImportedModel(stack)(given)
    except FastLSTMError:
        return set()
    if stack.ends_in_softmax:
        is_log = stack.layers[-1] == ls.Function(stack.layers[-1].name, "log_softmax")
        got = got.log_softmax(-1) if is_log else got.softmax(-1)
    values = got.numpy()
    orders = [*itertools.permutations(range(values.ndim))]
    found, k = set(), 0
    while (y := arrays.get(f"y{case}.{k}")) is not None:
        flat = np.asarray(y, np.float32).ravel()
        limit = _LIMIT * max(1.0, float(np.abs(flat).max(initial=0.0)))
        if flat.size == values.size and any(
            (np.abs(values.transpose(order).ravel() - flat) <= limit).all() for order in orders
        ):
            found.add(k)
        k += 1
    return found
