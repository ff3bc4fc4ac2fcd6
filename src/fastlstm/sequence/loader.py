"""Batches of sequences with their answers, in an order that a seed and a position decide."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.sequence.data import SequenceBatch, Sequences
from fastlstm.system.prefetch import read_position


class LabelledBatch(NamedTuple):
    """Sequences with their answers.

    Attributes:
        inputs: B sequences as the network takes them.
        wanted: shape ``(B, K)`` float32, or class numbers ``(B,)`` int64.
    """

    inputs: SequenceBatch
    wanted: Tensor


@dataclass(frozen=True)
class LabelledSequences:
    """Sequences with their answers.

    Attributes:
        sequences: N of them.
        wanted: their answers, shape ``(N, K)`` float32, or class numbers ``(N,)`` int64.
        mean: of each column, float64.
        std: its deviation.
    """

    sequences: Sequences
    wanted: Tensor
    mean: Tensor
    std: Tensor

    def batch(self, numbers: NDArray[np.int64]) -> LabelledBatch:
        """Returns the sequences of such numbers."""
        return LabelledBatch(
            self.sequences.batch(numbers, self.mean, self.std), self.wanted[numbers]
        )

    @property
    def key(self) -> str:
        """SHA-256 of the sequences and their answers."""
        digest = hashlib.sha256()
        for part in (self.sequences.values, self.sequences.lengths, self.wanted.numpy()):
            digest.update(f"{part.dtype} {part.shape}".encode())
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()


class SequenceLoader:
    """Hands out training batches; every epoch has an order of its own.

    Args:
        data: all sequences.
        numbers: those to train on.
        batch_size: rows of a batch; the last one of an epoch may have fewer.
        seed: of the order.

    Attributes:
        wait_s: seconds spent making batches.
        steps_per_epoch: batches of an epoch.
    """

    def __init__(
        self, data: LabelledSequences, numbers: NDArray[np.int64], batch_size: int, seed: int
    ) -> None:
        self.wait_s = 0.0
        self.steps_per_epoch = -(-len(numbers) // batch_size)
        self._data, self._numbers, self._batch_size, self._seed = data, numbers, batch_size, seed
        self._go_to(0, 0)

    def _go_to(self, epoch: int, index: int) -> None:
        self._epoch, self._index = epoch, index
        self._order = np.random.default_rng((self._seed, epoch)).permutation(self._numbers)

    def next(self) -> LabelledBatch:
        """Returns the next batch."""
        started = time.perf_counter()
        first = self._index * self._batch_size
        batch = self._data.batch(self._order[first : first + self._batch_size])
        self._index += 1
        if self._index == self.steps_per_epoch:
            self._go_to(self._epoch + 1, 0)
        self.wait_s += time.perf_counter() - started
        return batch

    def state_dict(self) -> dict[str, int]:
        """Returns the position of the next batch."""
        return {"epoch": self._epoch, "index": self._index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes to a position of `state_dict`.

        Raises:
            CorruptFileError: no such position.
        """
        self._go_to(*read_position(state, self.steps_per_epoch, "data"))

    def close(self) -> None:
        """Nothing is held open."""
