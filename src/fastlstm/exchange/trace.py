"""Code of torch as a graph: it runs on `Traced` values, and each call adds its operations.

What does not depend on the inputs is computed by torch itself. Lengths of axes are numbers or a
`TracedLength`; the code may loop over the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn

from fastlstm.exchange import module_source as calls
from fastlstm.exchange.graph import DType, Graph, GraphBuilder, Node, Size, Value

_DTYPES = {"float32": torch.float32, "int32": torch.int32, "bool": torch.bool}
_ANY = 1 << 20
"""Stands for a length that callers choose."""


class TracedLength(str):
    """A length that callers choose, such as B, or a multiple of it, such as B*3."""

    def __mul__(self, times: Any) -> TracedLength:
        return self if times == 1 else TracedLength(f"{self}*{times}")

    def __floordiv__(self, times: int) -> TracedLength:
        return TracedLength(self.removesuffix(f"*{times}"))


class Tracer(GraphBuilder):
    """A builder that makes an operation once, and a part of joined values from the values."""

    def __init__(self, name: str, module: nn.Module, weights: Mapping[str, Any]) -> None:
        super().__init__(name, dict(weights))
        self._module, self._known = module, dict[Any, Value]()
        self._names = {id(p): n for n, p in module.named_parameters() if n in weights}
        self._makers = dict[str, Node]()

    def traced_input(self, name: str, shape: Sequence[Size]) -> Traced:
        """Adds an input that code of torch takes for a tensor."""
        return Traced(self.input(name, shape))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Has the module's LSTMs add their operation, for the time of the block."""
        lstms = [(n, m) for n, m in self._module.named_modules() if isinstance(m, nn.LSTM)]
        for name, lstm in lstms:
            lstm.forward = partial(_call, partial(_lstm, prefix=f"{name}.", layer=lstm))  # type: ignore[method-assign]
        try:
            with torch.no_grad():
                yield
        finally:
            for _, lstm in lstms:
                del lstm.forward

    def finished(self) -> Graph:
        """Returns the graph without operations and weights that its outputs do not need."""
        graph, needed, nodes = self.graph, {v.name for v in self.graph.outputs}, list[Node]()
        for node in reversed(graph.nodes):
            if not needed.isdisjoint(value.name for value in node.outputs):
                nodes.insert(0, node)
                needed |= {value.name for value in node.inputs}
        places = ("weight", "bias", "table")
        needed = {str(node.attributes.get(place)) for node in nodes for place in places}
        lstms = [one[0] for node in nodes for one in node.attributes.get("directions", ())]
        prefixes = tuple(name.removesuffix(name.rpartition(".")[2]) for name in lstms)
        graph.nodes = nodes
        graph.weights = {
            n: w for n, w in graph.weights.items() if n in needed or n.startswith(prefixes)
        }
        return graph

    def constant(self, array: Any) -> Value:
        array = np.asarray(array)
        array = array.astype("int32" if array.dtype.kind in "iu" else "float32")
        key = array.tobytes(), array.shape, array.dtype
        if key not in self._known:
            self._known[key] = super().constant(array)
        return self._known[key]

    def value(self, x: Any) -> Value:
        """Returns a tensor, a number or a value as a value."""
        return x if isinstance(x, Value) else self.constant(_array(x))

    def weight_of(self, tensor: Tensor) -> str:
        """Returns the name of a tensor among the weights, to which it is added if need be."""
        if id(tensor) in self._names:
            return self._names[id(tensor)]
        name = self.constant(_array(tensor)).name
        return str(self._makers[name].attributes["weight"])

    def slice(self, x: Value, axis: int, start: int, stop: int) -> Value:
        maker, axis = self._makers.get(x.name), axis % len(x.shape)
        if maker is None or maker.kind != "concat" or (start, stop) == (0, x.shape[axis]):
            return super().slice(x, axis, start, stop)
        joined = maker.attributes["axis"]
        if axis != joined:
            return self.concat([self.slice(v, axis, start, stop) for v in maker.inputs], joined)
        parts, first = [], 0
        for value in maker.inputs:
            size = int(value.shape[axis])
            begin, end = max(start - first, 0), min(stop - first, size)
            if begin < end:
                parts.append(self.slice(value, axis, begin, end))
            first += size
        return self.concat(parts, axis)

    def _add(
        self,
        kind: str,
        inputs: tuple[Value, ...],
        shape: Sequence[Size],
        dtype: DType = "float32",
        name: str | None = None,
        **attributes: Any,
    ) -> Value:
        key = kind, inputs, tuple(shape), dtype, name, repr(attributes)
        if key not in self._known:
            self._known[key] = made = super()._add(kind, inputs, shape, dtype, name, **attributes)
            self._makers[made.name] = self.graph.nodes[-1]
        return self._known[key]


class Traced:
    """A value that code of torch takes for a tensor."""

    device, is_cuda = torch.device("cpu"), False

    def __init__(self, value: Value) -> None:
        self.value = value
        self.shape = tuple(TracedLength(n) if isinstance(n, str) else n for n in value.shape)
        self.ndim, self.dtype = len(self.shape), _DTYPES[value.dtype]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _call(func.__name__, *args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if calls._SYNONYMS.get(name, name) not in _FUNCTIONS:
            raise AttributeError(f"a graph has no operation for `{name}` of a tensor")
        return partial(_call, name, self)

    def __iter__(self) -> Iterator[Traced]:
        return iter(_call("unbind", self))

    __hash__ = object.__hash__


def _operator(name: str, *, is_swapped: bool = False) -> Callable[..., Any]:
    return lambda a, *b: _call(name, *b, a) if is_swapped else _call(name, a, *b)


for _name, _function in {
    **{n: n for n in ("add", "sub", "mul", "getitem", "eq", "lt", "pow", "neg", "invert")},
    "truediv": "div",
}.items():
    setattr(Traced, f"__{_name}__", _operator(_function))
for _name in ("add", "sub", "mul"):
    setattr(Traced, f"__r{_name}__", _operator(_name, is_swapped=True))


def _call(function: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns what a function of torch, by its name, gives for traced values."""
    tracers: list[Tracer] = []

    def value_of(x: Any) -> Any:
        if isinstance(x, Traced):
            tracers.append(x.value.builder)  # type: ignore[arg-type]
            return x.value
        return x

    values, named = fx.node.map_aggregate((args, kwargs), value_of)
    if isinstance(function, str):
        function = _FUNCTIONS[calls._SYNONYMS.get(function, function)]
    found = function(tracers[0], *values, **named)
    return fx.node.map_aggregate(found, lambda x: Traced(x) if isinstance(x, Value) else x)


# functions of torch -----------------------------------------------------------------------------


class _Sorted(NamedTuple):
    values: Value


def _array(x: Any) -> Any:
    return x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x, np.float32)


def _sizes(shape: Sequence[Size]) -> list[int]:
    """Returns a shape of constants, which are the same for all of an axis of unknown length."""
    return [1 if isinstance(size, str) else size for size in shape]


def _arithmetic(kind: str) -> Callable[..., Value]:
    def apply(g: Tracer, a: Any, b: Any) -> Value:
        if kind in ("add", "mul") and not isinstance(a, Value):
            a, b = b, a
        if isinstance(b, Value) or not isinstance(a, Value):
            a, b = (g.value(x) for x in (a, b))
            return g.binary(
                kind, *(g.cast(x, "float32") if x.dtype == "int32" else x for x in (a, b))
            )
        array = _array(b)
        is_same = (array == (kind in ("mul", "div"))).all()
        if is_same and np.broadcast_shapes(_sizes(a.shape), array.shape) == tuple(_sizes(a.shape)):
            return a
        high = array.astype(np.float32)
        if array.dtype == np.float64 and kind in ("add", "sub") and (array != high).any():
            # float32 alone would move what is far from zero
            low = (array - high).astype(np.float32)
            first, second = (high, low) if kind == "sub" else (low, high)
            return g.binary(kind, g.binary(kind, a, first), second)
        return g.binary(kind, a, high)

    return apply


def _comparison(kind: str) -> Callable[..., Value]:
    return lambda g, a, b: g.binary(kind, g.value(a), g.value(b))


def _where(g: Tracer, condition: Any, a: Any, b: Any) -> Value:
    if isinstance(condition, Tensor):  # one for all rows
        assert condition.all()
        return g.value(a)
    return g.where(condition, g.value(a), g.value(b))


def _is_number(g: Tracer, x: Value) -> Value:
    return g.unary("not", g.unary("is_nan", x))


def _nan_to_num(g: Tracer, x: Value, nan: float = 0.0) -> Value:
    return g.where(_is_number(g, x), x, nan)


def _nanmean(g: Tracer, x: Value, dim: int, keepdim: bool = False) -> Value:
    count = g.reduce("sum", g.cast(_is_number(g, x), "float32"), dim)
    mean = g.reduce("sum", _nan_to_num(g, x), dim) / g.binary("maximum", count, 1.0)
    mean = g.where(g.binary("less", count, 1.0), g.value(math.nan), mean)
    return mean if keepdim else calls._squeeze(g, mean, dim)


def _clamp(g: Tracer, x: Value, min: float | None = None, max: float | None = None) -> Value:
    x = x if min is None else g.binary("maximum", x, float(min))
    return x if max is None else g.binary("minimum", x, float(max))


def _abs(g: Tracer, x: Value) -> Value:
    return g.binary("maximum", x, x * -1.0)


def _pow(g: Tracer, x: Value, power: float) -> Value:
    assert power == 2
    return x * x


def _lerp(g: Tracer, a: Value, b: Value, weight: Any) -> Value:
    part: Value = (b - a) * _array(weight)
    return part + a


def _to(g: Tracer, x: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(x, Tensor):
        return x.float()
    is_cast = any(isinstance(arg, Value) for arg in args) and x.dtype != "float32"
    return g.cast(x, "float32") if is_cast else calls._to(g, x, *args, **kwargs)


def _cat(g: Tracer, tensors: Sequence[Any], dim: int = 0) -> Value:
    whole = next(x for x in tensors if isinstance(x, Value))
    parts = [
        x if isinstance(x, Value) else _repeated(g, x, whole) for x in tensors if 0 not in x.shape
    ]
    return calls._cat(g, parts, dim)


def _repeated(g: Tracer, x: Tensor, like: Value) -> Value:
    """Returns a tensor once for each row of `like`, whose first axis has an unknown length."""
    for axis in range(1, len(like.shape)):
        like = g.slice(like, axis, 0, 1)
    zero = g.cast(g.unary("is_nan", like), "float32") * 0.0
    return g.binary("add", zero, _array(x))


def _stack(g: Tracer, tensors: Sequence[Any], dim: int = 0) -> Value:
    place = dim % (len(tensors[0].shape) + 1)
    apart = [
        x.unsqueeze(place) if isinstance(x, Tensor) else calls._unsqueeze(g, x, place)
        for x in tensors
    ]
    return _cat(g, apart, place)


def _pad(
    g: Tracer, x: Value, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Value:
    if not any(pad):
        return x
    sizes = _sizes(x.shape)
    sizes[-2] = pad[-1]  # rows behind the last one; the code that is traced adds no others
    return _cat(g, [x, torch.full(sizes, value or 0.0)], -2)


def _getitem(g: Tracer, x: Value, index: Any) -> Any:
    places = index if isinstance(index, tuple) else (index,)
    if isinstance(places[-1], list | np.ndarray):
        return _taken(g, x, [int(k) for k in places[-1]])
    if any(isinstance(place, slice) and place.step not in (None, 1) for place in places):
        raise NotImplementedError("a part of a traced value with a step")
    sizes = [_ANY if isinstance(size, str) else size for size in x.shape]
    if 0 in (shape := np.broadcast_to(0.0, sizes)[index].shape):
        return torch.empty([1 if size == _ANY else size for size in shape])
    return calls._getitem(g, x, index)


def _taken(g: Tracer, x: Value, places: Sequence[int]) -> Any:
    """Returns places of the last axis."""
    if not places:
        return torch.empty([*_sizes(x.shape[:-1]), 0])
    ends = [k for k in range(1, len(places)) if places[k] != places[k - 1] + 1]
    runs = zip([0, *ends], [*ends, len(places)], strict=True)
    return g.concat([g.slice(x, -1, places[a], places[b - 1] + 1) for a, b in runs], -1)


def _expand(g: Tracer, x: Value, *sizes: Any) -> Value:
    wanted = [old if new == -1 else new for old, new in zip(x.shape, sizes, strict=True)]
    return _arithmetic("mul")(g, x, torch.ones(_sizes(wanted)))


def _repeat_interleave(g: Tracer, x: Value, repeats: int, dim: int) -> Value:
    times = [repeats if axis == dim + 1 else 1 for axis in range(len(x.shape) + 1)]
    apart = _arithmetic("mul")(g, calls._unsqueeze(g, x, dim + 1), torch.ones(times))
    return calls._flatten(g, apart, dim, dim + 1)


def _unbind(g: Tracer, x: Value, dim: int = 0) -> list[Value]:
    parts = [g.slice(x, dim, k, k + 1) for k in range(calls._known(x, dim))]
    return [calls._squeeze(g, part, dim) for part in parts]


def _linear(g: Tracer, x: Value, weight: Tensor, bias: Tensor | None = None) -> Value:
    return g.linear(x, g.weight_of(weight), None if bias is None else g.weight_of(bias))


def _lstm(g: Tracer, *args: Any, prefix: str, layer: nn.LSTM, **kwargs: Any) -> Any:
    return calls._lstm(g, prefix, layer, *args, **kwargs)


def _same(g: Tracer, x: Value) -> Value:
    return x


def _unary(kind: str) -> Callable[..., Value]:
    return lambda g, x: g.unary(kind, x)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **calls._CALLS,
    **{name: _arithmetic(name) for name in ("add", "sub", "mul", "div")},
    **{
        f.__name__[1:]: f
        for f in (
            _where, _pad, _nan_to_num, _nanmean, _clamp, _lerp, _to, _cat, _stack, _getitem,
            _expand, _repeat_interleave, _unbind, _linear, _abs, _pow,
        )
    },
    "eq": _comparison("equal"), "lt": _comparison("less"), "invert": _unary("not"),
    "isnan": _unary("is_nan"), "softplus": _unary("softplus"), "double": _same, "cpu": _same,
    "isinf": lambda g, x: g.binary("equal", _abs(g, x), math.inf),
    "expm1": lambda g, x: g.unary("exp", x) - 1.0,
    "float": lambda g, x: x if x.dtype == "float32" else g.cast(x, "float32"),
    "long": lambda g, x: g.cast(x, "int32"),
    "sort": lambda g, x, dim=-1: _Sorted(g.sort(x)),
    "embedding": lambda g, x, table, **rest: g.gather(g.weight_of(table), x),
    "ones_like": lambda g, x: torch.ones(_sizes(x.shape)),
    "zeros_like": lambda g, x: torch.zeros(_sizes(x.shape)),
    "new_full": lambda g, x, shape, number: torch.full(_sizes(shape), number),
}  # fmt: skip
