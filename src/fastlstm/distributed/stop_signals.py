"""What a signal to the agent of `--nproc` comes to: its processes save, then all end."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from fastlstm.system.processes import children
from fastlstm.system.signal_handlers import ONE_SIGNAL_S, STOP_SIGNALS, handling, is_not_ignored


class StopSignals:
    """Passes the first signal on to the processes, and waits as long as they take to save.

    torch's agent would kill them after its shutdown timeout, and see a second signal only then.
    Here the second one kills them at once. One that comes within a second of the first counts as
    the same: schedulers send it to every process. So does a second SIGHUP: a
    terminal that closes and its shell send one each.

    Args:
        verdict: the file that says that the command is over, in a folder of its own: a process
            that is started after a signal ends at once.

    Attributes:
        number: of the first signal, 0 before it.
    """

    def __init__(self, verdict: Path) -> None:
        self._verdict, self.number, self._came_at = verdict, 0, 0.0

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handles the signals within the block; one that is ignored stays so."""
        handlers = dict[int, Any].fromkeys(STOP_SIGNALS, self._handle)
        try:
            with handling(handlers, is_not_ignored):
                yield
        finally:
            logging.disable(logging.NOTSET)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number, self._came_at = number, time.monotonic()
            with suppress(OSError):
                self._verdict.touch()
            logging.disable(logging.ERROR)  # torch's, of processes that the signal has ended
            _send(number)
        elif number != signal.SIGHUP and time.monotonic() >= self._came_at + ONE_SIGNAL_S:
            _send(signal.SIGKILL)
            shutil.rmtree(self._verdict.parent, ignore_errors=True)
            os._exit(128 + number)  # torch would wait for what is dead already


def _send(number: int) -> None:
    for process in children():
        with suppress(ProcessLookupError):
            os.kill(process, number)
