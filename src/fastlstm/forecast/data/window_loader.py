"""Batches of windows that a thread has copied ahead, in an order that is not stored.

Window n of epoch e is found, not looked up: a permutation by arithmetic says which number comes
n-th, the segments' running counts say where that window begins, one native call copies a chunk of
batches. So an epoch holds every window exactly once, 10^8 windows take no memory, and a position is
two numbers. Or all series are drawn equally often: then a series goes through its own windows, each
once before any comes again, over the epochs.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.errors import ConfigError, DataError, Stopped, counted
from fastlstm.forecast.data.table import Table, table_from_array
from fastlstm.forecast.data.window_index import (
    NO_GROUPS,
    WindowIndex,
    index_windows,
    native_source,
    series_ends,
)
from fastlstm.system import hardware
from fastlstm.system.prefetch import read_position

_CHUNK_BYTES = 2 << 20
"""Of one native call: what the second-level cache holds; smaller chunks pay more for Python."""
_MAX_CHUNK_BATCHES = 256
_AHEAD = 3
"""Chunks that are copied, or wait to be, while one is used."""
_POLL_S = 0.1


class WindowBatch(NamedTuple):
    """Windows as the model takes them.

    Attributes:
        values: shape ``(B, length, C)``, float32; a missing value is NaN.
        rows: the first row of each in the table, shape ``(B,)``, int64.
        segments: the segment of each, shape ``(B,)``, int64.
        epoch: from 0.
        number: of this batch in its epoch, from 0.
    """

    values: Tensor
    rows: NDArray[np.int64]
    segments: NDArray[np.int64]
    epoch: int
    number: int


class _Chunk(NamedTuple):
    """Batches that are being copied, and the memory they are copied into."""

    job: int
    epoch: int
    first: int
    num_batches: int
    size: int
    numbers: NDArray[np.int64]
    rows: NDArray[np.int64]
    runs: NDArray[np.int64]
    values: Tensor


class WindowLoader:
    """Hands out batches of windows that a thread has copied ahead; endless, epoch after epoch.

    Args:
        source: a Table, or an array of shape ``(N, C)``.
        length: rows of a window.
        batch_size: windows of a batch.
        shuffle: a new order every epoch.
        stride: rows from one window to the next.
        seed: of the orders.
        index: the windows to use instead of all of `length` and `stride`.
        rank: which share of every global batch to hand out.
        world_size: processes that share the epoch.
        should_stop: polled while waiting.
        balance: draw every series equally often, not every window once; an epoch is as long.

    Attributes:
        steps_per_epoch: batches in every epoch.
        num_windows: windows in every epoch, of all ranks.
        wait_s: seconds that the caller has waited for batches.

    Cost: 0.1 us a window of 50 rows of 5 float32; no memory beyond a few chunks of 2 MB.

    Example:
        ::

            with WindowLoader(array, length=50, batch_size=64) as loader:
                for batch in loader.epoch():
                    model(batch.values)
    """

    def __init__(
        self,
        source: Table | Any,
        length: int,
        batch_size: int,
        shuffle: bool = True,
        stride: int = 1,
        seed: int = 0,
        index: WindowIndex | None = None,
        rank: int = 0,
        world_size: int = 1,
        should_stop: Callable[[], bool] | None = None,
        balance: bool = False,
    ) -> None:
        sizes = {"length": length, "stride": stride, "batch_size": batch_size}
        for name, value in (*sizes.items(), ("world_size", world_size)):
            if value < 1:
                raise ConfigError(f"{name} is {value}, expected 1 or more")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank is {rank}, expected 0 to {world_size - 1}")
        table = source if isinstance(source, Table) else table_from_array(source)
        self._table = table
        self._index = index_windows(table, length, stride) if index is None else index
        self.num_windows = len(self._index)
        self._batch_size, self._shuffle, self._seed = batch_size, shuffle, seed
        self._rank, self._world_size, self._should_stop = rank, world_size, should_stop
        steps, rest = divmod(self.num_windows, batch_size * world_size)
        self.steps_per_epoch = steps + (rest >= world_size)
        if self.steps_per_epoch == 0:
            raise DataError(
                f"{counted(self.num_windows, 'window')} cannot be shared by {world_size} processes;"
                " use fewer"
            )
        self._groups = series_ends(table, self._index) if balance else NO_GROUPS
        self._source = native_source(table, self._index, self._groups, self._key(0, 1))
        self._row_floats = self._index.length * len(table.columns)
        fitting = _CHUNK_BYTES // (4 * batch_size * self._row_floats)
        self._chunk_batches = max(1, min(fitting, _MAX_CHUNK_BATCHES))
        self._buffers: list[NDArray[np.float32]] = []
        self._chunks: deque[_Chunk] = deque()
        self._batches: Iterator[WindowBatch] = iter(())
        self._ahead = (0, 0)
        self._position = {"epoch": 0, "index": 0}
        self._queue: Any = None
        self._process = 0
        self.wait_s = 0.0

    def __iter__(self) -> Iterator[WindowBatch]:
        while True:
            yield self.next()

    def epoch(self) -> Iterator[WindowBatch]:
        """Yields the batches up to the end of the epoch, from the present position."""
        epoch = self._position["epoch"]
        while self._position["epoch"] == epoch:
            yield self.next()

    def next(self) -> WindowBatch:
        """Returns the next batch; it is the caller's as long as anything refers to it.

        Raises:
            Stopped: `should_stop` said so while waiting.
        """
        batch = next(self._batches, None)
        if batch is None:
            self._batches = self._take()
            batch = next(self._batches)
        done = batch.number + 1
        is_last = done == self.steps_per_epoch
        self._position["epoch"] = batch.epoch + is_last
        self._position["index"] = 0 if is_last else done
        return batch

    def state_dict(self) -> dict[str, int]:
        """Returns the position behind the last batch handed out."""
        return dict(self._position)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes to a position of `state_dict`, for the same windows, batch size and seed.

        Raises:
            CorruptFileError: no such position.
        """
        epoch, index = read_position(state, self.steps_per_epoch, "table")
        self._position = {"epoch": epoch, "index": index}
        self.close()

    def close(self) -> None:
        """Ends the thread; a later `next` starts another one."""
        if self._process == os.getpid():
            self._queue = None  # joins its thread: from here on nobody writes into a chunk
        self._chunks.clear()
        self._batches = iter(())
        self._process = 0

    def __del__(self) -> None:
        if getattr(self, "_queue", None) is not None:  # its thread writes into memory of ours
            self.close()

    def __enter__(self) -> WindowLoader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # chunks -------------------------------------------------------------------------------------

    def _take(self) -> Iterator[WindowBatch]:
        """Waits for the oldest chunk, has others begun, and returns its batches."""
        if self._process != os.getpid():  # the first time, or in a child: threads are not inherited
            self.close()
            self._queue, self._process = hardware.native().JobQueue(), os.getpid()
            self._ahead = (self._position["epoch"], self._position["index"])
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
        segments = self._index.segments[chunk.runs].reshape(chunk.num_batches, chunk.size)
        rows = chunk.rows.reshape(chunk.num_batches, chunk.size)
        epoch, order = chunk.epoch, range(chunk.first, chunk.first + chunk.num_batches)
        whole = zip(chunk.values.unbind(0), rows, segments, order, strict=True)
        return iter([WindowBatch(v, r, s, epoch, number) for v, r, s, number in whole])

    def _begin(self) -> _Chunk:
        """Has the next chunk copied: batches of equal size, or the single last one of an epoch."""
        epoch, first = self._ahead
        count = min(self._chunk_batches, self.steps_per_epoch - first)
        if first + count == self.steps_per_epoch and count > 1:
            count -= 1  # the last batch of an epoch may be smaller than the others
        behind = first + count
        self._ahead = (epoch, behind) if behind < self.steps_per_epoch else (epoch + 1, 0)
        numbers, size = self._numbers(first, count)
        rows, runs = np.empty_like(numbers), np.empty_like(numbers)
        buffer = self._free_buffer(count * size)
        shape = (count, size, self._index.length, len(self._table.columns))
        values = torch.from_numpy(buffer)[: len(rows) * self._row_floats].view(shape)
        job = self._queue.submit(
            self._source, self._key(epoch) if self._shuffle else None, epoch, numbers.ctypes.data,
            len(numbers), rows.ctypes.data, runs.ctypes.data, buffer.ctypes.data,
        )  # fmt: skip
        return _Chunk(job, epoch, first, count, size, numbers, rows, runs, values)

    def _numbers(self, first: int, count: int) -> tuple[NDArray[np.int64], int]:
        """Returns the numbers of this rank's windows and how many a batch has."""
        size, world, rank = self._batch_size, self._world_size, self._rank
        start = first * size * world
        rest = self.num_windows - start
        if rest < size * world:  # the last batch, shared out as evenly as it goes
            begin, end = rest * rank // world, rest * (rank + 1) // world
            return np.arange(start + begin, start + end, dtype=np.int64), end - begin
        steps = np.arange(first, first + count, dtype=np.int64)[:, None] * (size * world)
        return (steps + np.arange(rank * size, (rank + 1) * size)).reshape(-1), size

    def _key(self, *numbers: int) -> int:
        words = np.random.SeedSequence([self._seed, *numbers]).generate_state(1, np.uint64)
        return int(words[0])

    def _free_buffer(self, num_windows: int) -> NDArray[np.float32]:
        """Returns memory that no batch outside uses now; fresh pages cost more than copying."""
        floats = num_windows * self._row_floats
        for place in range(len(self._buffers)):
            is_free = _num_references(self._buffers, place) == _UNUSED
            if is_free and self._buffers[place].size >= floats:
                return self._buffers[place]
        buffer = np.empty(floats, dtype=np.float32)
        if len(self._buffers) < 16 and _counts_references():
            self._buffers.append(buffer)
        return buffer


_UNUSED = 2
"""References to an array that nobody uses: its list's, and that of getrefcount's argument."""


def _num_references(arrays: list[NDArray[np.float32]], place: int) -> int:
    return sys.getrefcount(arrays[place])


@cache
def _counts_references() -> bool:
    """Whether this interpreter's counts say that a tensor made of an array lives.

    CPython's do; an interpreter may also defer counts, or let some objects live for ever.
    """
    arrays = [np.empty(4, dtype=np.float32)]
    counts = [_num_references(arrays, 0)]
    part = torch.from_numpy(arrays[0])[:2].view(2, 1).unbind(0)[0]
    counts.append(_num_references(arrays, 0))
    del part
    counts.append(_num_references(arrays, 0))
    if counts[0] == counts[2] == _UNUSED < counts[1]:
        return True
    warnings.warn(
        f"this Python counts {counts} references where {_UNUSED}, more and {_UNUSED} are expected:"
        " every chunk of windows gets memory of its own, which is slower",
        stacklevel=2,
    )
    return False
