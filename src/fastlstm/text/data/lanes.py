"""Batches for truncated backpropagation through time: contiguous lanes, or shuffled windows.

Lanes, B = 2, T = 3, `o` the epoch's random offset, S steps::

    ids   · · o[a b c d e f|g h i j k l] · ·      x of step 0: a b c / g h i   y: b c d / h i j
              └── lane 0 ──┘└── lane 1 ──┘        x of step 1: d e f / j k l   y: e f g / k l ·

A batch follows from (seed, epoch, index) alone, so a position is two numbers and a resumed run
sees the same batches as an uninterrupted one. `TextLoader` reads them ahead in a thread.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.errors import DataError, Stopped, counted
from fastlstm.system.cache import release_pages
from fastlstm.system.prefetch import LoaderPosition, Prefetcher
from fastlstm.text.config import Order
from fastlstm.text.data.tokenizer import Ids

_RELEASE_EVERY = 4096
_OFFSET, _RESET, _ORDER = range(3)


@dataclass(frozen=True)
class Batch:
    """Batch `index` of an epoch: tokens x and the token after each one, y, both `(T, B)` int64.

    `reset` `(B,)` bool marks lanes that start from zero state, `start` `(B,)` int64 is the position
    of each lane's first token in the text.
    """

    x: Tensor
    y: Tensor
    reset: Tensor
    start: Tensor
    epoch: int
    index: int

    def positions(self) -> Tensor:
        """Returns the position in the text of each token of `x`, shape ``(T, B)``, int64."""
        return torch.arange(len(self.x)).unsqueeze(1) + self.start


class TextBatches(LoaderPosition):
    """Endless iterator over the epochs of 1-d token ids, usually memory-mapped; resumable anywhere.

    An epoch has `steps_per_epoch * B * T` targets, each exactly once. Its random offset varies
    which tokens (fewer than ``(B + 1) * T``) are left out.

    With order "lanes", lane b of batch k + 1 continues lane b of batch k; with probability
    `lane_reset` it starts from zero state instead. With order "windows", windows of T targets come
    in random order, each from zero state, as in most recipes. `lanes` selects the lanes that are
    handed out: all B, or the part of one process.

    A batch costs one strided copy: 11 us for B = 32, T = 128; 21 us for B = 128, T = 100 (2-core
    Xeon); 15 us more with `lane_reset`.
    """

    _source = "text"

    def __init__(
        self,
        ids: Ids,
        batch_size: int,
        seq_length: int,
        seed: int = 0,
        order: Order = "lanes",
        lane_reset: float = 0.0,
        lanes: slice | None = None,
    ) -> None:
        self.ids = np.asarray(ids)
        self.lanes = slice(0, batch_size) if lanes is None else lanes
        self.is_in_order = order == "lanes"
        self._B, self._T = batch_size, seq_length
        self._seed, self._lane_reset = seed, lane_reset
        self._prepared = -1
        if len(ids) < 2 * batch_size * seq_length:
            raise DataError(self._too_short())
        self.steps_per_epoch = (len(ids) - seq_length) // (batch_size * seq_length)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._prepared != self._epoch:
            self._start_epoch()
            self._prepared = self._epoch
        tokens = torch.from_numpy(self._gather())
        reset = torch.from_numpy(self._reset()[self.lanes])
        start = torch.from_numpy(self._starts()[self.lanes])
        batch = Batch(tokens[:-1], tokens[1:], reset, start, self._epoch, self._index)
        self._advance()
        if self._index % _RELEASE_EVERY == 0:
            release_pages(self.ids)
        return batch

    def _random(self, purpose: int, index: int = 0) -> np.random.Generator:
        counter = [0, index, self._epoch, purpose]
        return np.random.Generator(np.random.Philox(key=[self._seed, 0], counter=counter))

    def _too_short(self) -> str:
        num, B, T = len(self.ids), self._B, self._T
        fits = ""
        if num >= 2 * T:
            fits = f"give `batch_size={num // (2 * T)}` or "
        elif num >= 2 * B:
            fits = f"give `seq_length={num // (2 * B)}` or "
        return (
            f"the training text has {counted(num, 'token')}, `batch_size={B}` with"
            f" `seq_length={T}` needs at least {2 * B * T:,}; {fits}give more text"
        )

    def _start_epoch(self) -> None:
        """Draws the offset of the epoch, and the order of its windows."""
        length = self.steps_per_epoch * self._T  # of a lane
        slack = len(self.ids) - 1 - length * self._B
        if self.is_in_order:
            self._offset = int(self._random(_OFFSET).integers(slack + 1))
            step, shape = self.ids.strides[0], (length + 1, self._B)
            first = self.ids[self._offset :]
            self._lanes = as_strided(first, shape, (step, length * step), writeable=False)
            return
        random = self._random(_ORDER)
        offset = int(random.integers(slack + 1))
        self._windows = random.permutation(self.steps_per_epoch * self._B) * self._T + offset

    def _starts(self) -> NDArray[np.int64]:
        """Returns the position in the text of each lane's first token, shape ``(B,)``."""
        if not self.is_in_order:
            return self._windows[self._index * self._B : (self._index + 1) * self._B]
        length = self.steps_per_epoch * self._T
        return np.arange(self._B) * length + self._offset + self._index * self._T

    def _gather(self) -> NDArray[np.int64]:
        """Returns the tokens of this process's lanes, and one token more, ``(T + 1, lanes)``."""
        first = self._index * self._T
        if self.is_in_order:
            tokens = self._lanes[first : first + self._T + 1, self.lanes]
        else:
            tokens = self.ids[np.arange(self._T + 1)[:, None] + self._starts()[self.lanes]]
        return tokens.astype(np.int64, order="C")

    def _reset(self) -> NDArray[np.bool_]:
        """Returns which lanes start from zero state, shape ``(B,)``."""
        if self._index == 0 or not self.is_in_order:
            return np.ones(self._B, dtype=np.bool_)
        if self._lane_reset == 0:
            return np.zeros(self._B, dtype=np.bool_)
        return np.asarray(self._random(_RESET, self._index).random(self._B) < self._lane_reset)


class TextLoader(LoaderPosition):
    """Hands out lanes or windows; the prefetching thread starts with the first batch.

    The loader owns the batches from now on, and polls `should_stop` while it waits. `num_lanes` is
    B or, with several processes, the number of lanes of this process.
    """

    _source = "text"

    def __init__(self, batches: TextBatches, should_stop: Callable[[], bool] | None = None) -> None:
        self._batches, self._should_stop = batches, should_stop
        self._ahead: Prefetcher[Batch] | None = None
        self._waited_s = 0.0
        self.steps_per_epoch = batches.steps_per_epoch
        self.ids, self.num_lanes = batches.ids, batches.lanes.stop - batches.lanes.start
        self.is_in_order = batches.is_in_order

    @property
    def wait_s(self) -> float:
        """Seconds that `next` has waited in total."""
        return self._waited_s + (0.0 if self._ahead is None else self._ahead.wait_s)

    def next(self) -> Batch:
        """Returns the next batch; raises Stopped if `should_stop` returned True."""
        if self._ahead is None:
            self._batches.load_state_dict(self.state_dict())
            self._ahead = Prefetcher(self._batches, should_stop=self._should_stop)
        batch = self._ahead.next()
        self._advance()
        return batch

    def first_epoch(self) -> Iterator[Batch]:
        """Yields the batches of the first epoch without moving `next`; may raise Stopped."""
        batches = copy.copy(self._batches)
        batches._epoch, batches._index, batches._prepared = 0, 0, -1
        for _ in range(self.steps_per_epoch):
            if self._should_stop is not None and self._should_stop():
                raise Stopped("stopped while reading the first epoch again")
            yield next(batches)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.close()
        super().load_state_dict(state)

    def close(self) -> None:
        """Ends the thread; a later `next` continues from the position of `state_dict`."""
        if self._ahead is not None:
            self._waited_s = self.wait_s
            self._ahead.close()
            self._ahead = None
