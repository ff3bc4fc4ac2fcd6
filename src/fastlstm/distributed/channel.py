"""Tensors that pass from one process to its neighbour, in order: the boundaries of a pipeline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from fastlstm.distributed.world import World


class Channel:
    """Passes tensors from every rank to a neighbour; the first rank of the way only sends.

    A tensor may be received before it is asked for: all of a step are expected at its start, so
    that they travel while something is computed.

    Args:
        world: the processes.
        step: 1 passes to the next rank, -1 to the one before.

    Attributes:
        wait_s: seconds that this process has waited in all.
        sent_bytes: that it has sent in all.
    """

    def __init__(self, world: World, step: int) -> None:
        self._world = world
        source, target = world.rank - step, world.rank + step
        self._source = source if 0 <= source < world.size else None
        self._target = target if 0 <= target < world.size else None
        self._buffers, self._receiving = list[Tensor](), list[dist.Work | None]()
        self._sending = list[tuple[dist.Work | None, Tensor]]()
        self.wait_s, self.sent_bytes = 0.0, 0

    def expect(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> None:
        """Begins to receive tensors of these shapes, into the memory of those before."""
        source = self._source
        if source is None:
            return
        if [tuple(b.shape) for b in self._buffers] != [tuple(shape) for shape in shapes]:
            self._buffers = [torch.empty(tuple(shape), dtype=dtype) for shape in shapes]
        with self._world.naming(source):
            self._receiving = [
                dist.irecv(buffer, source, tag=k) for k, buffer in enumerate(self._buffers)
            ]

    def received(self, k: int) -> Tensor | None:
        """Waits for the tensor of number k; None where nothing comes."""
        if self._source is None:
            return None
        self._wait(self._receiving[k], self._source)
        return self._buffers[k].detach()

    def send(self, k: int, tensor: Tensor) -> None:
        """Begins to send the tensor of number k; nothing where nobody receives."""
        if self._target is None:
            return
        tensor = tensor.detach().contiguous()
        with self._world.naming(self._target):
            self._sending.append((dist.isend(tensor, self._target, tag=k), tensor))
        self.sent_bytes += tensor.numel() * tensor.element_size()

    def flush(self) -> None:
        """Waits until all is sent."""
        for work, _ in self._sending:
            assert self._target is not None
            self._wait(work, self._target)
        self._sending.clear()

    def _wait(self, work: dist.Work | None, peer: int) -> None:
        began = time.perf_counter()
        if work is not None:
            with self._world.naming(peer):
                work.wait()
        self.wait_s += time.perf_counter() - began
