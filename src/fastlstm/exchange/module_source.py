"""A torch module to export: its `forward` runs on traced values, which record its graph."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fastlstm.errors import ConfigError
from fastlstm.exchange.graph import Graph, Size, Value
from fastlstm.exchange.source import SHAPES, Arrays, ExportSource, rounded_network
from fastlstm.exchange.trace import Traced, Tracer


class ModuleSource(ExportSource):
    """A module with an example of its arguments, as `module_graph` takes them."""

    kind = "module"

    def __init__(self, module: nn.Module, example: Any, weight_format: str) -> None:
        super().__init__(weight_format)
        self._given = copy.deepcopy(module).cpu().float().eval(), example
        self._module, self._weights = rounded_network(self._given[0], weight_format)
        self._arguments = _arguments_of(self._module, example)

    @cached_property
    def _graph(self) -> Graph:
        return module_graph(self._module, self._given[1], self._weights, self.length)

    def graph(self) -> Graph:
        return self._graph

    def in_fp32(self) -> ModuleSource:
        return ModuleSource(*self._given, "fp32")

    def cases(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Yields random inputs; integers that no embedding reads are drawn from the example."""
        flat = _flat(self._arguments.values())
        for steps, B in SHAPES:
            rng, T, sizes = np.random.default_rng(steps), self.length or steps, {"T": steps, "B": B}
            inputs: dict[str, NDArray[Any]] = {}
            for value, example in zip(self._graph.inputs, flat, strict=True):
                shape = [sizes[n] if isinstance(n, str) else n for n in value.shape]
                if value.name == "lengths":
                    inputs[value.name] = rng.integers(0, T + 1, shape, dtype=np.int32)
                elif value.dtype == "int32":
                    known = self._tokens(value, example)
                    inputs[value.name] = rng.choice(known, shape).astype(np.int32)
                else:
                    inputs[value.name] = rng.normal(size=shape).astype(np.float32)
            yield inputs

    def _tokens(self, value: Value, example: Tensor) -> NDArray[Any]:
        """Returns integers for an input: rows of its embeddings, else the example's integers."""
        tables = [
            self._graph.weights[node.attributes["table"]].shape[0]
            for node in self._graph.nodes
            if node.kind == "gather" and node.inputs[0].name == value.name
        ]
        return np.arange(min(tables)) if tables else example.cpu().numpy().ravel()

    @torch.no_grad()
    def run(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        tensors = (
            torch.from_numpy(a).long() if a.dtype == np.int32 else torch.from_numpy(a)
            for a in (inputs[value.name] for value in self._graph.inputs)
        )  # fmt: skip
        given = {
            name: tuple(next(tensors) for _ in value)
            if isinstance(value, tuple)
            else next(tensors)
            if isinstance(value, Tensor)
            else value
            for name, value in self._arguments.items()
        }
        result = self._module(**given)
        results = _flat(result.values() if isinstance(result, dict) else [result])
        names = [value.name for value in self._graph.outputs]
        return {name: value.numpy() for name, value in zip(names, results, strict=True)}


def _flat(values: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, tuple | list):
            tensors += _flat(value)
    return tensors


def module_graph(
    module: nn.Module,
    example: Any,
    weights: Mapping[str, Any] | None = None,
    length: int | None = None,
) -> Graph:
    """Returns the graph of a module in evaluation.

    Inputs have the names of `module.forward`'s arguments; the inputs of an LSTM are `x`, `h0` and
    `c0`; the parts of a tuple are numbered. The axes T and B have any length. The output is named
    `output`. The outputs of an LSTM are `output`, `h_n` and `c_n`; the parts of a tuple are
    `output_0` and so on; a dict keeps its keys.

    Args:
        module: made of layers and functions that `trace` knows.
        example: the argument of a call, a tuple of arguments, or a dict of them by name; types,
            numbers of axes and fixed lengths count.
        weights: arrays in place of the module's parameters, by name.
        length: T; default: any number.

    Raises:
        ConfigError: an example that does not fit, or a call that a graph cannot hold.
    """
    arguments = _arguments_of(module, example)
    named = dict(module.named_parameters(remove_duplicate=False))
    own = {n: p.detach().float().cpu().numpy() for n, p in named.items() if p.is_floating_point()}
    given, states = own | dict(weights or {}), frozenset[str]()
    while True:
        g = Tracer(type(module).__name__, module, given)
        try:
            _record(g, module, arguments, states, length or "T")
        except ConfigError:
            if g.states <= states:
                raise
        if g.states <= states:
            return g.finished()
        states |= g.states  # in the next round their second axis is the batch


def _record(
    g: Tracer, module: nn.Module, arguments: Mapping[str, Any], states: frozenset[str], T: Size
) -> None:
    """Runs a module on traced values; `states` names the inputs that are an LSTM's state."""
    inside = list[nn.Module]()
    enter = register_module_forward_pre_hook(lambda m, args: inside.append(m))
    leave = register_module_forward_hook(lambda m, args, output: inside.remove(m))
    try:
        with g.recording():
            _add_outputs(g, module(**_inputs(g, module, arguments, states, T)))
    except Exception as error:  # of any kind: traced values are no tensors
        names = {id(m): n for n, m in module.named_modules()}
        place = next((m for m in inside[::-1] if names.get(id(m))), None)
        where = "" if place is None else f"'{names[id(place)]}' ({type(place).__name__}): "
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{type(module).__name__} cannot be exported: {where}{reason}. Modules of LSTM, Linear,"
            " Embedding, LayerNorm, Dropout and activations can be"
        ) from error
    finally:
        enter.remove()
        leave.remove()


def _arguments_of(module: nn.Module, example: Any) -> dict[str, Any]:
    """Returns the example's arguments by name without None; lengths as a tensor."""
    args = example if isinstance(example, tuple) else (example,)
    args, kwargs = ((), example) if isinstance(example, dict) else (args, {})
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"the example does not fit {type(module).__name__}.forward: {error}"
        ) from None
    arguments = {name: value for name, value in bound.arguments.items() if value is not None}
    if isinstance(arguments.get("lengths"), list | tuple):
        arguments["lengths"] = torch.tensor(arguments["lengths"])
    return arguments


def _inputs(
    g: Tracer, module: nn.Module, arguments: Mapping[str, Any], states: frozenset[str], T: Size
) -> dict[str, Any]:
    """Returns the arguments with an input of the graph in place of every tensor."""
    modules = list(module.modules())
    is_time_major = any(getattr(m, "is_time_major", False) for m in modules)  # an imported model
    is_batch_first = any(m.batch_first for m in modules if isinstance(m, nn.LSTM))
    steps = ("B", T) if is_batch_first and not is_time_major else (T, "B")

    def added(name: str, example: Tensor) -> Traced:
        is_number, sizes = example.is_floating_point(), list[Size](example.shape)
        if name in states and len(sizes) == 3:
            sizes[1] = "B"
        elif len(sizes) == (3 if is_number else 2):
            sizes[:2] = steps
        elif sizes:
            sizes[0] = "B"
        return Traced(g.input(name, sizes, "float32" if is_number else "int32"))

    is_lstm, given = isinstance(module, nn.LSTM), dict[str, Any]()
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            given[name] = added("x" if is_lstm and name == "input" else name, value)
        elif isinstance(value, tuple):
            names = ("h0", "c0") if is_lstm else [f"{name}_{k}" for k in range(len(value))]
            given[name] = tuple(added(*pair) for pair in zip(names, value, strict=True))
        else:
            given[name] = value
    return given


def _add_outputs(g: Tracer, result: Any) -> None:
    if isinstance(result, tuple | list):
        is_state = len(result) == 2 and isinstance(result[1], tuple) and len(result[1]) == 2
        if is_state:
            result = {"output": result[0], "h_n": result[1][0], "c_n": result[1][1]}
        else:
            result = {f"output_{k}": value for k, value in enumerate(result)}
    for name, value in (result if isinstance(result, dict) else {"output": result}).items():
        if not isinstance(value, Traced):
            raise ConfigError(f"its result '{name}' does not depend on an input")
        g.output(name, value.value)
