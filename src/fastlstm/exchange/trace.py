"""Code of torch as a graph: it runs on `Traced` values, and each call adds its operations.

What does not depend on the inputs is computed by torch itself. Lengths of axes are numbers or a
`TracedLength`; the code may loop over the numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn

from fastlstm.exchange.graph import (
    DType,
    Graph,
    GraphBuilder,
    Node,
    Size,
    Value,
    function,
    lstm_weights,
)
from fastlstm.nn.dropout import WeightDrop
from fastlstm.nn.lstm import LSTM
from fastlstm.ops.cell_options import TORCHS_CELL

_ANY = 1 << 20
"""Stands for a length that callers choose."""


class Unwritable(Exception):
    """Code that no graph can hold; the message says what."""


class TracedLength(str):
    """A length that callers choose, such as B, or a multiple of it, such as B*3."""

    def __mul__(self, times: Any) -> TracedLength:
        return self if times == 1 else TracedLength(f"{self}*{times}")

    __rmul__ = __mul__

    def __floordiv__(self, times: int) -> TracedLength:
        if times != 1 and not self.endswith(f"*{times}"):
            self._refuse()
        return TracedLength(self.removesuffix(f"*{times}"))

    def _refuse(self, *others: Any) -> Any:
        raise Unwritable("arithmetic on a length that is not known")

    def __eq__(self, other: object) -> bool:
        # The check runs the file at length 1.
        if isinstance(other, int) and other not in (-1, 0, 1):
            raise Unwritable("a comparison with a length that is not known")
        return str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    # As those of str they would succeed.
    __add__ = __radd__ = __mod__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Makes a constant, which is the same along an axis of unknown length."""
        if func.__name__ not in ("zeros", "ones", "full", "expand", "repeat"):
            raise Unwritable(f"{func.__name__} of a length that is not known")
        sizes = fx.node.map_aggregate(args, lambda x: 1 if isinstance(x, str) else x)
        return func(*sizes, **(kwargs or {}))


class Tracer(GraphBuilder):
    """A builder that makes equal operations once, and takes a part of joined values from these."""

    def __init__(self, name: str, module: nn.Module, weights: Mapping[str, Any]) -> None:
        super().__init__(name, dict(weights))
        self._module, self._known = module, dict[Any, Value]()
        self._names = {id(p): n for n, p in module.named_parameters() if n in weights}
        self._makers = dict[str, Node]()
        self.states = set[str]()  # names of inputs that are the state of an LSTM

    def traced_input(self, name: str, shape: Sequence[Size]) -> Traced:
        """Adds an input that code of torch takes for a tensor."""
        return Traced(self.input(name, shape))

    @contextmanager
    def recording(self, lengths: Traced | None = None) -> Iterator[None]:
        """Within the block the module's LSTMs add their operation, by default with these
        `lengths`."""
        lstms = [(n, m) for n, m in self._module.named_modules() if isinstance(m, nn.LSTM)]
        for name, lstm in lstms:
            own = partial(_lstm, prefix=f"{name}." if name else "", layer=lstm)
            lstm.forward = partial(_call, own, lengths=lengths)  # type: ignore[method-assign]
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
        if id(x) in self._names:
            return self.weight(self._names[id(x)])
        return x if isinstance(x, Value) else self.constant(_array(x))

    def weight_of(self, tensor: Tensor) -> str:
        """Returns the name of a tensor among the weights; adds the tensor if need be."""
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
        self.ndim, self.dtype = len(self.shape), getattr(torch, value.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _call(func.__name__.strip("_"), *args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if _SYNONYMS.get(name, name) not in _FUNCTIONS:
            raise AttributeError(f"a graph has no operation for `{name}` of a tensor")
        return partial(_call, name, self)

    def __iter__(self) -> Iterator[Traced]:
        return iter(_call("unbind", self))

    def __bool__(self) -> bool:
        raise Unwritable("a branch that depends on the numbers in a tensor")

    __hash__ = object.__hash__


def _operator(name: str, *, is_swapped: bool = False) -> Callable[..., Any]:
    return lambda a, *b: _call(name, *b, a) if is_swapped else _call(name, a, *b)


for _name in ("add", "sub", "mul", "truediv", "getitem", "eq", "lt", "gt", "pow", "neg", "invert"):
    setattr(Traced, f"__{_name}__", _operator(_name))
for _name in ("add", "sub", "mul", "truediv"):
    setattr(Traced, f"__r{_name}__", _operator(_name, is_swapped=True))


def _call(function: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns the result of a function of torch, by its name, for traced values."""
    apply: Any
    tracers: list[Tracer] = []

    def value_of(x: Any) -> Any:
        if isinstance(x, Traced):
            tracers.append(x.value.builder)  # type: ignore[arg-type]
            return x.value
        return str(x) if isinstance(x, TracedLength) else x  # graphs may compare names

    def traced(x: Any) -> Any:
        return Traced(x) if isinstance(x, Value) else TracedLength(x) if isinstance(x, str) else x

    values, named = fx.node.map_aggregate((args, kwargs), value_of)
    name, apply = "LSTM", function
    if isinstance(function, str):
        name, apply = function, _FUNCTIONS.get(_SYNONYMS.get(function, function), _unknown)
    try:
        return fx.node.map_aggregate(apply(tracers[0], *values, **named), traced)
    except Unwritable as problem:
        raise Unwritable(f"{name}: {problem}") from None
    except (TypeError, ValueError, IndexError, AssertionError) as error:
        raise Unwritable(f"{name}: not with these arguments ({error})") from error


def _unknown(*args: Any, **kwargs: Any) -> Any:
    raise Unwritable("no operation for it")


class _Sorted(NamedTuple):
    values: Value


def _sort(g: Tracer, x: Value, dim: int = -1) -> _Sorted:
    if dim not in (-1, len(x.shape) - 1):
        raise Unwritable("sorting along another axis than the last")
    return _Sorted(g.sort(x))


def _array(x: Any) -> Any:
    return x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x, np.float32)


def _sizes(shape: Sequence[Size]) -> list[int]:
    """Returns a shape of constants, which are the same for all of an axis of unknown length."""
    return [1 if isinstance(size, str) else size for size in shape]


def _arithmetic(kind: str) -> Callable[..., Value]:
    def apply(g: Tracer, a: Any, b: Any) -> Value:
        if kind in ("add", "mul") and not isinstance(a, Value):
            a, b = b, a
        if isinstance(a, Value):
            a = g.cast(a, "float32")
        if isinstance(b, Value) or not isinstance(a, Value) or id(b) in g._names:
            return g.binary(kind, g.value(a), g.cast(g.value(b), "float32"))
        array = _array(b)
        is_same = (array == (kind in ("mul", "div"))).all()
        if is_same and np.broadcast_shapes(_sizes(a.shape), array.shape) == tuple(_sizes(a.shape)):
            return a
        high = array.astype(np.float32)
        if array.dtype == np.float64 and kind in ("add", "sub") and (array != high).any():
            # float32 alone would move numbers far from zero
            low = (array - high).astype(np.float32)
            first, second = (high, low) if kind == "sub" else (low, high)
            return g.binary(kind, g.binary(kind, a, first), second)
        return g.binary(kind, a, high)

    return apply


def _comparison(kind: str) -> Callable[..., Value]:
    return lambda g, a, b: g.binary(kind, g.value(a), _like(g, b, a))


def _like(g: Tracer, x: Any, other: Any) -> Value:
    """Returns a value; a whole number gets the type of `other`, with which it is compared."""
    is_whole = isinstance(x, int) and isinstance(other, Value)
    return g.constant(np.asarray(x, other.dtype)) if is_whole else g.value(x)


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
    return mean if keepdim else _squeeze(g, mean, dim)


def _clamp(g: Tracer, x: Value, min: float | None = None, max: float | None = None) -> Value:
    """Writes `where`: the maximum and the minimum of some runtimes do not keep NaN."""
    for bound, is_least in ((min, True), (max, False)):
        if bound is not None:
            limit = g.constant(np.asarray(bound, x.dtype))
            is_out = g.binary("less", *((x, limit) if is_least else (limit, x)))
            x = g.where(is_out, limit, x)
    return x


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
    if any(isinstance(arg, Value) for arg in args):
        return g.cast(x, "float32")
    dtype = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.dtype)), None)
    if dtype is None:
        return x
    if dtype == torch.bool:
        raise Unwritable("no operation for it")
    return g.cast(x, "float32" if dtype.is_floating_point else "int32")


def _cat(g: Tracer, tensors: Sequence[Any], dim: int = 0) -> Value:
    whole = next(x for x in tensors if isinstance(x, Value))
    parts = [
        x if isinstance(x, Value) else _repeated(g, x, whole) for x in tensors if 0 not in x.shape
    ]
    if any(isinstance(value.shape[dim], str) for value in parts):
        raise Unwritable(f"joined along axis {dim}, whose length is not known")
    return g.concat(parts, dim)


def _repeated(g: Tracer, x: Tensor, like: Value) -> Value:
    """Returns a tensor once for each row of `like`, whose first axis has an unknown length."""
    for axis in range(1, len(like.shape)):
        like = g.slice(like, axis, 0, 1)
    zero = g.cast(g.binary("less", like, like), "float32")
    return g.binary("add", zero, _array(x))


def _stack(g: Tracer, tensors: Sequence[Any], dim: int = 0) -> Value:
    place = dim % (len(tensors[0].shape) + 1)
    apart = [
        x.unsqueeze(place) if isinstance(x, Tensor) else _unsqueeze(g, x, place) for x in tensors
    ]
    return _cat(g, apart, place)


def _pad(
    g: Tracer, x: Value, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Value:
    if not any(pad):
        return x
    if mode != "constant" or len(pad) != 4 or any(pad[:3]) or pad[3] < 0:
        raise Unwritable("padding other than rows of one value behind the last row")
    sizes = _sizes(x.shape)
    sizes[-2] = pad[3]
    return _cat(g, [x, torch.full(sizes, value or 0.0)], -2)


def _getitem(g: Tracer, x: Any, index: Any) -> Any:
    places = list(index) if isinstance(index, tuple) else [index]
    if isinstance(places[-1], list | np.ndarray):
        if len(places) < len(x.shape) and places[0] is not Ellipsis:
            raise Unwritable("an index by a list of another axis than the last")
        return _taken(g, x, [int(k) for k in places[-1]])
    if any(isinstance(place, slice) and place.step not in (None, 1) for place in places):
        raise Unwritable("a part with a step")
    sizes = [_ANY if isinstance(size, str) else size for size in x.shape]
    if 0 in (shape := np.broadcast_to(0.0, sizes)[index].shape):
        return torch.empty([1 if size == _ANY else size for size in shape])
    if Ellipsis in places:
        at = places.index(Ellipsis)
        num = len(x.shape) - sum(place is not None for place in places) + 1
        places[at : at + 1] = [slice(None)] * num
    kept, axis = list[Size](), 0
    for place in places:
        if place is None:
            kept.append(1)
            continue
        if isinstance(place, bool) or not isinstance(place, int | slice):
            raise Unwritable(f"an index {place!r}")
        x = _cut(g, x, axis, place)
        if isinstance(place, slice):
            kept.append(x.shape[axis])
        axis += 1
    return _reshape(g, x, [*kept, *x.shape[axis:]])


def _taken(g: Tracer, x: Value, places: Sequence[int]) -> Any:
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
    apart = _arithmetic("mul")(g, _unsqueeze(g, x, dim + 1), torch.ones(times))
    return _flatten(g, apart, dim, dim + 1)


def _unbind(g: Tracer, x: Value, dim: int = 0) -> list[Value]:
    parts = [g.slice(x, dim, k, k + 1) for k in range(_known(x, dim))]
    return [_squeeze(g, part, dim) for part in parts]


def _reduced(kind: Any) -> Callable[..., Value]:
    def apply(g: Tracer, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
        dim = dim[0] if isinstance(dim, Sequence) and len(dim) == 1 else dim
        reduced = g.reduce(kind, x, _axis_of(dim))
        return reduced if keepdim else _squeeze(g, reduced, dim)

    return apply


def _axis_of(dim: int | None) -> int:
    if not isinstance(dim, int):
        raise Unwritable("it needs one axis, dim")
    return dim


def _listed(sizes: tuple[Any, ...]) -> Sequence[Any]:
    """Returns numbers that came one by one or as one sequence."""
    is_one = len(sizes) == 1 and isinstance(sizes[0], Sequence) and not isinstance(sizes[0], str)
    return sizes[0] if is_one else sizes


def _reshape(g: Tracer, x: Value, *shape: Any) -> Value:
    sizes = list(_listed(shape))
    if -1 in sizes:
        place = sizes.index(-1)
        number, names = _factors(x.shape)
        others, other_names = _factors([s for k, s in enumerate(sizes) if k != place])
        left = list((names - other_names).elements())
        whole = number // max(others, 1)
        sizes[place] = "*".join([*left, *([str(whole)] if whole != 1 else [])]) if left else whole
    if _factors(x.shape) != _factors(sizes):
        raise Unwritable(f"{tuple(sizes)} is not known to hold as many numbers as {x.shape}")
    moved = [s for k, s in enumerate(sizes) if isinstance(s, str) and x.shape[k : k + 1] != (s,)]
    if len(moved) > 1:
        raise Unwritable(f"{x.shape} becomes {tuple(sizes)}: several axes of unknown length move")
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


def _flatten(g: Tracer, x: Value, start_dim: int = 0, end_dim: int = -1) -> Value:
    first, last = start_dim % len(x.shape), end_dim % len(x.shape)
    return _reshape(g, x, [*x.shape[:first], -1, *x.shape[last + 1 :]])


def _squeeze(g: Tracer, x: Value, dim: int | None = None) -> Value:
    places = range(len(x.shape)) if dim is None else [_axis_of(dim) % len(x.shape)]
    return _reshape(g, x, [s for k, s in enumerate(x.shape) if k not in places or s != 1])


def _unsqueeze(g: Tracer, x: Value, dim: int) -> Value:
    place = dim % (len(x.shape) + 1)
    return _reshape(g, x, [*x.shape[:place], 1, *x.shape[place:]])


def _transpose(g: Tracer, x: Value, dim0: int, dim1: int) -> Value:
    axes = list(range(len(x.shape)))
    axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
    return g.transpose(x, axes)


def _permute(g: Tracer, x: Value, *dims: Any) -> Value:
    return g.transpose(x, [axis % len(x.shape) for axis in _listed(dims)])


def _chunk(g: Tracer, x: Value, chunks: int, dim: int = 0) -> list[Value]:
    return _split(g, x, -(-_known(x, dim) // chunks), dim)


def _split(g: Tracer, x: Value, split_size: int, dim: int = 0) -> list[Value]:
    size = _known(x, dim)
    ends = range(0, size, split_size)
    return [g.slice(x, dim, first, min(first + split_size, size)) for first in ends]


def _known(x: Value, dim: int) -> int:
    size = x.shape[dim]
    if isinstance(size, str):
        raise Unwritable(f"axis {dim} is cut, whose length is not known")
    return size


def _cut(g: Tracer, x: Value, axis: int, place: int | slice) -> Value:
    """Returns one place or a part of an axis, which stays; `_getitem` has checked the bounds."""
    size = x.shape[axis]
    if place == slice(None):
        return x
    if isinstance(size, str):
        if place in (0, slice(0, 1), slice(None, 1)):
            return g.slice(x, axis, 0, 1)
        if place in (-1, slice(-1, None)):
            return g.last(x, axis)
        raise Unwritable(f"{place} of axis {axis}, whose length is not known; its ends can be")
    if isinstance(place, int):
        place = slice(place % size, place % size + 1)
    return g.slice(x, axis, *place.indices(size)[:2])


def _size(g: Tracer, x: Value, dim: int | None = None) -> Any:
    return x.shape if dim is None else x.shape[dim]


def _named(name: str) -> Callable[..., Value]:
    def apply(g: Tracer, x: Value, alpha: float = 1.0, inplace: bool = False) -> Value:
        if alpha != 1:
            raise Unwritable(f"alpha={alpha}")
        return function(g, name, x)

    return apply


def _softplus(g: Tracer, x: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    if (beta, threshold) != (1, 20):
        raise Unwritable(f"beta={beta} and threshold={threshold}, expected 1 and 20")
    return g.unary("softplus", x)


def _same(g: Tracer, x: Value, *args: Any, **kwargs: Any) -> Value:
    return x


def _linear(g: Tracer, x: Value, weight: Tensor, bias: Tensor | None = None) -> Value:
    return g.linear(x, g.weight_of(weight), None if bias is None else g.weight_of(bias))


def _embedding(
    g: Tracer, x: Value, table: Tensor, padding_idx: int | None = None,
    max_norm: float | None = None, **rest: Any,
) -> Value:  # fmt: skip
    if x.dtype != "int32" or max_norm is not None:
        raise Unwritable("it reads whole numbers and has no max_norm")
    return g.gather(g.weight_of(table), x)


def _layer_norm(
    g: Tracer, x: Value, shape: Sequence[int], weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5,
) -> Value:  # fmt: skip
    if len(shape) != 1:
        raise Unwritable("it normalises more than one axis")
    scale = torch.ones(*shape) if weight is None else weight
    shift = torch.zeros(*shape) if bias is None else bias
    return g.layer_norm(x, g.weight_of(scale), g.weight_of(shift), eps)


def _lstm(
    g: Tracer, input: Value, hx: Any = None, lengths: Value | None = None, padding: str = "right",
    *, prefix: str, layer: nn.LSTM,
) -> tuple[Value, tuple[Value, Value]]:  # fmt: skip
    hook = layer.weight_hook if isinstance(layer, LSTM) else None
    for problem, is_so in {
        f"proj_size={layer.proj_size}": layer.proj_size > 0,
        "a weight_hook": hook is not None and not isinstance(hook, WeightDrop),
        f"padding={padding!r}": lengths is not None and padding != "right",
        "a sequence without a batch": isinstance(input, Value) and len(input.shape) != 3,
        "an input that is no tensor": not isinstance(input, Value),
        "float lengths": lengths is not None and lengths.dtype != "int32",
    }.items():
        if is_so:
            raise Unwritable(f"{problem} cannot be written")
    D = 2 if layer.bidirectional else 1
    options = layer.options.in_evaluation() if isinstance(layer, LSTM) else TORCHS_CELL
    y, hs, cs = g.transpose(input, (1, 0, 2)) if layer.batch_first else input, [], []
    for k, state in enumerate(_states(g, y, hx, layer, D)):
        names = lstm_weights(prefix, k, D, has_bias=layer.bias)
        y, h, c = g.lstm(y, *state, names, options, lengths)
        hs.append(h)
        cs.append(c)
    y = g.transpose(y, (1, 0, 2)) if layer.batch_first else y
    return y, (g.concat(hs, 0), g.concat(cs, 0))


def _states(g: Tracer, x: Value, hx: Any, layer: nn.LSTM, D: int) -> list[tuple[Value, Value]]:
    """Returns h and c `(D, B, H)` of every layer for the input `(T, B, I)`; None is zero."""
    L, H = layer.num_layers, layer.hidden_size
    if hx is None or all(isinstance(part, Tensor) and not part.any() for part in hx):
        zero = _zeros(g, x, (D, 1, H))
        return [(zero, zero)] * L
    inputs = {value.name for value in g.graph.inputs}
    g.states |= {part.name for part in hx if isinstance(part, Value)} & inputs
    whole = [
        part if isinstance(part, Value) else _zeros(g, x, (L * D, 1, H)) + _array(part)
        for part in hx
    ]
    h, c = ([g.slice(part, 0, k * D, (k + 1) * D) for k in range(L)] for part in whole)
    return list(zip(h, c, strict=True))


def _zeros(g: Tracer, x: Value, shape: tuple[int, int, int]) -> Value:
    """Returns zeros `(D, B, H)` for a shape `(D, 1, H)` and the batch of `x` `(T, B, I)`."""
    first = g.slice(x, 0, 0, 1) if isinstance(x.shape[0], int) else g.reduce("max", x, 0)
    first = g.slice(first, 2, 0, 1)
    return g.cast(g.binary("less", first, first), "float32") + np.zeros(shape, np.float32)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: _arithmetic(name) for name in ("add", "sub", "mul", "div")},
    **{name: _comparison(name) for name in ("maximum", "minimum")},
    **{name: _named(name) for name in ("relu", "sigmoid", "tanh", "exp", "log", "sqrt")},
    **dict.fromkeys(["contiguous", "detach", "clone", "dropout", "double", "cpu"], _same),
    **{name: _reduced(name) for name in ("sum", "mean")}, "amax": _reduced("max"),
    **{
        f.__name__[1:]: f
        for f in (
            _where, _pad, _nan_to_num, _nanmean, _clamp, _lerp, _to, _cat, _stack, _getitem,
            _expand, _repeat_interleave, _unbind, _linear, _abs, _pow, _reshape, _flatten,
            _squeeze, _unsqueeze, _transpose, _permute, _chunk, _split, _size, _embedding,
            _layer_norm, _softplus,
        )
    },
    "eq": _comparison("equal"), "lt": _comparison("less"), "invert": _named("not"),
    "gt": lambda g, a, b: g.binary("less", _like(g, b, a), g.value(a)),
    "isnan": _named("is_nan"),
    "hardsigmoid": _named("hard_sigmoid"),
    **{name: _named(name) for name in ("softsign", "elu", "selu", "silu")},
    "isinf": lambda g, x: g.binary("equal", _abs(g, x), math.inf),
    "expm1": lambda g, x: g.unary("exp", x) - 1.0,
    "neg": lambda g, x: x * -1.0,
    "float": lambda g, x: g.cast(x, "float32"), "long": lambda g, x: g.cast(x, "int32"),
    "sort": _sort,
    "softmax": lambda g, x, dim=None, **kwargs: g.softmax(x, _axis_of(dim)),
    "log_softmax": lambda g, x, dim=None, **kwargs: g.log_softmax(x, _axis_of(dim)),
    "ones_like": lambda g, x: torch.ones(_sizes(x.shape)),
    "zeros_like": lambda g, x: torch.zeros(_sizes(x.shape)),
    "new_zeros": lambda g, x, *shape, **kwargs: torch.zeros(_sizes(_listed(shape))),
    "new_full": lambda g, x, shape, number: torch.full(_sizes(shape), number),
}  # fmt: skip
_SYNONYMS = {
    "truediv": "div", "view": "reshape", "swapaxes": "transpose", "concat": "cat", "iadd": "add",
    "imul": "mul", "isub": "sub", "subtract": "sub", "multiply": "mul", "divide": "div",
    "concatenate": "cat",
}  # fmt: skip
