"""What the engines of texts and of forecasts share: a queue and its thread, workers, progress."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from fastlstm.serve.admission import Admission
from fastlstm.serve.http.worker import Worker

if TYPE_CHECKING:
    from fastlstm.serve.metrics import Metrics
    from fastlstm.serve.settings import Settings

_STOP_S = 5.0


class ModelThread:
    """Admitted requests, and the thread that runs the model on them; without HTTP or asyncio.

    Args:
        admission: the places.
        deliver: receives each call's output on this thread; must not block.

    Attributes:
        num_active: texts or windows that the model works on.
        has_work: something waits for the model, or for its next call.
    """

    num_active: int
    has_work: bool

    def __init__(self, admission: Admission, deliver: Callable[[Any], object]) -> None:
        self.admission, self._deliver = admission, deliver
        self._changed = admission.changed
        self._waiting: deque[Any] = deque()
        self._thread = threading.Thread(target=self._run, name="fastlstm-engine", daemon=True)
        self._thread.start()

    def submit(self, *requests: Any) -> None:
        """Queues requests in the order of the calls; raises Unavailable once the server stops."""
        with self._changed:
            self.admission.require_running()
            self._waiting.extend(requests)
            self._changed.notify()

    def stop(self) -> None:
        """Ends every request with an error, and the thread; does not wait for a call that hangs."""
        self.admission.stop()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        raise NotImplementedError


class Engine:
    """A model that is served; to be made on the event loop that answers the clients.

    Attributes:
        kind: of model, in words.
        name: what clients call the model.
        path: of requests to it.
        scheduler: runs it.
    """

    kind: ClassVar[str]
    path: str
    scheduler: ModelThread

    def __init__(self, name: str, settings: Settings, metrics: Metrics) -> None:
        self.name, self._settings, self._metrics = name, settings, metrics
        self._loop = asyncio.get_running_loop()
        self._progress_s = time.monotonic()
        self._reader, self._writer = Worker("fastlstm-reader"), Worker("fastlstm-writer")
        metrics.slots.set(settings.max_streams)

    @property
    def admission(self) -> Admission:
        return self.scheduler.admission

    def is_stuck(self) -> bool:
        """Whether requests made no progress, or a worker was busy, for too long."""
        idle_s = time.monotonic() - self._progress_s if self.scheduler.has_work else 0.0
        return max(idle_s, self._reader.busy_s, self._writer.busy_s) > self._settings.watchdog

    def update_gauges(self) -> None:
        active = self.scheduler.num_active
        self._metrics.active.set(active)
        self._metrics.waiting.set(max(0, self.admission.num_held - active))

    def stop(self) -> None:
        self.scheduler.stop()
        self._reader.stop()
        self._writer.stop()

    def _note_start(self) -> None:
        if not self.scheduler.has_work:  # time without work is not time without progress
            self._progress_s = time.monotonic()

    def _deliver(self, output: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and its clients with it
            self._loop.call_soon_threadsafe(self._spread, output)

    def _spread(self, output: Any) -> None:
        raise NotImplementedError
