"""Gradients of weights, formed on a stream of their own beside the rest of a backward pass.

A backward pass goes from layer to layer, and no layer waits for the gradients of another's weights:
matrix products, for which a recurrent kernel leaves a part of the GPU free.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_OF_THREAD = threading.local()


class WeightGradients:
    """A block of forward and backward passes; a weight has its gradient after `add`, not before.

    Args:
        device: of the weights; on a CPU the block changes nothing.

    Attributes:
        is_open: whether the block has begun and not ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.is_open = device, False
        self._formed = list[tuple[Tensor, Tensor]]()
        self._read = list[object]()

    def __enter__(self) -> WeightGradients:
        self.is_open = self._device.type == "cuda"
        _OF_THREAD.active = self if self.is_open else None
        return self

    def __exit__(self, *exc: object) -> None:
        _OF_THREAD.active, self.is_open = None, False

    def form(
        self,
        weights: Sequence[Tensor],
        work: Callable[[], Sequence[Tensor | None]],
        read: Sequence[Tensor | None],
    ) -> None:
        """Starts `work`, which returns the gradient of each weight.

        Args:
            weights: leaves.
            work: started on the other stream.
            read: what it reads, which stays in memory until `add`.
        """
        stream = _stream(self._device.index)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            gradients = work()
        self._formed += [(w, g) for w, g in zip(weights, gradients, strict=True) if g is not None]
        self._read.append(read)

    @torch.no_grad()
    def add(self) -> None:
        """Adds what was formed to the gradients of the weights; the current stream waits for it."""
        if self._formed:
            torch.cuda.current_stream(self._device).wait_stream(_stream(self._device.index))
        for weight, gradient in self._formed:
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        self._formed.clear()
        self._read.clear()


def active_for(weights: Sequence[Tensor]) -> WeightGradients | None:
    """Returns the block that this thread is in, where it can form the gradients of `weights`: of
    leaves, as others have their gradients passed on at once."""
    found: WeightGradients | None = getattr(_OF_THREAD, "active", None)
    return found if all(w.is_leaf and w.requires_grad for w in weights) else None


@lru_cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
