"""Sequences and their answers as batches, in an order that seed and position determine."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fastlstm.distributed.world import Share
from fastlstm.errors import DataError, counted
from fastlstm.sequence.answers import Answers
from fastlstm.system.prefetch import LoaderPosition


class SequenceBatch(NamedTuple):
    """Sequences as the network reads them: values `(B, T, C)` float32, NaN if missing, and lengths
    `(B,)` int64, None if all have T steps."""

    values: Tensor
    lengths: Tensor | None

    def to(self, device: torch.device) -> SequenceBatch:
        lengths = None if self.lengths is None else self.lengths.to(device)
        return SequenceBatch(self.values.to(device), lengths)


@dataclass(frozen=True)
class Sequences:
    """Concatenated sequences: values `(sum of lengths, C)`, float32 or float64, NaN if missing, and
    lengths `(N,)` int64."""

    values: NDArray[np.floating]
    lengths: NDArray[np.int64]

    @staticmethod
    def of(X: Any) -> Sequences:
        """Reads an array of shape ``(N, T, C)``, or a list of arrays of shape ``(T_i, C)``. Raises
        DataError: another shape, no numbers, no steps, infinities; NaN is a missing value."""
        if isinstance(X, list | tuple):
            parts = [_numbers(part, 2, f"sequence {n}", "(T, C)") for n, part in enumerate(X)]
            if not parts:
                raise DataError("got no sequences, expected an array (N, T, C) or a list of (T, C)")
            for number, part in enumerate(parts):
                if part.shape[1] != parts[0].shape[1]:
                    raise DataError(
                        f"sequence {number} has {counted(part.shape[1], 'column')}, sequence 0 has"
                        f" {parts[0].shape[1]}; give the same columns for all"
                    )
            lengths = np.array([len(part) for part in parts], dtype=np.int64)
            values = np.concatenate(parts)
        else:
            whole = _numbers(X, 3, "X", "(N, T, C), or a list of (T, C)")
            lengths = np.full(len(whole), whole.shape[1], dtype=np.int64)
            values = whole.reshape(len(whole) * whole.shape[1], whole.shape[2])
        sequences = Sequences(values, lengths)
        if len(empty := np.flatnonzero(lengths == 0)):
            raise DataError(f"sequence {empty[0]} has no steps; leave it out")
        if values.shape[1] == 0:
            raise DataError("the sequences have no columns, expected 1 or more")
        if len(bad := np.argwhere(np.abs(values) > np.finfo(np.float32).max)):
            number, step = sequences._place(int(bad[0][0]))
            raise DataError(
                f"sequence {number}, step {step}, column {bad[0][1]} is infinite, or beyond"
                " float32; give a number, or NaN if it is missing"
            )
        return sequences

    @staticmethod
    def of_tokens(X: Any, num_tokens: int) -> Sequences:
        """Reads token ids as one column: an array of shape ``(N, T)``, or a list of ``(T_i,)``.

        Raises:
            DataError: another shape, or ids that are no whole numbers from 0 to `num_tokens - 1`.
        """
        if isinstance(X, list | tuple):
            parts = [_numbers(part, 1, f"sequence {n}", "(T,)") for n, part in enumerate(X)]
            sequences = Sequences.of([part[:, None] for part in parts])
        else:
            sequences = Sequences.of(_numbers(X, 2, "X", "(N, T), or a list of (T,)")[..., None])
        ids = sequences.values[:, 0]
        if len(bad := np.flatnonzero((ids != np.floor(ids)) | (ids < 0) | (ids >= num_tokens))):
            number, step = sequences._place(int(bad[0]))
            raise DataError(
                f"sequence {number}, step {step} is {ids[bad[0]]:g}, expected a token id from 0 to"
                f" {num_tokens - 1}"
            )
        return sequences

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_columns(self) -> int:
        return int(self.values.shape[1])

    @property
    def mean_length(self) -> float:
        return float(self.lengths.mean())

    @property
    def has_missing(self) -> bool:
        return bool(np.isnan(self.values).any())

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum(self.lengths)

    def _place(self, row: int) -> tuple[int, int]:
        number = int(np.searchsorted(self._ends, row, side="right"))
        return number, row - int(self._ends[number] - self.lengths[number])

    def require_like(self, num_columns: int, may_miss: bool) -> None:
        """Raises DataError for other columns than at `fit`, or missing values if `fit` had none."""
        if self.num_columns != num_columns:
            raise DataError(
                f"the sequences have {counted(self.num_columns, 'column')}, the model reads"
                f" {num_columns}"
            )
        if self.has_missing and not may_miss:
            raise DataError(
                "the sequences have missing values, and the model was trained without: fill them,"
                " or fit on sequences with missing values"
            )

    def scale(self, numbers: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Returns mean and deviation (1 for constants) of some sequences' columns, float64."""
        is_used = np.zeros(len(self), dtype=bool)
        is_used[numbers] = True
        values = torch.from_numpy(self.values[np.repeat(is_used, self.lengths)]).double()
        mean = values.nanmean(0).nan_to_num(0.0)
        std = ((values - mean) ** 2).nanmean(0).nan_to_num(0.0).sqrt()
        return mean, torch.where(std > 1e-12 * mean.abs(), std, 1.0)

    def batch(self, numbers: NDArray[np.int64], mean: Tensor, std: Tensor) -> SequenceBatch:
        """Returns some sequences, scaled, and padded at the end to the longest."""
        lengths = self.lengths[numbers]
        firsts = self._ends[numbers] - lengths
        spans = zip(firsts.tolist(), lengths.tolist(), strict=True)
        parts = [torch.from_numpy(self.values[first : first + n]) for first, n in spans]
        padded = pad_sequence(parts, batch_first=True)
        is_even = (lengths == lengths[0]).all()
        scaled = ((padded - mean) / std).float()
        return SequenceBatch(scaled, None if is_even else torch.from_numpy(lengths))


class LabelledBatch(NamedTuple):
    """Sequences with their answers, `(B, K)` float32, or class numbers `(B,)` int64; `total` counts
    the sequences of the batch in all processes."""

    inputs: SequenceBatch
    targets: Tensor
    total: int


@dataclass(frozen=True)
class SequenceData:
    """Sequences, and answers `(N, K)` float32 or class numbers `(N,)` int64 as targets.

    `train` and `held_out` are the numbers of training and validation sequences; mean and deviation
    of the columns are float64, weights of the classes in the loss `(K,)` float32, None if all 1.
    """

    sequences: Sequences
    targets: Tensor
    mean: Tensor
    std: Tensor
    train: NDArray[np.int64]
    held_out: NDArray[np.int64]
    answers: Answers
    class_weights: Tensor | None = None

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
        inputs = self.sequences.batch(numbers, self.mean, self.std)
        return LabelledBatch(inputs, self.targets[numbers], len(numbers))


class SequenceLoader(LoaderPosition):
    """Returns training batches; every epoch has a different order.

    The last batch of an epoch may have fewer rows than `batch_size`. `share` is the part of every
    batch that this process gets, `wait_s` are the seconds spent making batches.
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


def _numbers(values: Any, ndim: int, what: str, shape: str) -> NDArray[np.floating]:
    if hasattr(values, "toarray"):
        raise DataError(f"{what} is a sparse array, sparse input is not supported; give toarray()")
    try:
        array = np.asarray(values)
        if array.dtype == object and array.ndim == ndim:
            array = array.astype(np.float64)
    except (ValueError, TypeError) as error:
        raise DataError(f"{what} is not an array of numbers ({error}), expected {shape}") from None
    if array.ndim != ndim or array.dtype.kind not in "fiub":
        raise DataError(
            f"{what} has shape {array.shape} and dtype {array.dtype}, expected numbers of shape"
            f" {shape}"
        )
    is_single = array.dtype in (np.float16, np.float32)
    return np.ascontiguousarray(array, dtype=np.float32 if is_single else np.float64)
