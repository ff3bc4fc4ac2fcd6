"""Calls of torch between the layers of a module, as operations of a `Graph`.

Each function takes the arguments of torch's of the same name, values of the graph for tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from fastlstm.exchange.graph import Size, Value
from fastlstm.exchange.module_shapes import (
    Unwritable,
    axis_of,
    cat,
    chunk,
    flatten,
    getitem,
    permute,
    reshape,
    size,
    split,
    squeeze,
    stack,
    transpose,
    unsqueeze,
)

if TYPE_CHECKING:
    from fastlstm.exchange.graph import GraphBuilder


class Zeros(NamedTuple):
    """A tensor of zeros, which states of an LSTM may begin with."""

    shape: tuple[Size, ...]


def call(g: GraphBuilder, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what a function of torch, or a method by its name, gives.

    Raises:
        Unwritable: another function, or arguments that the graph cannot hold.
    """
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
        return _attribute(*args)
    if name == "getitem" and not isinstance(args[0], Value):  # of a pair, or of a shape
        return args[0][args[1]]
    try:
        return function(g, *args, **kwargs)
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise Unwritable(f"not with these arguments ({error})") from error


def _attribute(x: Any, name: str) -> Any:
    if isinstance(x, Value) and name in ("shape", "device", "dtype"):
        return x.shape if name == "shape" else None
    raise Unwritable(f"no attribute {name}")


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


def _same(g: GraphBuilder, x: Value, *args: Any, **kwargs: Any) -> Value:
    return x


def _to(g: GraphBuilder, x: Value, *args: Any, **kwargs: Any) -> Value:
    dtype = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.dtype)), None)
    if dtype is None:
        return x
    if dtype == torch.bool:
        raise Unwritable("no operation for it")
    return g.cast(x, "float32" if dtype.is_floating_point else "int32")


def softmax(g: GraphBuilder, x: Value, dim: int | None = None, **kwargs: Any) -> Value:
    """Returns shares along an axis."""
    shares = g.unary("exp", _below_largest(g, x, dim))
    return g.binary("div", shares, g.reduce("sum", shares, axis_of(dim)))


def log_softmax(g: GraphBuilder, x: Value, dim: int | None = None, **kwargs: Any) -> Value:
    """Returns the logarithm of shares along an axis."""
    below = _below_largest(g, x, dim)
    total = g.reduce("sum", g.unary("exp", below), axis_of(dim))
    return g.binary("sub", below, g.unary("log", total))


def _below_largest(g: GraphBuilder, x: Value, dim: int | None) -> Value:
    return g.binary("sub", x, g.reduce("max", x, axis_of(dim)))


def _reduced(kind: Any) -> Callable[..., Value]:
    def apply(g: GraphBuilder, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
        dim = dim[0] if isinstance(dim, Sequence) and len(dim) == 1 else dim
        reduced = g.reduce(kind, x, axis_of(dim))
        return reduced if keepdim else squeeze(g, reduced, dim)

    return apply


def zeros(g: GraphBuilder, *shape: Any, **kwargs: Any) -> Zeros:
    """Returns zeros, for the state of an LSTM."""
    return Zeros(tuple(shape[0]) if isinstance(shape[0], Sequence) else shape)


def _new_zeros(g: GraphBuilder, x: Value, *shape: Any, **kwargs: Any) -> Zeros:
    return zeros(g, *shape)


def _zeros_like(g: GraphBuilder, x: Value, **kwargs: Any) -> Zeros:
    return Zeros(x.shape)


_CALLS: dict[str, Callable[..., Any]] = {
    **{name: _binary(name) for name in ("add", "sub", "mul", "div", "maximum", "minimum")},
    **{name: _unary(name) for name in ("relu", "sigmoid", "tanh", "exp", "log", "sqrt")},
    **{name: _same for name in ("contiguous", "detach", "clone", "dropout")},
    **{name: _reduced(name) for name in ("sum", "mean")}, "amax": _reduced("max"),
    "to": _to, "float": lambda g, x: g.cast(x, "float32"),
    "neg": lambda g, x: g.binary("mul", x, -1.0),
    "zeros": zeros, "new_zeros": _new_zeros, "zeros_like": _zeros_like,
    **{
        function.__name__: function
        for function in (
            softmax, log_softmax, reshape, flatten, squeeze, unsqueeze, transpose, permute, cat,
            stack, chunk, split, getitem, size,
        )
    },
}  # fmt: skip
_SYNONYMS = {
    "truediv": "div", "view": "reshape", "swapaxes": "transpose", "concat": "cat", "iadd": "add",
    "imul": "mul", "isub": "sub", "subtract": "sub", "multiply": "mul", "divide": "div",
    "concatenate": "cat",
}  # fmt: skip
