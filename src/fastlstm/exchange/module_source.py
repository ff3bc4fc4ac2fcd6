"""A torch module to export: its calls are recorded by torch.fx, without shapes or numbers.

Modules made of LSTM, Linear, Embedding, LayerNorm, Dropout and activations can be written, and what
is between them: parts of tensors, their axes, arithmetic.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from fastlstm.errors import ConfigError
from fastlstm.exchange.graph import DType, Graph, GraphBuilder, Size, Value
from fastlstm.exchange.module_calls import Unwritable, Zeros, call, call_layer
from fastlstm.exchange.source import Arrays, Source, rounded_network

SHAPES = ({"T": 1, "B": 1}, {"T": 7, "B": 3}, {"T": 100, "B": 64})


class ModuleSource(Source):
    """A module with an example of its arguments, as `module_graph` takes them."""

    kind = "module"

    def __init__(self, module: nn.Module, example: Any, weight_format: str) -> None:
        super().__init__(weight_format)
        self._given = copy.deepcopy(module).cpu().float().eval(), example
        self._module, self._weights = rounded_network(self._given[0], weight_format)
        self._graph = module_graph(self._module, example, self._weights)
        self._arguments = arguments_of(self._module, example)

    def graph(self) -> Graph:
        return self._graph

    def unrounded(self) -> ModuleSource | None:
        return ModuleSource(*self._given, "fp32") if self.weight_format != "fp32" else None

    def cases(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Yields random inputs; whole numbers that no embedding reads are those of the example."""
        flat = _flat(self._arguments.values())
        for sizes in SHAPES:
            rng = np.random.default_rng(sizes["T"])
            inputs: dict[str, NDArray[Any]] = {}
            for value, example in zip(self._graph.inputs, flat, strict=True):
                shape = [sizes[n] if isinstance(n, str) else n for n in value.shape]
                if value.name == "lengths":
                    inputs[value.name] = rng.integers(0, sizes["T"] + 1, shape, dtype=np.int32)
                elif value.dtype == "int32":
                    known = self._tokens(value, example)
                    inputs[value.name] = rng.choice(known, shape).astype(np.int32)
                else:
                    inputs[value.name] = rng.normal(size=shape).astype(np.float32)
            yield inputs

    def _tokens(self, value: Value, example: Tensor) -> NDArray[Any]:
        """Returns whole numbers that an input may hold: all that its embeddings have rows for."""
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
    module: nn.Module, example: Any, weights: Mapping[str, Any] | None = None
) -> Graph:
    """Describes a module as it computes in evaluation.

    Inputs have the names of the arguments of `module.forward`; the first argument of an LSTM is
    `x`, a pair that is the state of one is `h0` and `c0`. What an LSTM reads has axes of any
    length T and B. The output is `output`; a call of an LSTM has `output`, `h_n` and `c_n`, a
    tuple `output_0` and so on, a dict its keys.
    The example is the argument of a call, a tuple of arguments, or a dict of them by name; types,
    numbers of axes and fixed lengths count. `weights` stand in place of the module's own.
    """
    arguments = arguments_of(module, example)
    tensors = {n: v for n, v in arguments.items() if isinstance(v, Tensor | tuple)}
    before = set(vars(module))
    calls = _recorded(module, arguments, tensors)
    own = {n: t for n, t in _tensors(module).items() if t.is_floating_point()}
    given = {n: t.detach().float().cpu().numpy() for n, t in own.items()} | dict(weights or {})
    g = GraphBuilder(type(module).__name__, given)
    modules = dict(module.named_modules(remove_duplicate=False))
    values = _add_inputs(g, calls, modules, tensors)
    problems = []
    for node in calls.nodes:
        if node in values or any(parent not in values for parent in node.all_input_nodes):
            continue  # the latter depends on what cannot be written
        args, kwargs = (fx.node.map_arg(part, values.get) for part in (node.args, node.kwargs))
        try:
            if node.op == "output":
                _add_outputs(g, args[0])
            elif node.op == "get_attr":
                values[node] = _constant(g, module, str(node.target))
            elif node.op == "call_module":
                name = str(node.target)
                values[node] = call_layer(g, name, modules[name], args, kwargs)
            else:
                values[node] = call(g, node.target, args, kwargs)
        except Unwritable as problem:
            problems.append(f"{_place(node, modules)}: {problem}")
    for name in set(vars(module)) - before:  # constants, which torch.fx gives to the module
        delattr(module, name)
    if problems:
        raise ConfigError(
            f"{type(module).__name__} cannot be exported: {'; '.join(problems)}. Modules of LSTM,"
            " Linear, Embedding, LayerNorm, Dropout and activations can be"
        )
    return g.graph


def arguments_of(module: nn.Module, example: Any) -> dict[str, Any]:
    """Returns the arguments of the example by name, lengths as a tensor; without None."""
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


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.LSTM) or super().is_leaf_module(m, module_qualified_name)


def _recorded(
    module: nn.Module, arguments: Mapping[str, Any], tensors: Mapping[str, Any]
) -> fx.Graph:
    """Returns the calls, with a placeholder for each of the tensors."""
    tracer = _Tracer()
    if tracer.is_leaf_module(module, ""):
        graph = fx.Graph()
        nodes = {n: graph.placeholder(n) if n in tensors else v for n, v in arguments.items()}
        first, *others = nodes
        kwargs = {name: nodes[name] for name in others}
        graph.output(graph.call_module("", (nodes[first],), kwargs))
        return graph
    parameters = inspect.signature(module.forward).parameters
    fixed = {
        name: arguments.get(name, None if p.default is p.empty else p.default)
        for name, p in parameters.items()
        if name not in tensors
    }
    try:
        graph = tracer.trace(module, fixed or None)
    except Exception as error:  # whatever `forward` does with values that are no tensors
        raise ConfigError(
            f"the calls of {type(module).__name__}.forward cannot be recorded by torch.fx:"
            f" {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
        ) from error
    for node in reversed(list(graph.nodes)):  # what torch.fx adds for the arguments that are fixed
        is_check = "assert" in getattr(node.target, "__name__", "") and not node.users
        is_fixed = node.op == "placeholder" and node.target not in tensors
        is_comparison = getattr(node.target, "__name__", "") == "eq" and not node.users
        if is_check or is_comparison or (is_fixed and not node.users):
            graph.erase_node(node)
    return graph


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    named = dict(module.named_parameters(remove_duplicate=False))
    return {**named, **dict(module.named_buffers(remove_duplicate=False))}


def _constant(g: GraphBuilder, module: nn.Module, name: str) -> Value:
    if name in g.graph.weights:
        return g.weight(name)
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    if not isinstance(value, Tensor) or value.dtype == torch.bool:
        raise Unwritable("neither numbers nor a layer")
    return g.constant(value.detach().cpu().numpy())


def _add_outputs(g: GraphBuilder, result: Any) -> None:
    names: Mapping[str, Any]
    if isinstance(result, dict):
        names = result
    elif isinstance(result, tuple | list):
        is_state = len(result) == 2 and isinstance(result[1], tuple) and len(result[1]) == 2
        if is_state:
            names = {"output": result[0], "h_n": result[1][0], "c_n": result[1][1]}
        else:
            names = {f"output_{k}": value for k, value in enumerate(result)}
    else:
        names = {"output": result}
    for name, value in names.items():
        if isinstance(value, Zeros) or not isinstance(value, Value):
            raise Unwritable(f"'{name}' is no tensor that was computed")
    for name, value in names.items():
        g.output(name, value)


def _place(node: fx.Node, modules: Mapping[str, nn.Module]) -> str:
    if node.op == "call_module":
        name = str(node.target)
        kind = type(modules[name]).__name__
        return f"'{name}' ({kind})" if name else kind
    if node.op == "output":
        return "what forward returns"
    target = node.target
    return f"'{node.name}' ({target if isinstance(target, str) else target.__name__})"


def _add_inputs(
    g: GraphBuilder,
    calls: fx.Graph,
    modules: Mapping[str, nn.Module],
    example: Mapping[str, Any],
) -> dict[fx.Node, Any]:
    """Adds an input for every tensor among the arguments; returns them by placeholder."""
    lstms = [
        (node, modules[str(node.target)])
        for node in calls.nodes
        if node.op == "call_module" and isinstance(modules[str(node.target)], nn.LSTM)
    ]
    batch_first = any(lstm.batch_first for _, lstm in lstms)
    steps = ("B", "T") if batch_first else ("T", "B")
    states = {part for node, _ in lstms for part in _states(node)}
    is_bare = "" in {str(node.target) for node, _ in lstms}
    inputs: dict[fx.Node, Any] = {}
    for node in calls.nodes:
        if node.op != "placeholder":
            continue
        value, name = example[str(node.target)], str(node.target)
        if isinstance(value, Tensor):
            name = "x" if is_bare and name == "input" else name
            inputs[node] = _input(g, name, value, steps, node in states)
        else:
            is_state = node in states and len(value) == 2
            names = ("h0", "c0") if is_state else [f"{name}_{k}" for k in range(len(value))]
            inputs[node] = tuple(
                _input(g, n, v, steps, is_state) for n, v in zip(names, value, strict=True)
            )
    return inputs


def _states(node: fx.Node) -> list[Any]:
    """Returns the recorded values that are the state of an LSTM's call, or parts of it."""
    hx = node.args[1] if len(node.args) > 1 else node.kwargs.get("hx")
    return list(hx) if isinstance(hx, tuple | list) else [hx]


def _input(
    g: GraphBuilder, name: str, example: Tensor, steps: tuple[str, str], is_state: bool
) -> Value:
    is_number = example.is_floating_point()
    dtype: DType = "float32" if is_number else "int32"
    sizes: list[Size] = list(example.shape)
    if is_state and len(sizes) == 3:
        sizes[1] = "B"
    elif len(sizes) == (3 if is_number else 2):
        sizes[:2] = steps
    elif sizes:
        sizes[0] = "B"
    return g.input(name, sizes, dtype)
