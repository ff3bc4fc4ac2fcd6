"""Batches of sequences with their answers, in an order that a seed and a position decide."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.distributed.share import Share
from fastlstm.sequence.answers import Answers
from fastlstm.sequence.data import SequenceBatch, Sequences
from fastlstm.system.prefetch import LoaderPosition


class LabelledBatch(NamedTuple):
    """Sequences with their answers.

    Attributes:
        inputs: B sequences as the network takes them.
        targets: their answers, shape ``(B, K)`` float32, or class numbers ``(B,)`` int64.
        total: sequences of the batch in all processes.
    """

    inputs: SequenceBatch
    targets: Tensor
    total: int


@dataclass(frozen=True)
class SequenceData:
    """Sequences with their answers, and how they are divided.

    Attributes:
        sequences: N of them.
        targets: their answers, shape ``(N, K)`` float32, or class numbers ``(N,)`` int64.
        mean: of each column, float64.
        std: its deviation.
        train: numbers of the training sequences.
        held_out: numbers of the validation sequences.
        answers: their kind.
    """

    sequences: Sequences
    targets: Tensor
    mean: Tensor
    std: Tensor
    train: NDArray[np.int64]
    held_out: NDArray[np.int64]
    answers: Answers

    @property
    def key(self) -> str:
        """SHA-256 of the sequences and their answers."""
        digest = hashlib.sha256(repr(self.answers.values).encode())
        sequences = self.sequences
        for part in (sequences.values, sequences.lengths, self.targets.numpy()):
            digest.update(f"{part.dtype} {part.shape}".encode())
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    def batch(self, numbers: NDArray[np.int64]) -> LabelledBatch:
        """Returns the sequences of such numbers."""
        inputs = self.sequences.batch(numbers, self.mean, self.std)
        return LabelledBatch(inputs, self.targets[numbers], len(numbers))


class SequenceLoader(LoaderPosition):
    """Hands out training batches; every epoch has an order of its own.

    Args:
        data: the sequences.
        batch_size: rows of a batch; the last one of an epoch may have fewer.
        seed: of the order.
        share: the part of every batch to hand out; default is all of it.

    Attributes:
        wait_s: seconds spent making batches.
        steps_per_epoch: batches of an epoch.
        share: as given, or all.
    """

    _source = "data"

    def __init__(
        self, data: SequenceData, batch_size: int, seed: int, share: Share | None = None
    ) -> None:
        self.share = Share() if share is None else share
        self.wait_s = 0.0
        self.steps_per_epoch = -(-len(data.train) // batch_size)
        self._data, self._batch_size, self._seed = data, batch_size, seed
        self._order, self._order_epoch = data.train, -1

    def next(self) -> LabelledBatch:
        """Returns the next batch."""
        started = time.perf_counter()
        if self._order_epoch != self._epoch:
            order = np.random.default_rng((self._seed, self._epoch)).permutation(self._data.train)
            self._order, self._order_epoch = order, self._epoch
        first = self._index * self._batch_size
        numbers = self._order[first : first + self._batch_size]
        own = self._data.batch(numbers[self.share.rows(len(numbers))])
        batch = own._replace(total=len(numbers))
        self._advance()
        self.wait_s += time.perf_counter() - started
        return batch

    def close(self) -> None:
        """Nothing is held open."""
