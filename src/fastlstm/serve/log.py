"""Lines on standard error that nobody waits for: a reader who stalls holds up no request."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from fastlstm.errors import counted

if TYPE_CHECKING:
    from prometheus_client import Counter

MAX_LINES = 8192
"""That wait to be written, some 3 MB; what comes then is dropped, and counted."""
_RETRY_S = 0.05
_CLOSE_S = 1.0


class Log:
    """Writes lines on a thread of its own, which begins with the first one.

    Args:
        dropped: counts the lines that were not written.
    """

    def __init__(self, dropped: Counter) -> None:
        self._dropped = dropped
        self._num_unsaid = 0  # dropped, and no line says so yet
        self._lines: deque[str] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def write(self, line: str) -> None:
        """Has a line written; never waits."""
        with self._changed:
            if self._is_closed or len(self._lines) >= MAX_LINES:
                self._drop(1)
                return
            self._say_dropped()
            self._lines.append(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fastlstm-log", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread once everything is written, or soon if nobody reads."""
        with self._changed:
            self._is_closed = True
            self._say_dropped()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _drop(self, count: int) -> None:
        self._num_unsaid += count
        self._dropped.inc(count)

    def _say_dropped(self) -> None:
        if self._num_unsaid:
            lost = counted(self._num_unsaid, "log line")
            text = f"fastlstm: {lost} dropped: standard error was not read in time"
            self._lines.append(text)
            self._num_unsaid = 0

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._lines or self._is_closed):
                    self._changed.wait()
                if not self._lines:
                    return
                lines = [self._lines.popleft() for _ in range(min(64, len(self._lines)))]
            try:
                _write("".join(f"{line}\n" for line in lines))
            except (OSError, ValueError):  # the reader has gone, the disk is full, or it is closed
                with self._changed:
                    self._drop(len(lines))


def _write(text: str) -> None:
    try:
        descriptor = sys.stderr.fileno()
    except (AttributeError, ValueError, OSError):  # standard error was replaced by an object
        sys.stderr.write(text)
        return
    # Past the buffer of sys.stderr: its lock, held in a write that stalls, would abort the exit.
    rest = text.encode("utf-8", "backslashreplace")
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # someone made the pipe non-blocking
            time.sleep(_RETRY_S)


class LogHandler(logging.Handler):
    """Sends what is logged, such as a traceback, the same way as the lines of requests."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Has one record written."""
        try:
            self._log.write(self.format(record))
        except Exception:
            self.handleError(record)
