"""SIGTERM, SIGHUP and Ctrl-C as a flag that a run polls, so that it can save before it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from fastlstm.system import environment
from fastlstm.system.signal_handlers import (
    ONE_SIGNAL_S,
    STOP_SIGNALS,
    Arrivals,
    handling,
    is_not_ignored,
)


@contextlib.contextmanager
def ended_like_ctrl_c(*, within_stop_flag: bool = False) -> Iterator[None]:
    """Has SIGTERM and SIGHUP raise SystemExit in the main thread, unless they have a handler or are
    ignored. In a block `within_stop_flag` there is nothing to save: all three signals end it at
    once.
    """
    handlers: dict[int, Any] = {signal.SIGTERM: _exit, signal.SIGHUP: _exit}
    if within_stop_flag:
        handlers[signal.SIGINT] = signal.default_int_handler

    def replaces(known: Any) -> bool:
        return known is signal.SIG_DFL or (within_stop_flag and is_not_ignored(known))

    with handling(handlers, replaces):
        yield


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


class StopFlag:
    """Context manager: the first signal sets the flag, the second ends the process at once. A
    second Ctrl-C at a prompt of Python or in a notebook raises KeyboardInterrupt instead.

    A line on standard error acknowledges the first signal, because saving may take a while. The
    second signal leaves stored files intact; the exit code is 128 plus its number. While
    `can_save` is False, the first Ctrl-C of a single process raises KeyboardInterrupt too.

    Ignored signals stay ignored, as under `nohup`. With several processes, a second signal within a
    second counts as the first, because a scheduler and an agent may send one each. Any second
    SIGHUP counts as the first too. Outside the main thread, where Python allows no handlers, only
    `set()` sets the flag.
    """

    def __init__(self) -> None:
        self.can_save = False
        self.name: str | None = None
        self._set_at = 0.0
        self._arrivals: Arrivals | None = None
        self._handled = contextlib.ExitStack()

    def __enter__(self) -> StopFlag:
        if environment.world_size() > 1 and threading.current_thread() is threading.main_thread():
            self._arrivals = self._handled.enter_context(Arrivals())
        handlers = dict.fromkeys(STOP_SIGNALS, self._handle)
        self._handled.enter_context(handling(handlers, is_not_ignored))
        return self

    def __exit__(self, *exc: object) -> None:
        self._handled.close()
        self._arrivals = None

    def __call__(self) -> bool:
        return self.name is not None

    def set(self, name: str = "a stop request") -> None:
        self.name = name

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None:
            if number == signal.SIGHUP:  # a closing terminal and its shell send one each
                return
            if self._arrivals is not None:
                came_at = time.monotonic() - self._arrivals.age_s()
                if came_at < self._set_at + ONE_SIGNAL_S:
                    return
            if number == signal.SIGINT and hasattr(sys, "ps1"):  # a prompt or a notebook stays
                raise KeyboardInterrupt
            os._exit(128 + number)
        self.name, self._set_at = signal.Signals(number).name, time.monotonic()
        again = (
            "press Ctrl-C again to stop" if number == signal.SIGINT else "a second SIGTERM stops"
        )
        if environment.number("LOCAL_RANK") > 0:  # another process says it
            return
        is_early = number == signal.SIGINT and not self.can_save and self._arrivals is None
        does = f"saving, then stopping; {again} at once without saving"
        does = "stopped before the first step; nothing was saved" if is_early else does
        text = f"fastlstm: {self.name}: {does}\n"
        # `print` is not reentrant: this handler may interrupt one.
        with contextlib.suppress(OSError):
            os.write(2, (("\r\x1b[2K" if os.isatty(2) else "") + text).encode())
        if is_early:
            if _is_torch_loading():  # its C++ would abort at an exception; nothing is written yet
                os._exit(128 + number)
            raise KeyboardInterrupt


def _is_torch_loading() -> bool:
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))
