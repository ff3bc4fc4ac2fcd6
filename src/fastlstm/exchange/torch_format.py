"""torch.export files (.pt2): a `Graph` as a module of plain torch operations, run by torch."""

from __future__ import annotations

import inspect
import io
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export.dynamic_shapes import Dim

from fastlstm.errors import ConfigError, FormatError
from fastlstm.ops.cell_options import TORCHS_CELL, CellOptions
from fastlstm.runs.weight_formats import as_floats

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from fastlstm.exchange.graph import Graph, Node

_DTYPES = {"float32": torch.float32, "int32": torch.int32, "bool": torch.bool}
_EXAMPLE_SIZES = {"T": 5, "B": 3}
"""Any but 0 and 1, which torch would take as fixed."""
_OPERATORS: dict[str, Callable[..., Tensor]] = {
    **{"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div},
    **{"maximum": torch.maximum, "minimum": torch.minimum, "equal": torch.eq, "less": torch.lt},
    **{"relu": torch.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "exp": torch.exp},
    **{"log": torch.log, "sqrt": torch.sqrt, "softplus": F.softplus, "is_nan": torch.isnan},
    **{"not": torch.logical_not, "identity": torch.clone, "where": torch.where},
}


def write_torch(graph: Graph) -> bytes:
    """Returns the graph as a .pt2 file, which `torch.export.load` reads.

    Raises:
        ConfigError: a cell that torch's LSTM does not have.
    """
    module = _GraphModule(graph).eval()
    example, dynamic = {}, {}
    for value in graph.inputs:
        sizes = [_EXAMPLE_SIZES.get(size, size) for size in value.shape]  # type: ignore[arg-type]
        example[value.name] = torch.zeros(sizes, dtype=_DTYPES[value.dtype])
        named = [axis for axis, size in enumerate(value.shape) if isinstance(size, str)]
        dynamic[value.name] = dict.fromkeys(named, Dim.DYNAMIC)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its internals
        from torch.export._patches import register_lstm_while_loop_decomposition as _symbolic_time
        with _symbolic_time():
            program = torch.export.export(
                module, (), kwargs=example, dynamic_shapes=dynamic, strict=False
            )
        torch.export.save(program, buffer, extra_files=dict(graph.metadata))
    return buffer.getvalue()


class _GraphModule(nn.Module):
    """Computes a graph with torch's operations; inputs and outputs have the graph's names."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph
        self._names: dict[str, str] = {}
        for number, (name, array) in enumerate(as_floats_but_integers(graph.weights).items()):
            self._names[name] = f"weight_{number}"
            self.register_buffer(f"weight_{number}", torch.from_numpy(array.copy()))
        # torch.export names the inputs by the signature.
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = [inspect.Parameter(value.name, kind) for value in graph.inputs]
        self.forward = partial(self._run)
        self.forward.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]

    def _run(self, *inputs: Tensor, **named: Tensor) -> dict[str, Tensor]:
        values = dict(zip((value.name for value in self._graph.inputs), inputs, strict=False))
        values |= named
        for node in self._graph.nodes:
            found = [values[value.name] for value in node.inputs]
            results = self._computed(node, found)
            for value, result in zip(node.outputs, results, strict=True):
                values[value.name] = result
        return {value.name: values[value.name] for value in self._graph.outputs}

    def _weight(self, name: str) -> Tensor:
        weight: Tensor = getattr(self, self._names[name])
        return weight

    def _computed(self, node: Node, found: list[Tensor]) -> tuple[Tensor, ...]:
        if node.kind == "lstm":
            return self._lstm(node, *found)
        if node.kind in _OPERATORS:
            return (_OPERATORS[node.kind](*found),)
        return (self._one(node, found),)

    def _one(self, node: Node, found: list[Tensor]) -> Tensor:
        kind, attributes, shape = node.kind, node.attributes, node.outputs[0].shape
        if kind == "weight":
            return self._weight(attributes["weight"]).clone()
        x = found[0]
        if kind == "gather":
            return F.embedding(x, self._weight(attributes["table"]))
        if kind == "linear":
            bias = attributes["bias"]
            own = None if bias is None else self._weight(bias)
            return F.linear(x, self._weight(attributes["weight"]), own)
        if kind == "layer_norm":
            weight, bias = self._weight(attributes["weight"]), self._weight(attributes["bias"])
            return F.layer_norm(x, weight.shape, weight, bias, attributes["eps"])
        if kind == "cast":
            return x.to(_DTYPES[attributes["to"]])
        if kind == "concat":
            return torch.cat(found, attributes["axis"])
        if kind == "slice":
            return x.narrow(
                attributes["axis"], attributes["start"], attributes["stop"] - attributes["start"]
            )
        if kind == "reshape":
            return x.reshape([-1 if isinstance(size, str) else size for size in shape])
        if kind == "transpose":
            return x.permute(attributes["axes"])
        if kind == "sort":
            return x.sort(-1).values
        axis = attributes["axis"]
        reduced: Tensor = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}[kind](
            x, dim=axis, keepdim=True
        )
        return reduced

    def _lstm(self, node: Node, x: Tensor, h: Tensor, c: Tensor, *lengths: Tensor) -> Any:
        options: CellOptions = node.attributes["options"]
        if (own := CellOptions.of(options)) != TORCHS_CELL and str(own):
            raise ConfigError(f"torch's LSTM has no {own}; export to another target")
        if lengths:
            raise ConfigError("torch.export holds no lengths of sequences; export to ONNX")
        directions = node.attributes["directions"]
        parts = [self._weight(n) for w, u, biases in directions for n in (w, u, *biases)]
        return torch.lstm(x, (h, c), parts, True, 1, 0.0, False, len(directions) == 2, False)


def as_floats_but_integers(weights: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Returns weights in float32, int32 constants as they are."""
    whole = {
        name: w for name, w in weights.items() if getattr(w, "dtype", None) == np.dtype(np.int32)
    }
    return {**as_floats({n: w for n, w in weights.items() if n not in whole}), **whole}


class TorchRunner:
    """A .pt2 file in torch, without fastlstm's kernels.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.version = f"torch {torch.__version__}"
        try:
            self._module = torch.export.load(path).module()
        except Exception as error:
            raise FormatError(f"{path} is no torch.export file: {error}") from None

    @torch.no_grad()
    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Returns the outputs by name."""
        outputs = self._module(**{name: torch.from_numpy(a) for name, a in inputs.items()})
        return {name: value.numpy() for name, value in outputs.items()}
