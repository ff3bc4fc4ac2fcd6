"""Shards of a batch that run as one, with the gradients and random numbers of each kept apart.

A layer reads its weights once per step for all rows of a batch. What must not be mixed is kept by
shard: every shard has parameters of its own, which share the memory of the model's, and a generator
of its own. A row has the same bits in any batch (docs/kernels.md), so the gradients of a shard are
those that it has when it runs alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class _Thread(threading.local):
    shards: JoinedShards | None = None


_THREAD = _Thread()


class JoinedShards:
    """The shards of a batch whose rows are its lanes, axis 1 of `(T, B, …)`.

    Args:
        lanes: of each shard, consecutive and not empty; together all of the batch. As many as a
            power of two.
        seeds: of the random numbers of each shard.

    Attributes:
        lanes: of each shard, counted from the first of them.
        bounds: first lane of each shard, then B.
        sizes: lanes of each shard.
        generators: of the random numbers of each shard.
    """

    def __init__(self, lanes: Sequence[slice], seeds: Sequence[int]) -> None:
        first = lanes[0].start
        self.lanes = [slice(part.start - first, part.stop - first) for part in lanes]
        self.bounds = [0, *(part.stop for part in self.lanes)]
        self.sizes = [part.stop - part.start for part in lanes]
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._own = dict[Tensor, list[Tensor]]()
        self._whole = dict[Tensor, Tensor]()

    def own(self, parameter: Tensor) -> list[Tensor]:
        """Returns a parameter as each shard has it: a leaf with a gradient of its own."""
        if parameter not in self._own:
            self._own[parameter] = [_leaf(parameter) for _ in self.sizes]
        return self._own[parameter]

    def whole(self, parameter: Tensor) -> Tensor:
        """Returns a parameter for a kernel that adds the gradients of the shards itself."""
        assert parameter not in self._whole, "two calls would add in another order"
        self._whole[parameter] = leaf = _leaf(parameter)
        return leaf

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Returns the sum over all shards: neighbours are added, then neighbouring sums."""
        assert parameter.grad is None, "a gradient belongs to no shard"
        whole = self._whole.get(parameter)
        parts = [p.grad for p in self._own.get(parameter, ()) if p.grad is not None]
        if whole is not None and whole.grad is not None:
            assert not parts, "two kernels add the gradients of a parameter"
            return whole.grad
        while len(parts) > 1:
            parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0] if parts else None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Calls of this thread in here belong to the shards."""
        before, _THREAD.shards = _THREAD.shards, self
        try:
            yield
        finally:
            _THREAD.shards = before


def _leaf(parameter: Tensor) -> Tensor:
    """Returns the same values as a tensor with a gradient of its own."""
    assert parameter.is_leaf, "what is computed from parameters would not pass its gradient on"
    return parameter.detach().requires_grad_(parameter.requires_grad)


def active_shards() -> JoinedShards | None:
    """Returns the shards that calls belong to here; None: all gradients are added as they come."""
    return _THREAD.shards


def each_shard(
    function: Callable[..., Tensor], rows: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[Tensor]:
    """Returns `function(*rows, *parameters)` of each shard, or of all rows where there are none.

    Args:
        function: of tensors.
        rows: each `(T, B, …)`.
        parameters: of the model.
    """
    shards = active_shards()
    if shards is None:
        return [function(*rows, *parameters)]
    if len(shards.sizes) == 1:
        return [function(*rows, *(shards.own(p)[0] for p in parameters))]
    cut = zip(*(map(_contiguous, t.split(shards.sizes, 1)) for t in rows), strict=True)
    own = zip(*(shards.own(p) for p in parameters), strict=True)
    pairs = zip(cut, own, strict=True)
    return [_contiguous(function(*some, *others)) for some, others in pairs]


def _contiguous(x: Tensor) -> Tensor:
    """Lays rows, and their gradient, out as those of a shard that runs alone: for others torch may
    take another path, with other bits."""
    if not x.is_floating_point():
        return x.clone(memory_format=torch.contiguous_format)
    result: Tensor = _Contiguous.apply(x)  # type: ignore[no-untyped-call]
    return result


class _Contiguous(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].clone(memory_format=torch.contiguous_format)


def by_shard(function: Callable[..., Tensor], x: Tensor, *parameters: Tensor) -> Tensor:
    """Returns `function(x, *parameters)`, `(T, B, …)` like `x`, formed shard by shard."""
    results = each_shard(function, [x], parameters)
    return results[0] if len(results) == 1 else torch.cat(results, 1)


def drawn(
    draw: Callable[[tuple[int, ...], torch.Generator | None], Tensor],
    shape: tuple[int, ...],
    axis: int,
) -> Tensor:
    """Returns random numbers of a shape whose `axis` are the lanes.

    Args:
        draw: of a shape and a generator, None for torch's own. Each shard has its own.
        shape: of the result.
        axis: 0 or 1.
    """
    shards = active_shards()
    if shards is None:
        return draw(shape, None)
    pairs = zip(shards.sizes, shards.generators, strict=True)
    return torch.cat([draw((*shape[:axis], n, *shape[axis + 1 :]), g) for n, g in pairs], axis)
