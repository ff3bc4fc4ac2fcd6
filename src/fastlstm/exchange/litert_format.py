"""LiteRT files (.tflite): written from a `Graph` with built-in operations alone, and run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import ConfigError, FormatError
from fastlstm.exchange.graph import CELL_EPSILON, Graph, Node, interpret
from fastlstm.exchange.litert_file import (
    SIGNATURE,
    LiteRTFile,
    LiteRTOperations,
    Tensor,
    missing,
    packed,
)
from fastlstm.ops.cell_options import CellOptions

_OPERATORS = {
    **{"add": "ADD", "sub": "SUB", "mul": "MUL", "div": "DIV", "maximum": "MAXIMUM"},
    **{"minimum": "MINIMUM", "equal": "EQUAL", "less": "LESS", "where": "SELECT_V2"},
    **{"relu": "RELU", "sigmoid": "LOGISTIC", "tanh": "TANH", "exp": "EXP", "log": "LOG"},
    **{"sqrt": "SQRT", "abs": "ABS", "neg": "NEG", "not": "LOGICAL_NOT"},
}


def write_litert(graph: Graph) -> bytes:
    """Returns the graph as a .tflite file.

    Axes with a name are resized when the file runs. Its signature has the names of the graph's
    inputs and outputs.
    """
    return _Writer(graph).model()


class _Writer:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._file = LiteRTFile(graph.name)
        self._ops = LiteRTOperations(self._file, graph.weights)

    def model(self) -> bytes:
        """Returns the file."""
        graph = self._graph
        for value in graph.inputs:
            if "T" in value.shape:
                raise ConfigError(
                    f"input '{value.name}' has any number of time steps, a LiteRT model a fixed"
                    " number; give a sequence model's `length`, or export to onnx"
                )
        inputs = {v.name: self._file.tensor(v.name, v.dtype, v.shape) for v in graph.inputs}
        outputs = interpret(graph, inputs, self._written)
        for name, text in graph.metadata.items():
            self._file.add_metadata(name, text)
        return self._file.to_bytes(inputs, outputs)

    def _written(self, node: Node, *inputs: Tensor) -> Any:
        ops, out, kind = self._ops, node.outputs[0], node.kind
        if kind in _OPERATORS:
            return ops.op(_OPERATORS[kind], inputs, out.shape, out.dtype)
        if kind in ("sum", "mean", "max"):
            return ops.reduce(kind, inputs[0], node.attributes["axis"])
        if kind == "lstm":
            names = ("directions", "options")
            return write_lstm(ops, *inputs, **{name: node.attributes[name] for name in names})
        if kind == "identity":
            return ops.reshape(inputs[0], inputs[0].shape, out.name)
        if kind == "reshape":
            return ops.reshape(inputs[0], out.shape)
        if kind == "concat":
            return ops.concat(inputs, **node.attributes)
        written: dict[str, Callable[..., Tensor]] = {
            "weight": ops.floats, "gather": lambda indices, table: ops.gather(table, indices),
            "linear": self._linear, "layer_norm": self._layer_norm, "softplus": self._softplus,
            "is_nan": lambda x: ops.op("NOT_EQUAL", [x, x], x.shape, "bool"),
            "cast": lambda x, to: ops.cast(x, to), "slice": ops.slice, "sort": ops.sort,
            "transpose": ops.transpose,
        }  # fmt: skip
        if kind not in written:
            raise ConfigError(f"LiteRT files have no operation '{kind}' here; export to ONNX")
        return written[kind](*inputs, **node.attributes)

    def _linear(self, x: Tensor, weight: str, bias: str | None) -> Tensor:
        return self._ops.linear(x, weight, None if bias is None else self._ops.floats(bias))

    def _layer_norm(self, x: Tensor, weight: str, bias: str, eps: float) -> Tensor:
        ops = self._ops
        scaled = ops.binary("MUL", ops.normalised(x, eps), ops.floats(weight))
        return ops.binary("ADD", scaled, ops.floats(bias))

    def _softplus(self, x: Tensor) -> Tensor:
        """max(x, 0) + log(1 + exp(-|x|)): nothing in it overflows."""
        ops = self._ops
        powers = ops.unary("EXP", ops.unary("NEG", ops.unary("ABS", x)))
        rest = ops.unary("LOG", ops.binary("ADD", powers, 1.0))
        return ops.binary("ADD", ops.unary("RELU", x), rest)


class LitertRunner:
    """A .tflite file in LiteRT's interpreter, on one thread."""

    def __init__(self, path: Path, *, is_exact: bool = False) -> None:
        try:
            from ai_edge_litert.interpreter import Interpreter
        except ImportError:
            raise missing() from None
        self.version = f"ai_edge_litert {version('ai-edge-litert')}, one thread"
        self._path = path
        try:
            model: dict[str, Any] = {"model_path": str(path)}
            if is_exact:
                model = {"model_content": with_float_products(path.read_bytes())}
            self._run = Interpreter(**model, num_threads=1).get_signature_runner(SIGNATURE)
        except (ValueError, RuntimeError) as error:
            raise self._refused(error) from None

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Returns the outputs by name."""
        try:
            return dict(self._run(**{k: np.ascontiguousarray(a) for k, a in inputs.items()}))
        except (ValueError, RuntimeError) as error:
            raise self._refused(error) from None

    def _refused(self, error: Exception) -> FormatError:
        reason = " ".join(str(error).split())
        return FormatError(f"{self._path}: LiteRT cannot run it ({reason:.200})")


# the LSTM -----------------------------------------------------------------------------------------


def write_lstm(
    ops: LiteRTOperations,
    x: Tensor,
    h: Tensor,
    c: Tensor,
    lengths: Tensor | None = None,
    *,
    directions: Any,
    options: CellOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Writes `GraphBuilder.lstm`; returns its three results.

    All tensors keep three axes, `(1, B, …)` of one step: what is read of `h` needs no reshape.
    """
    T = x.shape[0]
    assert isinstance(T, int), "LiteRT has no loops here: T is known"
    masks = None
    if lengths is not None:  # for each step which sequences it is within, `(1, B, 1)`
        by_row = ops.reshape(lengths, (1, lengths.shape[0], 1))
        numbers = [ops.constant(np.int32(t)) for t in range(T)]
        masks = [ops.op("LESS", [t, by_row], by_row.shape, "bool") for t in numbers]
    outputs, hs, cs = [], [], []
    for d, direction in enumerate(directions):
        cell = _Cell(ops, direction, options)
        state = ops.slice(h, 0, d, d + 1), ops.slice(c, 0, d, d + 1)
        y, h_d, c_d = cell.run(x, state, masks, is_backward=d == 1)
        outputs.append(y)
        hs.append(h_d)
        cs.append(c_d)
    return ops.concat(outputs, 2), ops.concat(hs, 0), ops.concat(cs, 0)


class _Cell:
    """The cell of one direction of a layer."""

    def __init__(
        self,
        ops: LiteRTOperations,
        direction: tuple[str, str, tuple[str, ...]],
        options: CellOptions,
    ) -> None:
        self._ops, self._options = ops, options
        self._w_ih, self._w_hh, biases = direction
        self._norm = {
            name: ops.floats(self._w_ih.replace("weight_ih", name)) for name in options.parameters
        }
        total = sum((np.asarray(ops.weights[b], np.float32) for b in biases), np.float32(0))
        self._bias = ops.constant(np.asarray(total), f"{self._w_ih}.bias") if biases else None

    def run(
        self, x: Tensor, state: tuple[Tensor, Tensor], masks: list[Tensor] | None, is_backward: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the outputs `(T, B, H)` and the last state, `(1, B, H)` twice."""
        ops, T = self._ops, x.shape[0]
        assert isinstance(T, int)
        products = self._input_products(x)
        h, c = state
        outputs = []
        for t in reversed(range(T)) if is_backward else range(T):
            y, new_c = self._step(ops.slice(products, 0, t, t + 1), h, c)
            if masks is None:
                h, c = y, new_c
            else:
                h, c = ops.where(masks[t], y, h), ops.where(masks[t], new_c, c)
                y = ops.where(masks[t], y, 0.0)
            outputs.append(y)
        return ops.concat(outputs[::-1] if is_backward else outputs, 0), h, c

    def _input_products(self, x: Tensor) -> Tensor:
        """Returns what the input adds to the gates, bias included, of all steps at once."""
        if not self._norm:
            return self._ops.linear(x, self._w_ih, self._bias)
        products = self._normalised(self._ops.linear(x, self._w_ih, None), "gamma_ih")
        return products if self._bias is None else self._ops.binary("ADD", products, self._bias)

    def _step(self, products: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        ops, options = self._ops, self._options
        recurrent = ops.linear(h, self._w_hh, None)
        if self._norm:
            recurrent = self._normalised(recurrent, "gamma_hh")
        i, f, g, o = ops.split(ops.binary("ADD", products, recurrent), 2, 4)
        i, f, o = (self._activation(options.recurrent_activation, gate) for gate in (i, f, o))
        added = ops.binary("MUL", i, self._activation(options.activation, g))
        new_c = ops.binary("ADD", ops.binary("MUL", f, c), added)
        shown = new_c
        if self._norm:
            shown = ops.binary("ADD", self._normalised(new_c, "gamma_c"), self._norm["beta_c"])
        new_h = ops.binary("MUL", o, self._activation(options.activation, shown))
        keep_h, keep_c = options.zoneout
        return self._zoned_out(keep_h, h, new_h), self._zoned_out(keep_c, c, new_c)

    def _normalised(self, x: Tensor, gamma: str) -> Tensor:
        return self._ops.binary("MUL", self._ops.normalised(x, CELL_EPSILON), self._norm[gamma])

    def _zoned_out(self, keep: float, old: Tensor, new: Tensor) -> Tensor:
        ops = self._ops
        if keep == 0:
            return new
        return ops.binary("ADD", ops.binary("MUL", old, keep), ops.binary("MUL", new, 1 - keep))

    def _activation(self, name: str, x: Tensor) -> Tensor:
        ops = self._ops
        if name == "hard_sigmoid":
            line = ops.binary("ADD", ops.binary("MUL", x, 1 / 6), 0.5)
            return ops.binary("MINIMUM", ops.binary("MAXIMUM", line, 0.0), 1.0)
        if name == "softsign":
            return ops.binary("DIV", x, ops.binary("ADD", ops.unary("ABS", x), 1.0))
        kinds = {"sigmoid": "LOGISTIC", "tanh": "TANH", "relu": "RELU"}
        return ops.unary(kinds[name], x) if name in kinds else x


# files of ours ----------------------------------------------------------------------------------


def with_float_products(data: bytes) -> bytes:
    """Returns a file that multiplies in float32 what this one multiplies in int8.

    Weights and scales are the same, and nothing else is rounded. The file is ours and trusted.
    """
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromPackedBuf(data)
    graph, code = model.subgraphs[0], schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.DEQUANTIZE
    code.version = 5
    model.operatorCodes.append(code)
    operators, floats = [], dict[int, int]()
    for operator in graph.operators:
        kind = model.operatorCodes[operator.opcodeIndex].builtinCode
        place = operator.inputs[1] if kind == schema.BuiltinOperator.FULLY_CONNECTED else None
        if place is not None and graph.tensors[place].type == schema.TensorType.INT8:
            if place not in floats:
                floats[place] = len(graph.tensors)
                shape = graph.tensors[place].shape
                graph.tensors.append(schema.TensorT(shape=shape, name="floats", hasRank=True))
                dequantize = schema.OperatorT(opcodeIndex=len(model.operatorCodes) - 1)
                dequantize.inputs, dequantize.outputs = [place], [floats[place]]
                operators.append(dequantize)
            operator.inputs = [operator.inputs[0], floats[place], *operator.inputs[2:]]
        operators.append(operator)
    graph.operators = operators
    return packed(model, len(data))
