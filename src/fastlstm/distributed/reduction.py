"""Sums over processes as a binary tree: the same bits at every number of processes."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

PIECE_BYTES = 4 << 20
"""Of a message: the next one travels while this one is added. Of 1 MiB they take 1.4 times as long:
each costs Python and a wake-up (docs/log.md)."""


_DEADLINE = timedelta(seconds=60)


class LostPeer(RuntimeError):
    """The transport failed while this process and `peer`, a rank, exchanged something."""

    def __init__(self, peer: int, error: RuntimeError) -> None:
        super().__init__(str(error))
        self.peer = peer


class TreeReduction:
    """Adds a vector over W processes, W a power of two, by recursive halving and doubling.

    At level k a process exchanges with the one whose rank differs in bit k: each sends the half
    that the other keeps, and adds what it receives. So every element is added in one order,
    ``(r0 + r1) + (r2 + r3)``, by the process that keeps it; then the sums travel back. A process
    sends and receives 2 (W - 1) / W of the vector.

    Args:
        flat: the vector, 1-d float32; its memory is used in every call.
        wire: `bfloat16` halves the bytes: partial sums are rounded as they are sent, and the sum is
            the same on all processes but no longer independent of their number.
    """

    def __init__(
        self,
        flat: Tensor,
        wire: torch.dtype = torch.float32,
    ) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if self.size & (self.size - 1):
            raise ValueError(f"{self.size} processes, expected a power of two")
        self._wire = wire
        self._flat, self._received = flat, torch.empty_like(flat, dtype=wire)
        self._sent = None if wire == flat.dtype else torch.empty_like(flat, dtype=wire)
        each = PIECE_BYTES // flat.element_size()
        self._pieces = [(a, min(a + each, len(flat))) for a in range(0, len(flat), each)]

    def __call__(self, about: Tensor, deadline: timedelta = _DEADLINE) -> None:
        """Adds `flat` over all processes, in place.

        Args:
            about: a few numbers, 1-d float64, that are added too, whole at every level.
            deadline: for each message.
        """
        self._deadline = deadline
        own = list(self._pieces)  # of each piece, the part that is kept
        levels = range(self.size.bit_length() - 1)
        heard = torch.empty_like(about)
        for level in levels:
            works = [self._halves(number, own, level) for number in range(len(own))]
            whole = self._exchange(len(own), level, about, heard)
            for number, work in enumerate(works):
                self._wait(work, level)
                begin, end = own[number]
                self._flat[begin:end] += self._received[begin:end]
            self._wait(whole, level)
            about += heard
        if self._sent is not None:  # all processes get the numbers that travel
            for begin, end in own:
                self._flat[begin:end] = self._flat[begin:end].to(self._wire)
        for level in reversed(levels):
            doubled = [self._doubled(number, own, level) for number in range(len(own))]
            for number, (work, kept, other) in enumerate(doubled):
                self._wait(work, level)
                if self._sent is not None:
                    self._flat[other[0] : other[1]] = self._received[other[0] : other[1]]
                own[number] = (min(kept[0], other[0]), max(kept[1], other[1]))

    def _halves(self, number: int, own: list[tuple[int, int]], level: int) -> list[dist.Work]:
        """Begins to exchange the halves of a piece; `own` gets the half that is kept."""
        begin, end = own[number]
        middle = (begin + end) // 2
        kept, sent = (begin, middle), (middle, end)
        if self.rank >> level & 1:
            kept, sent = sent, kept
        own[number] = kept
        message = self._flat[sent[0] : sent[1]]
        if self._sent is not None:
            message = self._sent[sent[0] : sent[1]].copy_(message)
        return self._exchange(number, level, message, self._received[kept[0] : kept[1]])

    def _doubled(
        self, number: int, own: list[tuple[int, int]], level: int
    ) -> tuple[list[dist.Work], tuple[int, int], tuple[int, int]]:
        """Begins to exchange the sums of a piece; returns what is sent and what is received."""
        begin, end = self._pieces[number]
        for lower in range(level):
            middle = (begin + end) // 2
            begin, end = (middle, end) if self.rank >> lower & 1 else (begin, middle)
        middle = (begin + end) // 2
        other = (begin, middle) if self.rank >> level & 1 else (middle, end)
        kept = own[number]
        message, into = self._flat[kept[0] : kept[1]], self._flat[other[0] : other[1]]
        if self._sent is not None:
            message = self._sent[kept[0] : kept[1]].copy_(message)
            into = self._received[other[0] : other[1]]
        return self._exchange(number, level, message, into), kept, other

    def _exchange(self, number: int, level: int, sent: Tensor, received: Tensor) -> list[dist.Work]:
        peer, tag = self.rank ^ (1 << level), number * 64 + level
        works = list[dist.Work | None]()
        try:
            if sent.is_cuda:  # NCCL would wait for the one before it began the other
                both = ((dist.isend, sent), (dist.irecv, received))
                messages = [
                    dist.P2POp(begin, tensor, tag=tag, peer=peer)
                    for begin, tensor in both
                    if tensor.numel()
                ]
                return list(dist.batch_isend_irecv(messages)) if messages else []
            if received.numel():
                works.append(dist.irecv(received, tag=tag, src=peer))
            if sent.numel():
                works.append(dist.isend(sent, tag=tag, dst=peer))
            return [work for work in works if work is not None]
        except RuntimeError as error:
            raise LostPeer(peer, error) from error

    def _wait(self, works: list[dist.Work], level: int) -> None:
        try:
            for work in works:
                work.wait(self._deadline)
        except RuntimeError as error:
            raise LostPeer(self.rank ^ (1 << level), error) from error
