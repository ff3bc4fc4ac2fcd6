"""Background prefetch: batches are made while the model computes, and waiting is measured."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from fastlstm.errors import CorruptFileError, Stopped

_POLL_S = 0.1
ItemT = TypeVar("ItemT")
MadeT = TypeVar("MadeT", covariant=True)


class Resumable(Protocol[MadeT]):
    """What the prefetcher reads from: `fastlstm.text.data.lanes.Batches`, a table's batches."""

    def __next__(self) -> MadeT: ...

    def state_dict(self) -> dict[str, int]:
        """Returns the position of the next batch."""
        ...


def read_position(state: Mapping[str, int], steps_per_epoch: int, source: str) -> tuple[int, int]:
    """Returns epoch and index of a loader's position.

    Raises:
        CorruptFileError: no such position in a `source` (text, table) of so many steps.
    """
    epoch, index = state.get("epoch"), state.get("index")
    good = type(epoch) is int and type(index) is int and epoch >= 0
    if not good or not 0 <= state["index"] < steps_per_epoch:
        raise CorruptFileError(
            f"loader position is {state}, expected an epoch and an index below"
            f" {steps_per_epoch}; was the {source} or the batch size changed?"
        )
    return state["epoch"], state["index"]


class Prefetcher(Generic[ItemT]):
    """Hands out batches that a background thread has made.

    Args:
        batches: resumable iterator; it belongs to the prefetcher from here on.
        depth: batches made ahead.
        should_stop: polled while waiting.

    Attributes:
        wait_s: seconds that `next` has waited in all.
    """

    def __init__(
        self,
        batches: Resumable[ItemT],
        depth: int = 4,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        self.wait_s = 0.0
        self._state = batches.state_dict()
        self._should_stop = should_stop
        self._queue: queue.Queue[tuple[ItemT, dict[str, int]] | BaseException] = queue.Queue(depth)
        self._closed = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._produce, args=(batches,), name="fastlstm-prefetch", daemon=True
        )
        self._thread.start()

    def next(self) -> ItemT:
        """Returns the next batch.

        Raises:
            Stopped: `should_stop` said so while waiting.
            Exception: whatever making the batch raised, again on every later call.
        """
        if self._failure is not None:
            raise self._failure
        if self._closed.is_set():
            raise ValueError("this Prefetcher is closed; make a new one")
        started = time.perf_counter()
        item = self._take()
        self.wait_s += time.perf_counter() - started
        if isinstance(item, BaseException):
            self._failure = item
            raise item
        batch, self._state = item
        return batch

    def state_dict(self) -> dict[str, int]:
        """Returns the position after the last batch handed out, whatever was made ahead."""
        return dict(self._state)

    def close(self) -> None:
        """Stops the thread and waits for it; may be called twice."""
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> Prefetcher[ItemT]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _take(self) -> tuple[ItemT, dict[str, int]] | BaseException:
        while True:
            try:
                return self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                if self._should_stop is not None and self._should_stop():
                    raise Stopped("stopped while waiting for a batch") from None

    def _produce(self, batches: Resumable[ItemT]) -> None:
        while not self._closed.is_set():
            item: tuple[ItemT, dict[str, int]] | BaseException
            try:
                batch = next(batches)
                item = batch, batches.state_dict()
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
