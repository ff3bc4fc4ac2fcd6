"""A daemon thread for long calls outside the event loop; nothing waits for it at the end.

API keys take turns. The thread also takes turns with the event loop. Most calls hold the
interpreter until they end, and the loop releases it at every read and write of a connection: if the
calls came back to back, a turn of the loop with 100 connections would wait for 100 calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from fastlstm.serve.http.errors import ENDING, Unavailable
from fastlstm.serve.http.keys import NOBODY

Result = TypeVar("Result")

_QUIET_S = 0.0002
"""A shorter turn of the event loop had nothing to do."""
_LOOP_SHARE, _LONGEST_S = 4.0, 1.0
"""A busy event loop has this many times the last call's duration to itself, at most a second."""
_LONG_S, _REST_S = 0.02, 0.01
"""After a call this long the next one waits even if the event loop is quiet: else a client would
wait for one call to be accepted, for another to be read and for a third to be answered."""


class Worker:
    """Makes calls one after the other, the calls of a key in order.

    Used on the event loop that awaits the calls; `stop` may be called from any thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[asyncio.Future[Any], tuple[bytes, Callable[[], Any]]] = {}
        self._num_made = 0
        self._last: Counter[bytes] = Counter()  # number of the newest call of each key
        self._taken_s = self._ended_s = 0.0  # how long the last call took, and when it ended
        self._since_s: float | None = None
        self._made: asyncio.Future[Any] | None = None
        self._is_busy = self._is_stopping = False
        self._work: SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]] | None]
        self._work = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def busy_s(self) -> float:
        since_s = self._since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def call(
        self, function: Callable[..., Result], *args: Any, tenant: bytes = NOBODY
    ) -> asyncio.Future[Result]:
        """Calls a function on the thread when it is the tenant's turn; returns the future result.

        A call cancelled while it waits is dropped; after `stop` the result is Unavailable.
        """
        future: asyncio.Future[Result] = self._loop.create_future()
        if self._is_stopping:
            future.set_exception(Unavailable(ENDING))
            return future
        self._waiting[future] = tenant, lambda: function(*args)
        future.add_done_callback(lambda done: self._waiting.pop(done, None))
        self._begin()
        return future

    def stop(self) -> None:
        """Ends every call with an error; does not wait for the current one."""
        self._is_stopping = True
        self._work.put(None)
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._end_all)

    def _end_all(self) -> None:
        for future in [self._made, *self._waiting]:
            if future is not None:
                settle(future, error=Unavailable(ENDING))

    def _begin(self) -> None:
        if self._waiting and not self._is_busy:
            self._is_busy = True
            rest_s = self._ended_s + _REST_S - time.monotonic() if self._taken_s > _LONG_S else 0.0
            if rest_s > 0:
                self._loop.call_later(rest_s, self._start_turn)
            else:
                self._start_turn()

    def _start_turn(self) -> None:
        self._loop.call_soon(self._after_turn, time.monotonic())

    def _after_turn(self, turn_s: float) -> None:
        """Starts the next call if a turn was short or the event loop has had its share."""
        now_s = time.monotonic()
        waiting = [future for future in self._waiting if not future.done()]
        if not waiting or self._is_stopping:
            self._is_busy = False
            return
        share_s = min(_LONGEST_S, _LOOP_SHARE * self._taken_s)
        if now_s - turn_s > _QUIET_S and now_s - self._ended_s < share_s:
            self._loop.call_soon(self._after_turn, now_s)
            return
        # The oldest call of the key that has waited longest.
        future = min(waiting, key=lambda call: self._last[self._waiting[call][0]])
        tenant, call = self._waiting.pop(future)
        self._num_made += 1
        self._last[tenant] = self._num_made
        self._made, self._since_s = future, now_s
        self._work.put((future, call))

    def _end(
        self, future: asyncio.Future[Any], result: Any, error: Exception | None, taken_s: float
    ) -> None:
        self._taken_s, self._ended_s = taken_s, time.monotonic()
        self._made = self._since_s = None
        self._is_busy = False
        settle(future, result, error)
        self._begin()

    # What follows runs on the thread.

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, call = item
            result: Any = None
            error: Any = None
            begin_s = time.monotonic()
            try:
                result = None if future.cancelled() else call()
            except BaseException as raised:
                # A future takes no StopIteration, and SystemExit must not end the waiting task.
                is_plain = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
                error = raised if is_plain else RuntimeError(repr(raised))
                traceback.clear_frames(raised.__traceback__)  # frees its memory
            taken_s = time.monotonic() - begin_s
            try:
                self._loop.call_soon_threadsafe(self._end, future, result, error, taken_s)
            except RuntimeError:
                return  # the event loop has ended
            # Keep nothing of a request in memory while waiting for the next one.
            del item, future, call, result, error


def settle(future: asyncio.Future[Any], result: Any = None, error: Exception | None = None) -> None:
    """Ends a future unless it has ended."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
