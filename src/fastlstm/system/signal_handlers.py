"""Signal handlers for the length of a block, and when a signal came."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

STOP_SIGNALS: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""From a scheduler, a keyboard, and a terminal or SSH session that closes."""
ONE_SIGNAL_S = 1.0
"""To each of several processes a signal may come twice, from its agent and from a scheduler: a
second one so soon counts as the first."""


def is_not_ignored(known: Any) -> bool:
    """Returns whether a handler may be replaced: `nohup` and shells have signals ignored."""
    return known is not signal.SIG_IGN


@contextmanager
def handling(handlers: Mapping[int, Any], replaces: Callable[[Any], bool]) -> Iterator[None]:
    """Sets handlers within the block, and what was there before at its end; in the main thread.

    Args:
        handlers: by signal number.
        replaces: returns whether the handler that is there may be replaced.
    """
    before = dict[int, Any]()
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            if replaces(signal.getsignal(number)):
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Arrivals:
    """Context manager of the main thread: when the newest signal came that Python handles.

    A handler runs only where the main thread is back from native code, which may take seconds.
    """

    def __enter__(self) -> Arrivals:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.set_wakeup_fd(self._before)
        os.close(self._read)
        os.close(self._write)

    def age_s(self) -> float:
        """Returns how many seconds ago it came: when the pipe was last written to."""
        return max(0.0, time.time() - os.fstat(self._read).st_mtime)
