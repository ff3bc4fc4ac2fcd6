"""torch.export files (.pt2): writes a `Graph` as plain torch operations, runs files in torch."""

from __future__ import annotations

import inspect
import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.export.dynamic_shapes import Dim

from fastlstm.errors import ConfigError, FormatError
from fastlstm.exchange.graph import Graph, Node, interpret, reshaped
from fastlstm.ops.cell_options import CellOptions
from fastlstm.system.tensors import encode_tensors

_EXAMPLE_SIZES = {"T": 5, "B": 3}
"""Not 0 or 1, which torch takes for fixed sizes."""
_SATURATED = 1e6
"""Makes a gate exactly 1 for any input; the negative value makes a gate exactly 0."""
_OPERATORS: dict[str, Callable[..., Any]] = {
    **{"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div},
    **{"maximum": torch.maximum, "minimum": torch.minimum, "equal": torch.eq, "less": torch.lt},
    **{"relu": torch.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "exp": torch.exp},
    **{"log": torch.log, "sqrt": torch.sqrt, "softplus": F.softplus, "is_nan": torch.isnan},
    **{"not": torch.logical_not, "identity": torch.clone, "where": torch.where},
    "cast": lambda x, to: x.to(getattr(torch, to)),
    "concat": lambda *values, axis: torch.cat(values, axis),
    "slice": lambda x, axis, start, stop: x.narrow(axis, start, stop - start),
    "last": lambda x, axis: x.narrow(axis, -1, 1),
    "transpose": lambda x, axes: x.permute(axes),
    "sort": lambda x: x.sort(-1).values,
    "sum": lambda x, axis: x.sum(axis, keepdim=True),
    "mean": lambda x, axis: x.mean(axis, keepdim=True),
    "max": lambda x, axis: x.amax(axis, keepdim=True),
}


def write_torch(graph: Graph) -> bytes:
    """Returns the graph as a .pt2 file, which `torch.export.load` reads."""
    module = _GraphModule(graph).eval()
    example, dynamic = {}, {}
    for value in graph.inputs:
        sizes = [_EXAMPLE_SIZES.get(size, size) for size in value.shape]  # type: ignore[arg-type]
        example[value.name] = torch.zeros(sizes, dtype=getattr(torch, value.dtype))
        named = [axis for axis, size in enumerate(value.shape) if isinstance(size, str)]
        dynamic[value.name] = dict.fromkeys(named, Dim.DYNAMIC)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its internals
        with _any_number_of_steps():
            program = torch.export.export(
                module, (), kwargs=example, dynamic_shapes=dynamic, strict=False
            )
        torch.export.save(program, buffer, extra_files=dict(graph.metadata))
    return buffer.getvalue()


def state_dict_file(graph: Graph) -> bytes:
    """Returns the weights of a text model as safetensors, with the names of `torch.nn.LSTM`."""
    tensors = {
        re.sub(r"^layers\.(\d+)\.(\w+)_l0$", r"lstm.\2_l\1", name): torch.from_numpy(array)
        for name, array in graph.float_arrays().items()
        if not name.startswith("constant_")
    }
    return encode_tensors(tensors)


@contextmanager
def _any_number_of_steps() -> Iterator[None]:
    """In this context torch.export leaves the length of an LSTM's input open."""
    try:
        from torch.export._patches import register_lstm_while_loop_decomposition
    except ImportError:
        raise ConfigError(
            f"torch {torch.__version__} exports an LSTM of one fixed length only; install a newer"
            " version"
        ) from None
    # torch's context changes the kernel, but not the operator's cache of it: an export before this
    # one would fix the length here, and this one would change later exports.
    cache = getattr(torch.ops.aten.lstm.input, "_dispatch_cache", {})
    cache.clear()
    try:
        with register_lstm_while_loop_decomposition():
            yield
    finally:
        cache.clear()


class _GraphModule(nn.Module):
    """Computes a graph with torch's operations, with the graph's input and output names."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph
        for name, array in graph.float_arrays().items():
            self.register_buffer(name.replace(".", "_"), torch.from_numpy(array.copy()))
        # torch.export names the inputs by the signature.
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = [inspect.Parameter(value.name, kind) for value in graph.inputs]
        self.forward = partial(self._run)
        self.forward.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]

    def _run(self, *inputs: Tensor, **named: Tensor) -> dict[str, Tensor]:
        first = dict(zip((value.name for value in self._graph.inputs), inputs, strict=False))
        return interpret(self._graph, {**first, **named}, self._computed)

    def _computed(self, node: Node, *inputs: Tensor) -> Any:
        if node.kind in _OPERATORS:
            return _OPERATORS[node.kind](*inputs, **node.attributes)
        if node.kind == "reshape":
            return inputs[0].reshape(reshaped(node, inputs[0].shape))
        return getattr(self, f"_{node.kind}")(*inputs, **node.attributes)

    def _stored(self, name: str) -> Tensor:
        return self.get_buffer(name.replace(".", "_"))

    def _weight(self, weight: str) -> Tensor:
        return self._stored(weight).clone()

    def _gather(self, indices: Tensor, table: str) -> Tensor:
        return F.embedding(indices, self._stored(table))

    def _linear(self, x: Tensor, weight: str, bias: str | None) -> Tensor:
        return F.linear(x, self._stored(weight), None if bias is None else self._stored(bias))

    def _layer_norm(self, x: Tensor, weight: str, bias: str, eps: float) -> Tensor:
        scale = self._stored(weight)
        return F.layer_norm(x, scale.shape, scale, self._stored(bias), eps)

    def _lstm(
        self, x: Tensor, h: Tensor, c: Tensor, *lengths: Tensor, directions: Any,
        options: CellOptions, hidden_size: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        if words := options.active(False):
            raise ConfigError(f"torch's LSTM has no {words[0]}; export to another target")
        if lengths:
            return self._lstm_of_lengths(x, h, c, lengths[0].long(), directions)
        weights = [self._stored(n) for w, u, biases in directions for n in (w, u, *biases)]
        has_biases, two_ways = bool(directions[0][2]), len(directions) == 2
        results: tuple[Tensor, ...] = torch.lstm(
            x, (h, c), weights, has_biases, 1, 0.0, False, two_ways, False
        )
        return results

    def _lstm_of_lengths(
        self, x: Tensor, h: Tensor, c: Tensor, lengths: Tensor, directions: Any
    ) -> tuple[Tensor, ...]:
        """Runs one direction at a time; the backward one reads each sequence reversed.

        An extra input column is 1 in the padding: it opens the forget gate and closes the input
        gate, so that the cell stays unchanged.
        """
        steps = torch.arange(x.shape[0])[:, None]
        inside = (steps < lengths)[..., None]
        x = torch.cat([torch.where(inside, x, 0.0), (~inside).to(x.dtype)], -1)
        backward = torch.where(inside, (lengths - 1 - steps)[..., None], steps[..., None])
        last = (lengths - 1).clamp(min=0)[None, :, None].expand(1, -1, h.shape[2])
        forget = torch.tensor([-_SATURATED, _SATURATED, 0.0, 0.0]).repeat_interleave(h.shape[2])
        outputs, hs, cs = [], [], []
        for d, (w, u, biases) in enumerate(directions):
            weights = [torch.cat([self._stored(w), forget[:, None]], 1)]
            weights += [self._stored(name) for name in (u, *biases)]
            read = x.gather(0, backward.expand(-1, -1, x.shape[2])) if d else x
            state = h[d : d + 1], c[d : d + 1]
            y, _, c_n = torch.lstm(read, state, weights, bool(biases), 1, 0.0, False, False, False)
            hs.append(torch.where(lengths[None, :, None] > 0, y.gather(0, last), state[0]))
            cs.append(c_n)
            y = y.gather(0, backward.expand(-1, -1, y.shape[2])) if d else y
            outputs.append(torch.where(inside, y, 0.0))
        return torch.cat(outputs, -1), torch.cat(hs), torch.cat(cs)


class TorchRunner:
    """A .pt2 file in torch, without fastlstm's kernels."""

    def __init__(self, path: Path) -> None:
        self.version = f"torch {torch.__version__}, one thread"
        try:
            self._module = torch.export.load(path).module()
        except Exception as error:
            raise FormatError(f"{path} is no torch.export file: {error}") from None

    @torch.no_grad()
    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            outputs = self._module(**{name: torch.from_numpy(a) for name, a in inputs.items()})
        finally:
            torch.set_num_threads(threads)
        return {name: value.numpy() for name, value in outputs.items()}
