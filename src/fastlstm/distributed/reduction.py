"""Sums over processes as a binary tree: the same bits at every number of processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

PIECE_BYTES = 4 << 20
"""Of the vector: one travels while another is added. Of 1 MiB they take 1.4 times as long as of 4:
each costs Python and a wake-up (benchmarks/log)."""
_ABOUT = -1
"""In place of the number of a piece."""
_DEADLINE = timedelta(seconds=60)


@dataclass
class _Piece:
    """A part of the vector on its way.

    Attributes:
        number: of the piece.
        kept: what this process adds of it, or has the sum of.
        given: what it gave away, by level.
        works: messages that are under way.
    """

    number: int
    kept: slice
    given: list[slice] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)


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
        self._pieces = [slice(a, min(a + each, len(flat))) for a in range(0, len(flat), each)]

    def __call__(self, about: Tensor, deadline: timedelta = _DEADLINE) -> None:
        """Adds `flat` over all processes, in place.

        Each piece goes to its next level as soon as it is added: the link is never idle.

        Args:
            about: a few numbers, 1-d float64, that are added too, whole at every level.
            deadline: for each message.
        """
        self._deadline = deadline
        levels = range(self.size.bit_length() - 1)
        pieces = [_Piece(number, place) for number, place in enumerate(self._pieces)]
        heard, whole = torch.empty_like(about), list[dist.Work]()
        for level in levels:
            for piece in pieces:
                if level > 0:
                    self._add(piece, level - 1)
                self._begin_halving(piece, level)
            if level > 0:
                self._wait(whole, level - 1)
                about += heard
            whole = self._exchange(_ABOUT, level, about, heard)
        for level in reversed(levels):
            for piece in pieces:
                if level == levels[-1]:
                    self._add(piece, level)
                    self._round(piece)
                else:
                    self._take(piece, level + 1)
                self._begin_doubling(piece, level)
        for piece in pieces:
            self._take(piece, 0)
        self._wait(whole, levels[-1])
        about += heard

    def _begin_halving(self, piece: _Piece, level: int) -> None:
        """Begins to exchange the halves of a piece: one is kept, the other sent."""
        middle = (piece.kept.start + piece.kept.stop) // 2
        kept, sent = slice(piece.kept.start, middle), slice(middle, piece.kept.stop)
        if self.rank >> level & 1:
            kept, sent = sent, kept
        piece.kept = kept
        piece.given.append(sent)
        piece.works = self._exchange(piece.number, level, self._out(sent), self._received[kept])

    def _add(self, piece: _Piece, level: int) -> None:
        self._wait(piece.works, level)
        self._flat[piece.kept] += self._received[piece.kept]

    def _round(self, piece: _Piece) -> None:
        """All processes get the numbers that travel."""
        if self._sent is not None:
            self._flat[piece.kept] = self._flat[piece.kept].to(self._wire)

    def _begin_doubling(self, piece: _Piece, level: int) -> None:
        """Begins to send the sums that this process has, and to receive those of the half that it
        gave away at this level."""
        into = self._flat if self._sent is None else self._received
        missing = into[piece.given[level]]
        piece.works = self._exchange(piece.number, level, self._out(piece.kept), missing)

    def _take(self, piece: _Piece, level: int) -> None:
        self._wait(piece.works, level)
        missing, kept = piece.given[level], piece.kept
        if self._sent is not None:
            self._flat[missing] = self._received[missing]
        piece.kept = slice(min(kept.start, missing.start), max(kept.stop, missing.stop))

    def _out(self, place: slice) -> Tensor:
        """Returns a part of the vector as it travels."""
        if self._sent is None:
            return self._flat[place]
        return self._sent[place].copy_(self._flat[place])

    def _exchange(self, number: int, level: int, sent: Tensor, received: Tensor) -> list[dist.Work]:
        peer, tag = self.rank ^ (1 << level), (number + 1) * 64 + level
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
