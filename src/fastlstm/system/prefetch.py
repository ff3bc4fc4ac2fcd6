"""The position of a loader, and a prefetcher that makes batches while the model computes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from fastlstm.errors import CorruptFileError, Stopped

_POLL_S = 0.1
ItemT = TypeVar("ItemT")


class LoaderPosition:
    """Base of loaders that resume anywhere; the position is the epoch and index of the next batch.
    Every epoch has `steps_per_epoch` batches."""

    steps_per_epoch: int
    _source = "table"
    _epoch = _index = 0

    def state_dict(self) -> dict[str, int]:
        """Returns the position of the next batch."""
        return {"epoch": self._epoch, "index": self._index}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues at a position of `state_dict`, for the same data, sizes and seed. Raises
        CorruptFileError: an invalid position."""
        epoch, index = state.get("epoch"), state.get("index")
        is_valid = type(epoch) is int and type(index) is int and epoch >= 0
        if not is_valid or not 0 <= state["index"] < self.steps_per_epoch:
            raise CorruptFileError(
                f"loader position is {state}, expected an epoch and an index below"
                f" {self.steps_per_epoch}; was the {self._source} or the batch size changed?"
            )
        self._epoch, self._index = state["epoch"], state["index"]

    def close(self) -> None:
        """Ends the loader's thread, if it has one."""

    def _advance(self) -> None:
        self._index += 1
        if self._index == self.steps_per_epoch:
            self._epoch, self._index = self._epoch + 1, 0


class Prefetcher(Generic[ItemT]):
    """Hands out batches that a background thread makes, `depth` of them ahead.

    It owns the iterator `batches` from now on, and polls `should_stop` while it waits. `wait_s` are
    the seconds that `next` has waited in total.
    """

    def __init__(
        self,
        batches: Iterator[ItemT],
        depth: int = 4,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        self.wait_s = 0.0
        self._should_stop = should_stop
        self._queue: queue.Queue[ItemT | BaseException] = queue.Queue(depth)
        self._closed = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._produce, args=(batches,), name="fastlstm-prefetch", daemon=True
        )
        self._thread.start()

    def next(self) -> ItemT:
        """Returns the next batch. Raises Stopped: `should_stop` returned True while waiting; and
        what was raised while making the batch, again on every later call."""
        if self._failure is not None:
            raise self._failure
        if self._closed.is_set():
            raise ValueError("this Prefetcher is closed; make a new one")
        started = time.perf_counter()
        while True:
            try:
                item = self._queue.get(timeout=_POLL_S)
                break
            except queue.Empty:
                if self._should_stop is not None and self._should_stop():
                    raise Stopped("stopped while waiting for a batch") from None
        self.wait_s += time.perf_counter() - started
        if isinstance(item, BaseException):
            self._failure = item
            raise item
        return item

    def close(self) -> None:
        """Stops the thread and waits for it; can be called repeatedly."""
        self._closed.set()
        self._thread.join()

    def _produce(self, batches: Iterator[ItemT]) -> None:
        while not self._closed.is_set():
            item: ItemT | BaseException
            try:
                item = next(batches)
            except BaseException as error:
                item = error
            while not self._closed.is_set():
                try:
                    self._queue.put(item, timeout=_POLL_S)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return
