"""Log lines on standard error, written without blocking any request."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time

from prometheus_client import Counter

from fastlstm.errors import counted
from fastlstm.report.terminal import is_terminal
from fastlstm.system.redaction import redacted

MAX_LINES = 8192
"""Lines that may wait, some 3 MB; further ones are dropped and counted."""
_RETRY_S = 0.05
_CLOSE_S = 1.0


class Log(logging.Handler):
    """Writes lines, and log records such as tracebacks, on a separate thread.

    Lines are plain text if `is_terminal`, else JSON. `dropped` counts lines that were not written.
    """

    def __init__(self, dropped: Counter) -> None:
        super().__init__(logging.WARNING)
        self._dropped, self.is_terminal = dropped, is_terminal(sys.stderr)
        self._num_unreported = 0  # dropped lines not mentioned in the log yet
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_LINES)
        self._guard, self._is_closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._run, name="fastlstm-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.write(self.format(record))
        except Exception:
            self.handleError(record)

    def write(self, line: str) -> None:
        """Queues a line, without secrets; never blocks."""
        line = redacted(line)
        with self._guard:
            if self._is_closed or self._lines.full():
                self._drop()
            else:
                self._lines.put_nowait(f"{self._report()}{line}\n")

    def close(self) -> None:
        """Ends the thread once everything is written; does not wait long for a reader."""
        with self._guard:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            with contextlib.suppress(queue.Full):
                self._lines.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)
        super().close()

    def _drop(self) -> None:
        self._num_unreported += 1
        self._dropped.inc()

    def _report(self) -> str:
        """Returns a line that says how many were dropped, if any, and counts anew."""
        count, self._num_unreported = self._num_unreported, 0
        lost = f"fastlstm: {counted(count, 'log line')} dropped"
        return f"{lost}: standard error was not read in time\n" if count else ""

    def _run(self) -> None:
        line: str | None = ""
        while line is not None:
            line = self._lines.get()
            try:
                _write(self._report() if line is None else line)
            except (OSError, ValueError):  # no reader, a full disk, or a closed stream
                with self._guard:
                    self._drop()


def _write(text: str) -> None:
    try:
        descriptor = sys.stderr.fileno()
    except (AttributeError, ValueError, OSError):  # standard error is an object
        sys.stderr.write(text)
        return
    # Written past the buffer of sys.stderr: a write that stalls would hold the buffer's lock, and
    # that would abort the exit.
    rest = text.encode("utf-8", "backslashreplace")
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # the pipe is non-blocking
            time.sleep(_RETRY_S)
