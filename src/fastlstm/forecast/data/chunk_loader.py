"""Chunks of long series in order: each follows the one before it in its lane, state carried on.

::

    series a  ──offset──┃ chunk │ chunk │ chunk ┃ chunk │ chunk ┃ rest       ┃ ends of stretches
    an epoch            all stretches in a random order, end to end:
    lane 0    ┃ c7 │ c8 │ c9 ┃ c0 │ c1          one chunk of every lane
    lane 1      c2 ┃ c3 │ c4 ┃ …                is a step

So every row is read once an epoch, where windows from zero state read it as often as their input is
long (truncated backpropagation through time). A series begins at another row every epoch, so that
its chunks' borders, and the rows left over at its ends, move.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.errors import DataError, Stopped, counted
from fastlstm.forecast.data.table import Table
from fastlstm.forecast.data.window_index import read_windows
from fastlstm.system.prefetch import read_position


class ChunkBatch(NamedTuple):
    """One chunk of every lane.

    Attributes:
        values: shape ``(B, length + horizon, C)``, float32; a missing value is NaN.
        segments: the segment of each, shape ``(B,)``, int64.
        continues: whether it follows what the batch before had in its place, shape ``(B,)``, bool.
        rows: the first row of each in the table, shape ``(B,)``, int64.
    """

    values: Tensor
    segments: NDArray[np.int64]
    continues: NDArray[np.bool_]
    rows: NDArray[np.int64]


class _Epoch(NamedTuple):
    """All chunks of an epoch, lane after lane."""

    number: int
    rows: NDArray[np.int64]
    segments: NDArray[np.int64]
    continues: NDArray[np.bool_]


class ChunkLoader:
    """Hands out chunks; endless, epoch after epoch.

    Args:
        table: the rows.
        ends: the row behind the last to be used of each segment, shape ``(S,)``, int64.
        length: rows of a chunk that are read.
        horizon: rows behind them that come along.
        segment: rows after which a forecast is made; `length` is a multiple of it. A long series
            begins at any of so many first rows.
        batch_size: lanes; fewer where there are fewer chunks.
        stretch: rows after which a series is cut, so that its parts are shuffled, too.
        seed: of the orders.
        should_stop: polled at every batch.

    Attributes:
        num_chunks: chunks in every epoch.
        num_windows: forecasts in every epoch.
        steps_per_epoch: batches in every epoch.
        wait_s: seconds that the caller has waited for batches: copying is not done ahead.

    Raises:
        DataError: no segment holds a chunk and its horizon.
    """

    def __init__(
        self,
        table: Table,
        ends: NDArray[np.int64],
        length: int,
        horizon: int,
        segment: int,
        batch_size: int,
        stretch: int,
        seed: int = 0,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        usable = np.minimum(ends, table.segments.first_rows + table.segments.num_rows)
        usable = usable - table.segments.first_rows - horizon
        self._segments = np.flatnonzero(usable >= length)
        if len(self._segments) == 0:
            longest = max(0, int(usable.max(initial=-horizon)) + horizon)
            raise DataError(
                f"a chunk takes {counted(length, 'row')} and {horizon} behind, and the longest"
                f" stretch has {longest}; give longer series, or a smaller tbptt or horizon"
            )
        usable = usable[self._segments]
        self._counts = np.maximum(1, (usable - (segment - 1)) // length)
        self._slack = usable - self._counts * length
        self._table, self._length, self._horizon = table, length, horizon
        self._per_stretch = max(1, stretch // length)
        self._seed, self._should_stop = seed, should_stop
        self.num_chunks = int(self._counts.sum())
        self.num_windows = self.num_chunks * (length // segment)
        self.steps_per_epoch = -(-self.num_chunks // batch_size)
        self._epoch = self._order(0)
        self._position = {"epoch": 0, "index": 0}
        self.wait_s = 0.0

    def next(self) -> ChunkBatch:
        """Returns the next batch.

        Raises:
            Stopped: `should_stop` said so.
        """
        if self._should_stop is not None and self._should_stop():
            raise Stopped("stopped before a batch")
        started = time.perf_counter()
        epoch, step = self._position["epoch"], self._position["index"]
        if self._epoch.number != epoch:
            self._epoch = self._order(epoch)
        lanes = slice(step, None, self.steps_per_epoch)
        rows = self._epoch.rows[lanes]
        values = read_windows(self._table, rows, self._length + self._horizon)
        continues = self._epoch.continues[lanes] & (step > 0)
        is_last = step + 1 == self.steps_per_epoch
        self._position["epoch"] = epoch + is_last
        self._position["index"] = 0 if is_last else step + 1
        self.wait_s += time.perf_counter() - started
        return ChunkBatch(values, self._epoch.segments[lanes], continues, rows)

    def state_dict(self) -> dict[str, int]:
        """Returns the position behind the last batch handed out."""
        return dict(self._position)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes to a position of `state_dict`, for the same table, sizes and seed.

        Raises:
            CorruptFileError: no such position.
        """
        epoch, index = read_position(state, self.steps_per_epoch, "table")
        self._position = {"epoch": epoch, "index": index}

    def close(self) -> None:
        """Does nothing; a `WindowLoader` ends its thread here."""

    def _order(self, epoch: int) -> _Epoch:
        rng = np.random.default_rng([self._seed, epoch])
        begins = self._table.segments.first_rows[self._segments] + rng.integers(
            0, self._slack, endpoint=True
        )
        owners, places = _spread(-(-self._counts // self._per_stretch))
        order = rng.permutation(len(owners))
        owners, first_chunks = owners[order], places[order] * self._per_stretch
        sizes = np.minimum(self._per_stretch, self._counts[owners] - first_chunks)
        stretches, places = _spread(sizes)
        owners = owners[stretches]
        rows = begins[owners] + (first_chunks[stretches] + places) * self._length
        return _Epoch(epoch, rows, self._segments[owners], places > 0)


def _spread(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns, for so many of each, whose each one is and its number among them, from 0."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return owners, np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
