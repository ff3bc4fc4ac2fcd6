"""Consecutive chunks of long series for truncated backpropagation through time.

Each chunk continues the one in the same place of the batch before, with carried state::

    series a  ──offset──┃ chunk │ chunk │ chunk ┃ chunk │ chunk ┃ rest       ┃ ends of runs
    an epoch            all runs of chunks in random order, concatenated:
    place 0   ┃ c7 │ c8 │ c9 ┃ c0 │ c1          a batch has one chunk
    place 1     c2 ┃ c3 │ c4 ┃ …                of every place

An epoch reads every row once; windows from zero state read it as often as their input is long.
Every epoch starts a series at another offset, so that chunk borders and unused rows vary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.distributed.share import Share
from fastlstm.errors import DataError, Stopped, counted
from fastlstm.forecast.data.table import Table
from fastlstm.forecast.data.window_index import read_windows
from fastlstm.system.prefetch import LoaderPosition


class ChunkBatch(NamedTuple):
    """B chunks.

    Attributes:
        values: shape ``(B, length + horizon, C)``, float32; missing values are NaN.
        segments: segment of each chunk, shape ``(B,)``, int64.
        continues: whether a chunk follows the one in its place of the batch before, ``(B,)``, bool.
        rows: first row of each chunk in the table, shape ``(B,)``, int64.
        total: chunks of the batch in all processes.
    """

    values: Tensor
    segments: NDArray[np.int64]
    continues: NDArray[np.bool_]
    rows: NDArray[np.int64]
    total: int


class _Epoch(NamedTuple):
    """All chunks of an epoch, in the order of their places; see `ChunkBatch`."""

    number: int
    rows: NDArray[np.int64]
    segments: NDArray[np.int64]
    continues: NDArray[np.bool_]


class ChunkLoader(LoaderPosition):
    """Hands out batches of chunks, epoch after epoch without end.

    Args:
        table: the rows.
        ends: end (exclusive) of the usable rows of each segment, shape ``(S,)``, int64.
        length: input rows of a chunk.
        horizon: rows after them that are included.
        patch: rows between forecasts, a divisor of `length`. A series starts at one of its first
            `patch` rows.
        batch_size: B; fewer if there are fewer chunks.
        run_length: rows of consecutive chunks after which a series is cut, to shuffle its parts.
        seed: of the orders.
        should_stop: polled at every batch.
        share: the part of every batch to hand out; default is all of it.

    Attributes:
        num_chunks, num_windows, steps_per_epoch: chunks, forecasts and batches in every epoch.
        num_places: chunks of the largest batch; others have one fewer.
        wait_s: seconds spent copying batches, which is not done ahead.

    Raises:
        DataError: no segment is long enough for a chunk and its horizon.
    """

    def __init__(
        self,
        table: Table,
        ends: NDArray[np.int64],
        length: int,
        horizon: int,
        patch: int,
        batch_size: int,
        run_length: int,
        seed: int = 0,
        should_stop: Callable[[], bool] | None = None,
        share: Share | None = None,
    ) -> None:
        usable = np.minimum(ends, table.segments.first_rows + table.segments.num_rows)
        usable = usable - table.segments.first_rows - horizon
        self._segments = np.flatnonzero(usable >= length)
        if len(self._segments) == 0:
            longest = max(0, int(usable.max(initial=-horizon)) + horizon)
            raise DataError(
                f"a chunk needs {counted(length, 'row')} and {horizon} after them, the longest"
                f" segment has {longest}; give longer series, or a smaller tbptt or horizon"
            )
        usable = usable[self._segments]
        self._counts = np.maximum(1, (usable - (patch - 1)) // length)
        self._slack = usable - self._counts * length
        self._table, self._length, self._horizon = table, length, horizon
        self._chunks_per_run = max(1, run_length // length)
        self._seed, self._should_stop = seed, should_stop
        self.share = Share() if share is None else share
        self.num_chunks = int(self._counts.sum())
        self.num_windows = self.num_chunks * (length // patch)
        self.steps_per_epoch = -(-self.num_chunks // batch_size)
        self.num_places = -(-self.num_chunks // self.steps_per_epoch)
        self._order = self._epoch_order(0)
        self.wait_s = 0.0

    def next(self) -> ChunkBatch:
        """Returns the next batch; raises Stopped if `should_stop` returns True."""
        if self._should_stop is not None and self._should_stop():
            raise Stopped("stopped before a batch")
        started = time.perf_counter()
        if self._order.number != self._epoch:
            self._order = self._epoch_order(self._epoch)
        batch = slice(self._index, None, self.steps_per_epoch)
        rows = self._order.rows[batch]
        total, own = len(rows), self.share.rows(self.num_places)  # a place keeps its process
        rows = rows[own]
        values = read_windows(self._table, rows, self._length + self._horizon)
        continues = self._order.continues[batch][own] & (self._index > 0)
        self._advance()
        self.wait_s += time.perf_counter() - started
        return ChunkBatch(values, self._order.segments[batch][own], continues, rows, total)

    def _epoch_order(self, epoch: int) -> _Epoch:
        rng = np.random.default_rng([self._seed, epoch])
        begins = self._table.segments.first_rows[self._segments] + rng.integers(
            0, self._slack, endpoint=True
        )
        owners, places = _enumerate(-(-self._counts // self._chunks_per_run))
        order = rng.permutation(len(owners))
        owners, first_chunks = owners[order], places[order] * self._chunks_per_run
        sizes = np.minimum(self._chunks_per_run, self._counts[owners] - first_chunks)
        runs, places = _enumerate(sizes)
        owners = owners[runs]
        rows = begins[owners] + (first_chunks[runs] + places) * self._length
        return _Epoch(epoch, rows, self._segments[owners], places > 0)


def _enumerate(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the owner of each of ``sum(counts)`` items and the item's number, from 0."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return owners, np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
