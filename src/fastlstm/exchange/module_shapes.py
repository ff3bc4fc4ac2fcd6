"""Calls of torch that give the same numbers another shape or order, as operations of a `Graph`.

Each function takes the arguments of torch's of the same name, values of the graph for tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastlstm.exchange.graph import Size, Value

if TYPE_CHECKING:
    from fastlstm.exchange.graph import GraphBuilder


class Unwritable(Exception):
    """Something that a graph cannot hold; the text says what."""


def axis_of(dim: int | None) -> int:
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
    places = range(len(x.shape)) if dim is None else [axis_of(dim) % len(x.shape)]
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
