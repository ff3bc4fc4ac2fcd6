"""Objects between the processes of a run, signed: nothing that a stranger sent is unpickled."""

from __future__ import annotations

import hmac
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_SIGNATURE = 32
"""Bytes of HMAC-SHA256, before the pickled object."""


class Messages:
    """Sends objects as bytes over gloo.

    Args:
        key: known to the processes of this start only.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def broadcast(self, value: Any, is_sender: bool) -> Any:
        """Returns what rank 0 gives; in the others the argument is not looked at."""
        own = self._packed(value) if is_sender else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([len(own)])
        dist.broadcast(length, 0)
        data = own if is_sender else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0)
        return value if is_sender else self._opened(data)

    def gathered(
        self, value: Any, in_all: bool, group: dist.ProcessGroup | None = None
    ) -> list[Any]:
        """Returns the value of every rank, in all ranks or in rank 0; else an empty list."""
        own = self._packed(value)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(lengths, torch.tensor([len(own)]), group)
        padded = own.new_zeros(int(max(lengths)))
        padded[: len(own)] = own
        parts = (
            [torch.empty_like(padded) for _ in lengths] if in_all or dist.get_rank() == 0 else []
        )
        if in_all:
            dist.all_gather(parts, padded, group)
        else:
            dist.gather(padded, parts or None, 0, group)
        return [self._opened(part[: int(size)]) for part, size in zip(parts, lengths)]  # noqa: B905

    def _packed(self, value: Any) -> Tensor:
        data = pickle.dumps(value)
        return torch.frombuffer(bytearray(self._signature(data) + data), dtype=torch.uint8)

    def _opened(self, part: Tensor) -> Any:
        data = part.numpy().tobytes()
        if not hmac.compare_digest(data[:_SIGNATURE], self._signature(data[_SIGNATURE:])):
            raise RuntimeError("a message without the signature of this run came")
        return pickle.loads(data[_SIGNATURE:])

    def _signature(self, data: bytes) -> bytes:
        return hmac.digest(self._key, data, "sha256")
