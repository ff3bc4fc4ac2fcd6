"""Every process keeps a copy of what another one alone has."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fastlstm.distributed.reduction import LostPeer

_LENGTH, _CONTENT = 1 << 20, (1 << 20) + 1
"""Tags of messages, beside those of sums."""


class NeighbourCopy:
    """Sends bytes to another rank of a ring while the sums of a step travel.

    Args:
        data: to send; any number of bytes, at least one.
        distance: to the rank that receives them, the same in all processes.

    Attributes:
        source: the rank whose bytes are received.
    """

    def __init__(self, data: bytes, distance: int) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self.source, self._target = (rank - distance) % size, (rank + distance) % size
        self._sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        length = torch.tensor([len(data)])
        self._length = torch.zeros_like(length)
        self._waits_for_length = self._begun(dist.irecv, self._length, self.source, _LENGTH)
        self._waits = [
            self._begun(dist.isend, tensor, self._target, tag)
            for tensor, tag in ((length, _LENGTH), (self._sent, _CONTENT))
        ]
        self._kept = length  # until it is sent

    def received(self) -> bytes:
        """Waits for what the other rank has sent."""
        self._wait(self._waits_for_length, self.source)
        data = torch.empty(int(self._length), dtype=torch.uint8)
        self._wait(self._begun(dist.irecv, data, self.source, _CONTENT), self.source)
        for work in self._waits:
            self._wait(work, self._target)
        return data.numpy().tobytes()

    def _begun(self, begin: object, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        assert callable(begin)
        try:
            work: dist.Work = begin(tensor, peer, tag=tag)
        except RuntimeError as error:
            raise LostPeer(peer, error) from error
        return work

    def _wait(self, work: dist.Work, peer: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise LostPeer(peer, error) from error
