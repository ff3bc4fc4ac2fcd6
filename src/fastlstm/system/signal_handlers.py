"""Signal handlers for the length of a block."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

ONE_SIGNAL_S = 1.0
"""To each of several processes a signal may come twice, from its agent and from a scheduler: a
second one so soon counts as the first."""


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
