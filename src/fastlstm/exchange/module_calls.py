"""Calls and layers of torch as operations of a `Graph`.

Each function takes the arguments of torch's of the same name, values of the graph for tensors.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fastlstm.exchange.graph import GraphBuilder, LSTMStack, Size, Value, lstm_layers
from fastlstm.nn.dropout import WeightDrop
from fastlstm.nn.lstm import LSTM
from fastlstm.ops.cell_options import TORCHS_CELL


class Unwritable(Exception):
    """Something that a graph cannot hold; the text says what."""


class Zeros(NamedTuple):
    """A tensor of zeros, which states of an LSTM may begin with."""

    shape: tuple[Size, ...]


def call(g: GraphBuilder, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what a function of torch, or a method by its name, gives."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    is_known = isinstance(target, str) or any(
        getattr(place, name, None) is target for place in (operator, torch, F)
    )
    function = _CALLS.get(_SYNONYMS.get(name, name)) if is_known else None
    if function is None and target is not getattr:
        raise Unwritable("no operation for it")
    if any(isinstance(value, Zeros) for value in (*args, *kwargs.values())):
        if name in ("to", "contiguous", "detach", "clone", "float"):
            return args[0]
        raise Unwritable("zeros can only be the state of an LSTM")
    if function is None:
        x, attribute = args
        if isinstance(x, Value) and attribute in ("shape", "device", "dtype"):
            return x.shape if attribute == "shape" else None
        raise Unwritable(f"no attribute {attribute}")
    if name == "getitem" and not isinstance(args[0], Value):  # of a pair, or of a shape
        return args[0][args[1]]
    try:
        return function(g, *args, **kwargs)
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise Unwritable(f"not with these arguments ({error})") from error


def _binary(kind: str) -> Callable[..., Value]:
    def apply(g: GraphBuilder, a: Any, b: Any) -> Value:
        values = [v for v in (a, b) if isinstance(v, Value)]
        if not values or any(isinstance(v, str) for v in (a, b)):
            raise Unwritable("arithmetic on lengths")
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
        raise Unwritable("no operation for it")
    return g.cast(x, "float32" if dtype.is_floating_point else "int32")


def _reduced(kind: Any) -> Callable[..., Value]:
    def apply(g: GraphBuilder, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
        dim = dim[0] if isinstance(dim, Sequence) and len(dim) == 1 else dim
        reduced = g.reduce(kind, x, _axis_of(dim))
        return reduced if keepdim else squeeze(g, reduced, dim)

    return apply


def zeros(g: GraphBuilder, *shape: Any, **kwargs: Any) -> Zeros:
    """Returns zeros, for the state of an LSTM."""
    return Zeros(tuple(shape[0]) if isinstance(shape[0], Sequence) else shape)


def _axis_of(dim: int | None) -> int:
    """Returns the axis; raises Unwritable where there is none."""
    if not isinstance(dim, int):
        raise Unwritable("it needs one axis, dim")
    return dim


def reshape(g: GraphBuilder, x: Value, *shape: Any) -> Value:
    """Returns the same numbers in another shape, which may hold -1."""
    sizes = list(shape[0]) if isinstance(shape[0], Sequence) and len(shape) == 1 else list(shape)
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


def flatten(g: GraphBuilder, x: Value, start_dim: int = 0, end_dim: int = -1) -> Value:
    """Joins axes."""
    first, last = start_dim % len(x.shape), end_dim % len(x.shape)
    return reshape(g, x, [*x.shape[:first], -1, *x.shape[last + 1 :]])


def squeeze(g: GraphBuilder, x: Value, dim: int | None = None) -> Value:
    """Removes an axis of length 1, or all of them."""
    places = range(len(x.shape)) if dim is None else [_axis_of(dim) % len(x.shape)]
    return reshape(g, x, [s for k, s in enumerate(x.shape) if k not in places or s != 1])


def unsqueeze(g: GraphBuilder, x: Value, dim: int) -> Value:
    """Adds an axis of length 1."""
    place = dim % (len(x.shape) + 1)
    return reshape(g, x, [*x.shape[:place], 1, *x.shape[place:]])


def transpose(g: GraphBuilder, x: Value, dim0: int, dim1: int) -> Value:
    """Exchanges two axes."""
    axes = list(range(len(x.shape)))
    axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
    return g.transpose(x, axes)


def permute(g: GraphBuilder, x: Value, *dims: Any) -> Value:
    """Orders the axes."""
    axes = dims[0] if isinstance(dims[0], Sequence) else dims
    return g.transpose(x, [axis % len(x.shape) for axis in axes])


def cat(g: GraphBuilder, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Joins values along an axis of known length."""
    if any(isinstance(value.shape[dim], str) for value in tensors):
        raise Unwritable(f"joined along axis {dim}, whose length is not known")
    return g.concat(list(tensors), dim)


def stack(g: GraphBuilder, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Joins values along a new axis."""
    return cat(g, [unsqueeze(g, value, dim) for value in tensors], dim)


def chunk(g: GraphBuilder, x: Value, chunks: int, dim: int = 0) -> list[Value]:
    """Returns as many parts along an axis."""
    return split(g, x, -(-_known(x, dim) // chunks), dim)


def split(g: GraphBuilder, x: Value, split_size: int, dim: int = 0) -> list[Value]:
    """Returns parts of a size along an axis."""
    size = _known(x, dim)
    ends = range(0, size, split_size)
    return [g.slice(x, dim, first, min(first + split_size, size)) for first in ends]


def _known(x: Value, dim: int) -> int:
    size = x.shape[dim]
    if isinstance(size, str):
        raise Unwritable(f"axis {dim} is cut, whose length is not known")
    return size


def getitem(g: GraphBuilder, x: Value, index: Any) -> Value:
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
            raise Unwritable(f"an index {place!r}")
        x = _cut(g, x, axis, place)
        if isinstance(place, slice):
            shape.append(x.shape[axis])
        axis += 1
    return reshape(g, x, [*shape, *x.shape[axis:]])


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
        raise Unwritable(f"{place} of axis {axis}, whose length is not known; its ends can be")
    if isinstance(place, int):
        if not -size <= place < size:
            raise Unwritable(f"{place} of axis {axis}, which has {size} places")
        place = slice(place % size, place % size + 1)
    first, last, step = place.indices(size)
    if step != 1 or first >= last:
        raise Unwritable(f"{place} of axis {axis}")
    return g.slice(x, axis, first, last)


def size(g: GraphBuilder, x: Value, dim: int | None = None) -> Any:
    """Returns the shape, or the length of an axis, which may be a name."""
    return x.shape if dim is None else x.shape[dim]


_CALLS: dict[str, Callable[..., Any]] = {
    **{name: _binary(name) for name in ("add", "sub", "mul", "div", "maximum", "minimum")},
    **{name: _unary(name) for name in ("relu", "sigmoid", "tanh", "exp", "log", "sqrt")},
    **dict.fromkeys(["contiguous", "detach", "clone", "dropout"], lambda g, x, *a, **k: x),
    **{name: _reduced(name) for name in ("sum", "mean")}, "amax": _reduced("max"),
    "to": _to, "float": lambda g, x: g.cast(x, "float32"),
    "neg": lambda g, x: g.binary("mul", x, -1.0),
    "zeros": zeros, "new_zeros": lambda g, x, *shape, **kwargs: zeros(g, *shape),
    "zeros_like": lambda g, x, **kwargs: Zeros(x.shape),
    "softmax": lambda g, x, dim=None, **kwargs: g.softmax(x, _axis_of(dim)),
    "log_softmax": lambda g, x, dim=None, **kwargs: g.log_softmax(x, _axis_of(dim)),
    **{
        function.__name__: function
        for function in (
            reshape, flatten, squeeze, unsqueeze, transpose, permute, cat,
            stack, chunk, split, getitem, size,
        )
    },
}  # fmt: skip
_SYNONYMS = {
    "truediv": "div", "view": "reshape", "swapaxes": "transpose", "concat": "cat", "iadd": "add",
    "imul": "mul", "isub": "sub", "subtract": "sub", "multiply": "mul", "divide": "div",
    "concatenate": "cat",
}  # fmt: skip


# layers -----------------------------------------------------------------------------------------


def call_layer(
    g: GraphBuilder, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Returns what a layer gives in evaluation."""
    function = next((f for kind, f in _LAYERS.items() if isinstance(layer, kind)), None)
    if function is None:
        raise Unwritable("no operation for it")
    if any(isinstance(value, Zeros) for value in args):
        raise Unwritable("zeros can only be the state of an LSTM")
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
            raise Unwritable(f"an LSTM with {problem} cannot be written")
    D = 2 if layer.bidirectional else 1
    options = layer.options.in_evaluation() if isinstance(layer, LSTM) else TORCHS_CELL
    stack = LSTMStack(prefix, layer.hidden_size, layer.num_layers, D, layer.bias, options)
    state = None
    if hx is not None and not all(isinstance(part, Zeros) for part in hx):
        if any(isinstance(part, Zeros) for part in hx):
            raise Unwritable("a state of which a part is zeros cannot be written")
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
        raise Unwritable("it reads whole numbers and has no max_norm")
    return g.gather(f"{prefix}weight", x)


def _layer_norm(g: GraphBuilder, prefix: str, layer: nn.LayerNorm, x: Value) -> Value:
    if len(layer.normalized_shape) != 1:
        raise Unwritable("it normalises more than one axis")
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
    nn.Flatten: lambda g, prefix, layer, x: flatten(g, x, layer.start_dim, layer.end_dim),
    nn.ReLU: lambda g, prefix, layer, x: g.unary("relu", x),
    nn.Sigmoid: lambda g, prefix, layer, x: g.unary("sigmoid", x),
    nn.Tanh: lambda g, prefix, layer, x: g.unary("tanh", x),
}  # fmt: skip
