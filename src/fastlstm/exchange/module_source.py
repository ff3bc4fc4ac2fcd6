"""A torch module to export: its calls are recorded by torch.fx, without shapes or numbers.

Modules made of LSTM, Linear, Embedding, LayerNorm, Dropout and activations can be written, and what
is between them: parts of tensors, their axes, arithmetic. Functions for calls take the arguments of
torch's of the same name, values of the graph for tensors.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from fastlstm.errors import ConfigError
from fastlstm.exchange.graph import (
    DType,
    Graph,
    GraphBuilder,
    LSTMStack,
    Size,
    Value,
    lstm_layers,
)
from fastlstm.exchange.source import Arrays, ExportSource, rounded_network
from fastlstm.nn.dropout import WeightDrop
from fastlstm.nn.lstm import LSTM
from fastlstm.ops.cell_options import TORCHS_CELL

SHAPES = ({"T": 1, "B": 1}, {"T": 7, "B": 3}, {"T": 100, "B": 64})


class ModuleSource(ExportSource):
    """A module with an example of its arguments, as `module_graph` takes them."""

    kind = "module"

    def __init__(self, module: nn.Module, example: Any, weight_format: str) -> None:
        super().__init__(weight_format)
        self._given = copy.deepcopy(module).cpu().float().eval(), example
        self._module, self._weights = rounded_network(self._given[0], weight_format)
        self._graph = module_graph(self._module, example, self._weights)
        self._arguments = _arguments_of(self._module, example)

    def graph(self) -> Graph:
        return self._graph

    def unrounded(self) -> ModuleSource | None:
        return ModuleSource(*self._given, "fp32") if self.weight_format != "fp32" else None

    def cases(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Yields random inputs; whole numbers that no embedding reads stay as in the example."""
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
    arguments = _arguments_of(module, example)
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
                values[node] = _call_layer(g, name, modules[name], args, kwargs)
            else:
                values[node] = _call(g, node.target, args, kwargs)
        except _Unwritable as problem:
            problems.append(f"{_place(node, modules)}: {problem}")
    for name in set(vars(module)) - before:  # constants, which torch.fx gives to the module
        delattr(module, name)
    if problems:
        raise ConfigError(
            f"{type(module).__name__} cannot be exported: {'; '.join(problems)}. Modules of LSTM,"
            " Linear, Embedding, LayerNorm, Dropout and activations can be"
        )
    return g.graph


def _arguments_of(module: nn.Module, example: Any) -> dict[str, Any]:
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
        raise _Unwritable("neither numbers nor a layer")
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
        if isinstance(value, _ZeroInputs) or not isinstance(value, Value):
            raise _Unwritable(f"'{name}' is no tensor that was computed")
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


# calls ------------------------------------------------------------------------------------------


class _Unwritable(Exception):
    """Something that a graph cannot hold; the text says what."""


class _ZeroInputs(NamedTuple):
    """A tensor of zeros, which states of an LSTM may begin with."""

    shape: tuple[Size, ...]


def _call(g: GraphBuilder, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what a function of torch, or a method by its name, gives."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    is_known = isinstance(target, str) or any(
        getattr(place, name, None) is target for place in (operator, torch, F)
    )
    function = _CALLS.get(_SYNONYMS.get(name, name)) if is_known else None
    if function is None and target is not getattr:
        raise _Unwritable("no operation for it")
    if any(isinstance(value, _ZeroInputs) for value in (*args, *kwargs.values())):
        if name in ("to", "contiguous", "detach", "clone", "float"):
            return args[0]
        raise _Unwritable("zeros can only be the state of an LSTM")
    if function is None:
        x, attribute = args
        if isinstance(x, Value) and attribute in ("shape", "device", "dtype"):
            return x.shape if attribute == "shape" else None
        raise _Unwritable(f"no attribute {attribute}")
    if name == "getitem" and not isinstance(args[0], Value):  # of a pair, or of a shape
        return args[0][args[1]]
    try:
        return function(g, *args, **kwargs)
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise _Unwritable(f"not with these arguments ({error})") from error


def _binary(kind: str) -> Callable[..., Value]:
    def apply(g: GraphBuilder, a: Any, b: Any) -> Value:
        values = [v for v in (a, b) if isinstance(v, Value)]
        if not values or any(isinstance(v, str) for v in (a, b)):
            raise _Unwritable("arithmetic on lengths")
        if {v.dtype for v in values} != {"float32"}:
            a, b = (g.cast(v, "float32") if isinstance(v, Value) else v for v in (a, b))
        left = a if isinstance(a, Value) else g.constant(torch.tensor(float(a)).numpy())
        return g.binary(kind, left, b if isinstance(b, Value) else float(b))

    return apply


def _unary(kind: str) -> Callable[..., Value]:
    return lambda g, x, inplace=False: g.unary(kind, x)


def _to(g: GraphBuilder, x: Value, *args: Any, **kwargs: Any) -> Value:
    dtype = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.dtype)), None)
    if dtype is None:
        return x
    if dtype == torch.bool:
        raise _Unwritable("no operation for it")
    return g.cast(x, "float32" if dtype.is_floating_point else "int32")


def _reduced(kind: Any) -> Callable[..., Value]:
    def apply(g: GraphBuilder, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
        dim = dim[0] if isinstance(dim, Sequence) and len(dim) == 1 else dim
        reduced = g.reduce(kind, x, _axis_of(dim))
        return reduced if keepdim else _squeeze(g, reduced, dim)

    return apply


def _zeros(g: GraphBuilder, *shape: Any, **kwargs: Any) -> _ZeroInputs:
    return _ZeroInputs(tuple(shape[0]) if isinstance(shape[0], Sequence) else shape)


def _axis_of(dim: int | None) -> int:
    """Returns the axis; raises _Unwritable where there is none."""
    if not isinstance(dim, int):
        raise _Unwritable("it needs one axis, dim")
    return dim


def _reshape(g: GraphBuilder, x: Value, *shape: Any) -> Value:
    sizes = list(shape[0]) if isinstance(shape[0], Sequence) and len(shape) == 1 else list(shape)
    if -1 in sizes:
        place = sizes.index(-1)
        number, names = _factors(x.shape)
        others, other_names = _factors([s for k, s in enumerate(sizes) if k != place])
        left = list((names - other_names).elements())
        whole = number // max(others, 1)
        sizes[place] = "*".join([*left, *([str(whole)] if whole != 1 else [])]) if left else whole
    if _factors(x.shape) != _factors(sizes):
        raise _Unwritable(f"{tuple(sizes)} is not known to hold as many numbers as {x.shape}")
    moved = [s for k, s in enumerate(sizes) if isinstance(s, str) and x.shape[k : k + 1] != (s,)]
    if len(moved) > 1:
        raise _Unwritable(f"{x.shape} becomes {tuple(sizes)}: several axes of unknown length move")
    return g.reshape(x, sizes)


def _factors(shape: Sequence[Size]) -> tuple[int, Counter[str]]:
    """Returns the product of the numbers in a shape, and how often each name is in it."""
    product, names = 1, Counter[str]()
    for part in (part for size in shape for part in str(size).split("*")):
        if part.lstrip("-").isdigit():
            product *= int(part)
        else:
            names[part] += 1
    return product, names


def _flatten(g: GraphBuilder, x: Value, start_dim: int = 0, end_dim: int = -1) -> Value:
    first, last = start_dim % len(x.shape), end_dim % len(x.shape)
    return _reshape(g, x, [*x.shape[:first], -1, *x.shape[last + 1 :]])


def _squeeze(g: GraphBuilder, x: Value, dim: int | None = None) -> Value:
    places = range(len(x.shape)) if dim is None else [_axis_of(dim) % len(x.shape)]
    return _reshape(g, x, [s for k, s in enumerate(x.shape) if k not in places or s != 1])


def _unsqueeze(g: GraphBuilder, x: Value, dim: int) -> Value:
    place = dim % (len(x.shape) + 1)
    return _reshape(g, x, [*x.shape[:place], 1, *x.shape[place:]])


def _transpose(g: GraphBuilder, x: Value, dim0: int, dim1: int) -> Value:
    axes = list(range(len(x.shape)))
    axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
    return g.transpose(x, axes)


def _permute(g: GraphBuilder, x: Value, *dims: Any) -> Value:
    axes = dims[0] if isinstance(dims[0], Sequence) else dims
    return g.transpose(x, [axis % len(x.shape) for axis in axes])


def _cat(g: GraphBuilder, tensors: Sequence[Value], dim: int = 0) -> Value:
    if any(isinstance(value.shape[dim], str) for value in tensors):
        raise _Unwritable(f"joined along axis {dim}, whose length is not known")
    return g.concat(list(tensors), dim)


def _stack(g: GraphBuilder, tensors: Sequence[Value], dim: int = 0) -> Value:
    return _cat(g, [_unsqueeze(g, value, dim) for value in tensors], dim)


def _chunk(g: GraphBuilder, x: Value, chunks: int, dim: int = 0) -> list[Value]:
    return _split(g, x, -(-_known(x, dim) // chunks), dim)


def _split(g: GraphBuilder, x: Value, split_size: int, dim: int = 0) -> list[Value]:
    size = _known(x, dim)
    ends = range(0, size, split_size)
    return [g.slice(x, dim, first, min(first + split_size, size)) for first in ends]


def _known(x: Value, dim: int) -> int:
    size = x.shape[dim]
    if isinstance(size, str):
        raise _Unwritable(f"axis {dim} is cut, whose length is not known")
    return size


def _getitem(g: GraphBuilder, x: Value, index: Any) -> Value:
    """Returns a part of a value: whole numbers, slices of step 1, None and Ellipsis."""
    places = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in places:
        at = places.index(Ellipsis)
        num = len(x.shape) - sum(place is not None for place in places) + 1
        places[at : at + 1] = [slice(None)] * num
    shape: list[Size] = []
    axis = 0
    for place in places:
        if place is None:
            shape.append(1)
            continue
        if isinstance(place, bool) or not isinstance(place, int | slice):
            raise _Unwritable(f"an index {place!r}")
        x = _cut(g, x, axis, place)
        if isinstance(place, slice):
            shape.append(x.shape[axis])
        axis += 1
    return _reshape(g, x, [*shape, *x.shape[axis:]])


def _cut(g: GraphBuilder, x: Value, axis: int, place: int | slice) -> Value:
    """Returns one place or a part of an axis, which stays."""
    size = x.shape[axis]
    if place == slice(None):
        return x
    if isinstance(size, str):
        if place in (0, slice(0, 1), slice(None, 1)):
            return g.slice(x, axis, 0, 1)
        if place in (-1, slice(-1, None)):
            return g.last(x, axis)
        raise _Unwritable(f"{place} of axis {axis}, whose length is not known; its ends can be")
    if isinstance(place, int):
        if not -size <= place < size:
            raise _Unwritable(f"{place} of axis {axis}, which has {size} places")
        place = slice(place % size, place % size + 1)
    first, last, step = place.indices(size)
    if step != 1 or first >= last:
        raise _Unwritable(f"{place} of axis {axis}")
    return g.slice(x, axis, first, last)


def _size(g: GraphBuilder, x: Value, dim: int | None = None) -> Any:
    return x.shape if dim is None else x.shape[dim]


_CALLS: dict[str, Callable[..., Any]] = {
    **{name: _binary(name) for name in ("add", "sub", "mul", "div", "maximum", "minimum")},
    **{name: _unary(name) for name in ("relu", "sigmoid", "tanh", "exp", "log", "sqrt")},
    **dict.fromkeys(["contiguous", "detach", "clone", "dropout"], lambda g, x, *a, **k: x),
    **{name: _reduced(name) for name in ("sum", "mean")}, "amax": _reduced("max"),
    "to": _to, "float": lambda g, x: g.cast(x, "float32"),
    "neg": lambda g, x: g.binary("mul", x, -1.0),
    "zeros": _zeros, "new_zeros": lambda g, x, *shape, **kwargs: _zeros(g, *shape),
    "zeros_like": lambda g, x, **kwargs: _ZeroInputs(x.shape),
    "softmax": lambda g, x, dim=None, **kwargs: g.softmax(x, _axis_of(dim)),
    "log_softmax": lambda g, x, dim=None, **kwargs: g.log_softmax(x, _axis_of(dim)),
    **{
        function.__name__[1:]: function
        for function in (
            _reshape, _flatten, _squeeze, _unsqueeze, _transpose, _permute, _cat,
            _stack, _chunk, _split, _getitem, _size,
        )
    },
}  # fmt: skip
_SYNONYMS = {
    "truediv": "div", "view": "reshape", "swapaxes": "transpose", "concat": "cat", "iadd": "add",
    "imul": "mul", "isub": "sub", "subtract": "sub", "multiply": "mul", "divide": "div",
    "concatenate": "cat",
}  # fmt: skip


# layers -----------------------------------------------------------------------------------------


def _call_layer(
    g: GraphBuilder, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Returns what a layer gives in evaluation."""
    function = next((f for kind, f in _LAYERS.items() if isinstance(layer, kind)), None)
    if function is None:
        raise _Unwritable("no operation for it")
    if any(isinstance(value, _ZeroInputs) for value in args):
        raise _Unwritable("zeros can only be the state of an LSTM")
    return function(g, f"{name}." if name else "", layer, *args, **kwargs)


def _lstm(
    g: GraphBuilder, prefix: str, layer: nn.LSTM, x: Value, hx: Any = None,
    lengths: Value | None = None, padding: str = "right",
) -> tuple[Value, tuple[Value, Value]]:  # fmt: skip
    hook = layer.weight_hook if isinstance(layer, LSTM) else None
    for problem, is_so in {
        f"proj_size={layer.proj_size}": layer.proj_size > 0,
        "a weight_hook": hook is not None and not isinstance(hook, WeightDrop),
        f"padding={padding!r}": lengths is not None and padding != "right",
        "a sequence without a batch": isinstance(x, Value) and len(x.shape) != 3,
        "an input that is no tensor": not isinstance(x, Value),
        "float lengths": lengths is not None and lengths.dtype != "int32",
    }.items():
        if is_so:
            raise _Unwritable(f"an LSTM with {problem} cannot be written")
    D = 2 if layer.bidirectional else 1
    options = layer.options.in_evaluation() if isinstance(layer, LSTM) else TORCHS_CELL
    stack = LSTMStack(prefix, layer.hidden_size, layer.num_layers, D, layer.bias, options)
    state = None
    if hx is not None and not all(isinstance(part, _ZeroInputs) for part in hx):
        if any(isinstance(part, _ZeroInputs) for part in hx):
            raise _Unwritable("a state of which a part is zeros cannot be written")
        cuts = [(k * D, (k + 1) * D) for k in range(layer.num_layers)]
        h, c = ([g.slice(part, 0, *cut) for cut in cuts] for part in hx)
        state = list(zip(h, c, strict=True))
    steps = g.transpose(x, (1, 0, 2)) if layer.batch_first else x
    y, after = lstm_layers(g, steps, stack, state, lengths)
    y = g.transpose(y, (1, 0, 2)) if layer.batch_first else y
    last_h, last_c = (g.concat(list(parts), 0) for parts in zip(*after, strict=True))
    return y, (last_h, last_c)


def _linear(g: GraphBuilder, prefix: str, layer: nn.Linear, x: Value) -> Value:
    return g.linear(x, f"{prefix}weight", None if layer.bias is None else f"{prefix}bias")


def _embedding(g: GraphBuilder, prefix: str, layer: nn.Embedding, x: Value) -> Value:
    if x.dtype != "int32" or layer.max_norm is not None:
        raise _Unwritable("it reads whole numbers and has no max_norm")
    return g.gather(f"{prefix}weight", x)


def _layer_norm(g: GraphBuilder, prefix: str, layer: nn.LayerNorm, x: Value) -> Value:
    if len(layer.normalized_shape) != 1:
        raise _Unwritable("it normalises more than one axis")
    size = layer.normalized_shape[0]
    for name, default in (("weight", np.ones), ("bias", np.zeros)):
        if getattr(layer, name) is None:
            g.graph.weights[f"{prefix}{name}"] = default(size, np.float32)
    return g.layer_norm(x, f"{prefix}weight", f"{prefix}bias", layer.eps)


_LAYERS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.LSTM: _lstm, nn.Linear: _linear, nn.Embedding: _embedding, nn.LayerNorm: _layer_norm,
    nn.Dropout: lambda g, prefix, layer, x: x,
    nn.Identity: lambda g, prefix, layer, x: x,
    nn.Softmax: lambda g, prefix, layer, x: g.softmax(x, _axis_of(layer.dim)),
    nn.LogSoftmax: lambda g, prefix, layer, x: g.log_softmax(x, _axis_of(layer.dim)),
    nn.Flatten: lambda g, prefix, layer, x: _flatten(g, x, layer.start_dim, layer.end_dim),
    nn.ReLU: lambda g, prefix, layer, x: g.unary("relu", x),
    nn.Sigmoid: lambda g, prefix, layer, x: g.unary("sigmoid", x),
    nn.Tanh: lambda g, prefix, layer, x: g.unary("tanh", x),
}  # fmt: skip
