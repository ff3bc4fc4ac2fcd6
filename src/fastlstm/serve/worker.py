"""Work that takes long, away from the event loop: one daemon thread, which no end waits for.

The keys take turns: a key that has much to do does not keep the others waiting.
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from fastlstm.serve.errors import ENDING, Unavailable
from fastlstm.serve.keys import NOBODY

Result = TypeVar("Result")


class Worker:
    """Makes calls one after the other, those of a key in their order.

    To be made on the loop that awaits them.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._waiting: dict[asyncio.Future[Any], tuple[bytes, Callable[[], Any]]] = {}
        self._num_made = 0
        self._last: Counter[bytes] = Counter()  # number of the newest call of each key
        self._since_s: float | None = None
        self._made: asyncio.Future[Any] | None = None
        self._is_stopping = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def busy_s(self) -> float:
        """Seconds that the call being made has taken so far; 0 where there is none."""
        since_s = self._since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def call(
        self, function: Callable[..., Result], *args: Any, tenant: bytes = NOBODY
    ) -> asyncio.Future[Result]:
        """Returns what will be the result; once cancelled, a call that still waits is dropped.

        After `stop` nothing is called: the result is the error of a server that is closing.

        Args:
            function: is called with `args`.
            args: of it.
            tenant: whose turn it takes.
        """
        future: asyncio.Future[Result] = self._loop.create_future()
        future.add_done_callback(self._drop)
        with self._changed:
            if self._is_stopping:
                future.set_exception(Unavailable(ENDING))
                return future
            self._waiting[future] = tenant, lambda: function(*args)
            self._changed.notify()
        return future

    def stop(self) -> None:
        """Ends every call with an error; one that is being made is not waited for."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
            ended = [*([] if self._made is None else [self._made]), *self._waiting]
        for future in ended:
            self._tell(future, None, Unavailable(ENDING))

    def _drop(self, future: asyncio.Future[Any]) -> None:
        with self._changed:
            self._waiting.pop(future, None)

    # What follows runs on the thread.

    def _run(self) -> None:
        while True:
            with self._changed:
                self._since_s = self._made = None
                while not (self._is_stopping or self._waiting):
                    self._changed.wait()
                if self._is_stopping:
                    return
                future, call = self._next()
                self._since_s, self._made = time.monotonic(), future
            result, error = None, None
            try:
                result = call()
            except Exception as raised:
                error = raised
                traceback.clear_frames(raised.__traceback__)  # what they had in memory
            self._tell(future, result, error)
            del future, call, result, error  # nothing of a request is kept while the next one waits

    def _next(self) -> tuple[asyncio.Future[Any], Callable[[], Any]]:
        """Takes the oldest call of the key that has waited longest for its turn."""
        future = min(self._waiting, key=lambda one: self._last[self._waiting[one][0]])
        tenant, call = self._waiting.pop(future)
        self._num_made += 1
        self._last[tenant] = self._num_made
        return future, call

    def _tell(self, future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        try:
            self._loop.call_soon_threadsafe(_settle, future, result, error)
        except RuntimeError:
            pass  # the loop has ended, and whoever waited with it


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
