"""Log lines on standard error, written without blocking any request."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from fastlstm.errors import counted
from fastlstm.report.terminal import is_terminal
from fastlstm.system.redaction import redacted

if TYPE_CHECKING:
    from prometheus_client import Counter

MAX_LINES = 8192
"""Lines that may wait, some 3 MB; further ones are dropped and counted."""
_RETRY_S = 0.05
_CLOSE_S = 1.0


class Log:
    """Writes lines on a thread of its own, to people if `is_terminal`; counts those `dropped`."""

    def __init__(self, dropped: Counter) -> None:
        self._dropped, self.is_terminal = dropped, is_terminal(sys.stderr)
        self._num_unreported = 0  # dropped lines not mentioned in the log yet
        self._lines: deque[str] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def write(self, line: str) -> None:
        """Queues a line, without secrets; never blocks."""
        line = redacted(line)
        with self._changed:
            if self._is_closed or len(self._lines) >= MAX_LINES:
                self._drop(1)
                return
            self._report_dropped()
            self._lines.append(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fastlstm-log", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread once everything is written, after a second at the latest."""
        with self._changed:
            self._is_closed = True
            self._report_dropped()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _drop(self, count: int) -> None:
        self._num_unreported += count
        self._dropped.inc(count)

    def _report_dropped(self) -> None:
        if self._num_unreported:
            lost = counted(self._num_unreported, "log line")
            self._lines.append(f"fastlstm: {lost} dropped: standard error was not read in time")
            self._num_unreported = 0

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
            except (OSError, ValueError):  # the reader is gone, the disk full, or it is closed
                with self._changed:
                    self._drop(len(lines))


def _write(text: str) -> None:
    try:
        descriptor = sys.stderr.fileno()
    except (AttributeError, ValueError, OSError):  # standard error is an object
        sys.stderr.write(text)
        return
    # Past the buffer of sys.stderr: its lock, held in a write that stalls, would abort the exit.
    rest = text.encode("utf-8", "backslashreplace")
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # the pipe is non-blocking
            time.sleep(_RETRY_S)


class LogHandler(logging.Handler):
    """Sends log records, such as tracebacks, through a `Log`."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._log.write(self.format(record))
        except Exception:
            self.handleError(record)
