"""Batches of windows in random order, copied ahead by a thread; batches of chunks of series.

The order is computed, not stored: an arithmetic permutation gives the number of the n-th window of
an epoch, running counts of the segments give its first row, and one native call copies a chunk of
batches. An epoch has every window exactly once, 10^8 windows take no memory, and a position is two
numbers. With `balance`, series are drawn equally often instead, and each goes through all of its
windows before any of them repeats.

Chunks of long series are for truncated backpropagation through time: each continues the one in the
same place of the batch before, with carried state::

    series a  ──offset──┃ chunk │ chunk │ chunk ┃ chunk │ chunk ┃ rest       ┃ ends of runs
    an epoch            all runs of chunks in random order, concatenated:
    place 0   ┃ c7 │ c8 │ c9 ┃ c0 │ c1          a batch has one chunk
    place 1     c2 ┃ c3 │ c4 ┃ …                of every place

An epoch reads every row once; windows from zero state read it as often as their input is long.
Every epoch starts a series at another offset, so that chunk borders and unused rows vary.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.distributed.world import Share
from fastlstm.errors import ConfigError, DataError, Stopped, counted
from fastlstm.forecast.data.table import Table, table_from_array
from fastlstm.forecast.data.window_index import (
    NO_GROUPS,
    WindowIndex,
    index_windows,
    native_source,
    read_windows,
    series_ends,
)
from fastlstm.system import hardware
from fastlstm.system.prefetch import LoaderPosition

_CHUNK_BYTES = 2 << 20
"""Bytes per native call: they fit the level-2 cache; smaller chunks cost more Python time."""
_MAX_CHUNK_BATCHES = 256
_AHEAD = 3
"""Chunks copied, or queued for it, while one is in use."""
_MAX_UNUSED = 16
"""Chunks of memory kept for reuse."""
_POLL_S = 0.1


class WindowBatch(NamedTuple):
    """B windows.

    Attributes:
        values: shape ``(B, length, C)``, float32; missing values are NaN.
        rows: first row of each window in the table, shape ``(B,)``, int64.
        segments: segment of each window, shape ``(B,)``, int64.
        epoch: from 0.
        number: of this batch in its epoch, from 0.
        total: windows of the batch in all processes.
    """

    values: Tensor
    rows: NDArray[np.int64]
    segments: NDArray[np.int64]
    epoch: int
    number: int
    total: int


class _Chunk(NamedTuple):
    """Batches from number `first` of an epoch, and the memory that the thread writes to."""

    job: int
    epoch: int
    first: int
    total: int
    numbers: NDArray[np.int64]  # of the windows, shape (batches, B)
    rows: NDArray[np.int64]
    runs: NDArray[np.int64]
    values: Tensor


class WindowLoader(LoaderPosition):
    """Hands out batches of windows copied ahead by a thread, epoch after epoch without end.

    Args:
        source: a Table, or an array of shape ``(N, C)``.
        length: rows of a window.
        batch_size: windows of a batch, of all processes together.
        shuffle: use a new random order every epoch.
        seed: of the orders.
        index: windows to use, in place of all of `length`.
        share: the part of every batch to hand out; default is all of it.
        should_stop: polled while waiting.
        balance: draw series equally often instead of every window once; same epoch length.

    Attributes:
        steps_per_epoch: batches in every epoch.
        num_windows: windows in every epoch over all ranks.
        wait_s: seconds that `next` has waited in total.

    Cost: 0.1 us per window of 50 rows of 5 float32; memory of a few chunks of 2 MB.
    """

    def __init__(
        self,
        source: Table | Any,
        length: int,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        index: WindowIndex | None = None,
        share: Share | None = None,
        should_stop: Callable[[], bool] | None = None,
        balance: bool = False,
    ) -> None:
        for name, value in (("length", length), ("batch_size", batch_size)):
            if value < 1:
                raise ConfigError(f"{name} is {value}, expected 1 or more")
        table = source if isinstance(source, Table) else table_from_array(source)
        self._table = table
        self._windows = index_windows(table, length) if index is None else index
        self.num_windows = len(self._windows)
        self._batch_size, self._shuffle, self._seed = batch_size, shuffle, seed
        self.share, self._should_stop = Share() if share is None else share, should_stop
        self.steps_per_epoch = -(-self.num_windows // batch_size)
        self._groups = series_ends(table, self._windows) if balance else NO_GROUPS
        self._native_source = native_source(table, self._windows, self._groups, self._key(0, 1))
        self._row_floats = self._windows.length * len(table.columns)
        own = self.share.rows(batch_size)
        self._num_own = own.stop - own.start
        fitting = _CHUNK_BYTES // (4 * max(self._num_own, 1) * self._row_floats)
        self._chunk_batches = max(1, min(fitting, _MAX_CHUNK_BATCHES))
        self._unused: deque[NDArray[np.float32]] = deque(maxlen=_MAX_UNUSED)
        self._chunks: deque[_Chunk] = deque()
        self._batches: Iterator[WindowBatch] = iter(())
        self._ahead = (0, 0)
        self._queue: Any = None
        self._process, self.wait_s = 0, 0.0

    def __iter__(self) -> Iterator[WindowBatch]:
        while True:
            yield self.next()

    def epoch(self) -> Iterator[WindowBatch]:
        """Yields the remaining batches of the current epoch."""
        epoch = self._epoch
        while self._epoch == epoch:
            yield self.next()

    def next(self) -> WindowBatch:
        """Returns the next batch; its memory is not reused while anything refers to it. Raises
        Stopped: `should_stop` returned True while waiting."""
        batch = next(self._batches, None)
        if batch is None:
            self._batches = self._take()
            batch = next(self._batches)
        self._advance()
        return batch

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """See `LoaderPosition.load_state_dict`."""
        super().load_state_dict(state)
        self.close()

    def close(self) -> None:
        """Stops the thread; a later `next` starts another one."""
        if self._process == os.getpid():
            self._queue = None  # joins its thread, so nothing writes to a chunk any more
        self._chunks.clear()
        self._batches = iter(())
        self._process = 0

    def __del__(self) -> None:
        if getattr(self, "_queue", None) is not None:  # its thread writes to our memory
            self.close()

    def __enter__(self) -> WindowLoader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _take(self) -> Iterator[WindowBatch]:
        """Waits for the oldest chunk, starts others, and returns its batches."""
        if self._process != os.getpid():  # at first, or in a forked child, which has no threads
            self.close()
            self._queue, self._process = hardware.native().JobQueue(), os.getpid()
            self._ahead = (self._epoch, self._index)
        while len(self._chunks) < _AHEAD:
            self._chunks.append(self._begin())
        chunk = self._chunks[0]
        if not self._queue.wait(chunk.job, 0.0):
            started = time.perf_counter()
            while not self._queue.wait(chunk.job, _POLL_S):
                if self._should_stop is not None and self._should_stop():
                    raise Stopped("stopped while waiting for a batch")
            self.wait_s += time.perf_counter() - started
        self._chunks.popleft()
        segments = self._windows.segments[chunk.runs]
        values, order = chunk.values.unbind(0), itertools.count(chunk.first)
        epoch, total = itertools.repeat(chunk.epoch), itertools.repeat(chunk.total)
        return map(WindowBatch, values, chunk.rows, segments, epoch, order, total)

    def _begin(self) -> _Chunk:
        """Starts copying the next chunk: batches of equal size, or an epoch's last batch alone."""
        epoch, first = self._ahead
        count = min(self._chunk_batches, self.steps_per_epoch - first)
        if first + count == self.steps_per_epoch and count > 1:
            count -= 1  # the last batch of an epoch may be smaller than the others
        end = first + count
        self._ahead = (epoch, end) if end < self.steps_per_epoch else (epoch + 1, 0)
        total = min(self._batch_size, self.num_windows - first * self._batch_size)
        own = self.share.rows(total)
        starts = np.arange(first, first + count, dtype=np.int64)[:, None] * self._batch_size
        numbers = starts + np.arange(own.start, own.stop)  # of this process's windows
        rows, runs = np.empty_like(numbers), np.empty_like(numbers)
        buffer = self._buffer()
        values = torch.from_numpy(buffer)[: numbers.size * self._row_floats]
        job = self._queue.submit(
            self._native_source, self._key(epoch) if self._shuffle else None, epoch,
            numbers.ctypes.data, numbers.size, rows.ctypes.data, runs.ctypes.data,
            buffer.ctypes.data,
        )  # fmt: skip
        shape = (*numbers.shape, self._windows.length, len(self._table.columns))
        return _Chunk(job, epoch, first, total, numbers, rows, runs, values.view(shape))

    def _key(self, *numbers: int) -> int:
        words = np.random.SeedSequence([self._seed, *numbers]).generate_state(1, np.uint64)
        return int(words[0])

    def _buffer(self) -> NDArray[np.float32]:
        """Returns memory for a chunk; reused because fresh pages cost more than copying."""
        num_windows = min(self._chunk_batches * max(self._num_own, 1), self.num_windows)
        try:
            memory = self._unused.pop()
        except IndexError:
            memory = np.empty(num_windows * self._row_floats, dtype=np.float32)
        buffer = memory[:]
        weakref.finalize(buffer, self._unused.append, memory).atexit = False
        return buffer


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


class ChunkLoader(LoaderPosition):
    """Hands out batches of chunks, epoch after epoch without end.

    `ends` (exclusive) of the usable rows of each segment have shape ``(S,)``, int64. A chunk has
    `length` input rows and the `horizon` after them; forecasts are `patch` rows apart, a divisor of
    `length`, and a series starts at one of its first `patch` rows. A batch has `batch_size` chunks,
    fewer if there are fewer. A series is cut after `run_length` rows of chunks, to shuffle its
    parts. `share` is the part of every batch to hand out.

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
        self._order_chunks()
        self.wait_s = 0.0

    def next(self) -> ChunkBatch:
        """Returns the next batch; raises Stopped if `should_stop` returns True."""
        if self._should_stop is not None and self._should_stop():
            raise Stopped("stopped before a batch")
        started = time.perf_counter()
        if self._ordered != self._epoch:
            self._order_chunks()
        batch = slice(self._index, None, self.steps_per_epoch)
        rows = self._rows[batch]
        total, own = len(rows), self.share.rows(self.num_places)  # a place keeps its process
        rows = rows[own]
        values = read_windows(self._table, rows, self._length + self._horizon)
        segments = self._owners[batch][own]
        continues = self._continues[batch][own] & (self._index > 0)
        self._advance()
        self.wait_s += time.perf_counter() - started
        return ChunkBatch(values, segments, continues, rows, total)

    def _order_chunks(self) -> None:
        """Puts all chunks of the epoch in the order of their places."""
        rng = np.random.default_rng([self._seed, self._epoch])
        begins = self._table.segments.first_rows[self._segments] + rng.integers(
            0, self._slack, endpoint=True
        )
        owners, places = _enumerate(-(-self._counts // self._chunks_per_run))
        order = rng.permutation(len(owners))
        owners, first_chunks = owners[order], places[order] * self._chunks_per_run
        sizes = np.minimum(self._chunks_per_run, self._counts[owners] - first_chunks)
        runs, places = _enumerate(sizes)
        owners = owners[runs]
        self._rows = begins[owners] + (first_chunks[runs] + places) * self._length
        self._owners, self._continues = self._segments[owners], places > 0
        self._ordered = self._epoch


def _enumerate(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the owner of each of ``sum(counts)`` items and the item's number, from 0."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return owners, np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
