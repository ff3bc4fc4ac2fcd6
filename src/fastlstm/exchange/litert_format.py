"""LiteRT files (.tflite): written from a `Graph` with built-in operations alone, and run."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from fastlstm.errors import ConfigError, FormatError, Setting
from fastlstm.exchange.graph import interpret
from fastlstm.exchange.litert_file import SIGNATURE, LiteRTFile, Tensor, missing
from fastlstm.exchange.litert_lstm import write_lstm
from fastlstm.exchange.litert_operations import LiteRTOperations
from fastlstm.exchange.litert_stored import with_float_products

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from fastlstm.exchange.graph import Graph, Node
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
    inputs and outputs. `litert_stored.read_metadata` returns the graph's metadata.

    Raises:
        ConfigError: an axis of time with a name, or too many bytes for the format.
        MissingExtraError: ai-edge-litert is not installed.
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
                    " number; give a sequence model's ", Setting("length"), ", or export to onnx",
                )  # fmt: skip
        inputs = {v.name: self._file.tensor(v.name, v.dtype, v.shape) for v in graph.inputs}
        outputs = interpret(graph, inputs, self._written)
        for name, text in graph.metadata.items():
            self._file.add_metadata(name, text)
        return self._file.to_bytes(inputs, outputs)

    def _written(self, node: Node, *inputs: Tensor) -> Any:
        out = node.outputs[0]
        if node.kind in _OPERATORS:
            return self._ops.op(_OPERATORS[node.kind], inputs, out.shape, out.dtype)
        if node.kind in ("sum", "mean", "max"):
            return self._ops.reduce(node.kind, inputs[0], node.attributes["axis"])
        write = getattr(self, f"_{node.kind}", None)
        if write is None:
            raise ConfigError(f"LiteRT files have no operation '{node.kind}' here; export to ONNX")
        return write(node, *inputs, **node.attributes)

    def _identity(self, node: Node, x: Tensor) -> Tensor:
        return self._ops.reshape(x, x.shape, node.outputs[0].name)

    def _weight(self, node: Node, weight: str) -> Tensor:
        return self._ops.floats(weight)

    def _gather(self, node: Node, indices: Tensor, table: str) -> Tensor:
        return self._ops.gather(table, indices)

    def _linear(self, node: Node, x: Tensor, weight: str, bias: str | None) -> Tensor:
        return self._ops.linear(x, weight, None if bias is None else self._ops.floats(bias))

    def _lstm(
        self, node: Node, *inputs: Tensor, directions: Any, options: CellOptions, hidden_size: int
    ) -> tuple[Tensor, ...]:
        return write_lstm(self._ops, *inputs, directions=directions, options=options)

    def _layer_norm(self, node: Node, x: Tensor, weight: str, bias: str, eps: float) -> Tensor:
        ops = self._ops
        scaled = ops.binary("MUL", ops.normalised(x, eps), ops.floats(weight))
        return ops.binary("ADD", scaled, ops.floats(bias))

    def _softplus(self, node: Node, x: Tensor) -> Tensor:
        """max(x, 0) + log(1 + exp(-|x|)): nothing in it overflows."""
        ops = self._ops
        powers = ops.unary("EXP", ops.unary("NEG", ops.unary("ABS", x)))
        rest = ops.unary("LOG", ops.binary("ADD", powers, 1.0))
        return ops.binary("ADD", ops.unary("RELU", x), rest)

    def _is_nan(self, node: Node, x: Tensor) -> Tensor:
        return self._ops.op("NOT_EQUAL", [x, x], x.shape, "bool")

    def _cast(self, node: Node, x: Tensor, to: str) -> Tensor:
        return self._ops.cast(x, to)

    def _concat(self, node: Node, *tensors: Tensor, axis: int) -> Tensor:
        return self._ops.concat(tensors, axis)

    def _slice(self, node: Node, x: Tensor, axis: int, start: int, stop: int) -> Tensor:
        return self._ops.slice(x, axis, start, stop)

    def _reshape(self, node: Node, x: Tensor) -> Tensor:
        return self._ops.reshape(x, node.outputs[0].shape)

    def _transpose(self, node: Node, x: Tensor, axes: Sequence[int]) -> Tensor:
        return self._ops.transpose(x, axes)

    def _sort(self, node: Node, x: Tensor) -> Tensor:
        return self._ops.sort(x)


class LitertRunner:
    """A .tflite file in LiteRT's interpreter, on one thread.

    Args:
        path: of the file.
        is_exact: multiply int8 weights in float32 (`litert_stored.with_float_products`): a wrong
            weight shows that the rounding of LiteRT's own products would hide.

    Raises:
        FormatError: the interpreter does not accept it.
        MissingExtraError: ai-edge-litert is not installed.
    """

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
        """Returns the outputs by name.

        Raises:
            FormatError: the interpreter cannot run the file on these inputs.
        """
        try:
            return dict(self._run(**{k: np.ascontiguousarray(a) for k, a in inputs.items()}))
        except (ValueError, RuntimeError) as error:
            raise self._refused(error) from None

    def _refused(self, error: Exception) -> FormatError:
        reason = " ".join(str(error).split())
        return FormatError(f"{self._path}: LiteRT cannot run it ({reason:.200})")
