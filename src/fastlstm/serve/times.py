"""Where a server's time goes: seconds of its threads and of its texts, by phase.

Always on: a clock is read a few times per call of the engine and per chunk of an answer.
"""

from __future__ import annotations

import selectors
import threading
import time
from asyncio import SelectorEventLoop

ENGINE_PHASES = ("model", "output", "blocked", "idle")
TEXT_PHASES = ("queue", "model", "output", "client")
HTTP_PHASES = ("parse", "encode", "other", "idle")


class EngineTimes:
    """Seconds of the engine's thread, and of the texts that it has, by phase.

    The thread is in one of `ENGINE_PHASES`: it runs the model ("model"), turns tokens into text
    and starts and ends texts ("output"), waits for clients to read ("blocked") or for requests
    ("idle"). A text waits for a slot ("queue"), is in a phase of the thread, or is not continued as
    its client reads too slowly ("client").
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = dict.fromkeys(ENGINE_PHASES, 0.0)
        self._texts = dict.fromkeys(TEXT_PHASES, 0.0)
        self._phase, self._since_s = "idle", time.monotonic()
        self._num_ready = self._num_held = 0

    def enter(self, phase: str) -> None:
        """Ends the current phase of the thread and begins another."""
        with self._lock:
            self._close()
            self._phase = phase

    def count(self, num_ready: int, num_held: int) -> None:
        """Says how many texts advance from now on, and how many are held up by their clients."""
        with self._lock:
            self._close()
            self._num_ready, self._num_held = num_ready, num_held

    def add_queue(self, text_s: float) -> None:
        """Adds what texts waited for a slot: their number times seconds."""
        with self._lock:
            self._texts["queue"] += text_s

    def read(self) -> tuple[dict[str, float], dict[str, float]]:
        """Returns seconds of the thread, and texts times seconds, by phase."""
        with self._lock:
            self._close()
            return dict(self._thread), dict(self._texts)

    def _close(self) -> None:
        now_s = time.monotonic()
        seconds, self._since_s = now_s - self._since_s, now_s
        phase = self._phase
        self._thread[phase] += seconds
        if phase in ("model", "output"):
            self._texts[phase] += seconds * self._num_ready
        self._texts["client"] += seconds * self._num_held


class Concurrent:
    """Things under way at the same time: their number times seconds, up to now."""

    def __init__(self) -> None:
        self._count, self._seconds, self._since_s = 0, 0.0, time.monotonic()

    def change(self, by: int) -> None:
        """Counts some that begin, or end."""
        now_s = time.monotonic()
        self._seconds += self._count * (now_s - self._since_s)
        self._count, self._since_s = self._count + by, now_s

    @property
    def seconds(self) -> float:
        """Their number times seconds."""
        return self._seconds + self._count * (time.monotonic() - self._since_s)


class HttpTimes:
    """Seconds of the event loop, and of requests; to be used on the loop only.

    Attributes:
        parse_s: requests of a usual length were parsed.
        encode_s: answers were encoded.
        texts: of requests under way.
        sends: answers that wait for their clients to read.
        idle: of the loop; None where it is not measured.
    """

    def __init__(self) -> None:
        self.parse_s = self.encode_s = 0.0
        self.texts, self.sends = Concurrent(), Concurrent()
        self.idle: TimedSelector | None = None

    def read(self) -> dict[str, float]:
        """Returns seconds of the event loop by phase."""
        found = {"parse": self.parse_s, "encode": self.encode_s, "other": 0.0, "idle": 0.0}
        if self.idle is not None:
            found["idle"] = self.idle.idle_s
            busy_s = time.monotonic() - self.idle.began_s - self.idle.idle_s
            found["other"] = max(0.0, busy_s - self.parse_s - self.encode_s)
        return found


class TimedSelector(selectors.DefaultSelector):
    """Adds up the seconds that an event loop waits for something to do.

    With them counts what the loop then waits for the interpreter, while the engine has it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.idle_s, self.began_s = 0.0, time.monotonic()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        started_s = time.monotonic()
        found = super().select(timeout)
        self.idle_s += time.monotonic() - started_s
        return found


class TimedLoop(SelectorEventLoop):
    """An event loop whose idle time is measured."""

    def __init__(self) -> None:
        self.selector = TimedSelector()
        super().__init__(self.selector)
