"""Signal handlers during a block, and the time of the newest signal."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

STOP_SIGNALS: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Sent by a scheduler, a keyboard, and a terminal or SSH session that closes."""
ONE_SIGNAL_S = 1.0
"""A second signal this soon counts as the first: an agent and a scheduler may both send one."""


def is_not_ignored(known: Any) -> bool:
    """Returns whether a handler may be replaced: `nohup` and shells ignore some signals."""
    return known is not signal.SIG_IGN


@contextmanager
def handling(handlers: Mapping[int, Any], replaces: Callable[[Any], bool]) -> Iterator[None]:
    """Sets handlers, by signal number, during the block, in the main thread only, where `replaces`
    returns that the present handler may be replaced."""
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
    """Context manager of the main thread that records when the newest signal arrived.

    A Python handler runs only after the main thread returns from native code, seconds later.
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
        """Returns the seconds since the newest signal arrived, by the last write to the pipe."""
        return max(0.0, time.time() - os.fstat(self._read).st_mtime)
