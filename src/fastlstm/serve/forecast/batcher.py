"""Who is forecast when: one thread runs the network on all windows that came meanwhile.

There is no window of time to wait for: what arrives while a batch is computed is the next batch.
Nothing here knows of HTTP or asyncio; results go to `deliver`, once per batch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastlstm.serve.http.errors import ENDING, ApiError, QueueFull, Unavailable
from fastlstm.serve.http.keys import NOBODY
from fastlstm.serve.places import Places

if TYPE_CHECKING:
    from fastlstm.forecast.window_forecaster import Forecasts, WindowForecaster

Floats = NDArray[np.floating]

_FAILED = "forecasting failed; send the request again, of a sequence from its start"
_STOP_S = 5.0
_LOG = logging.getLogger("fastlstm.serve")


class ForecastRequest:
    """The windows of one request.

    Args:
        past: shape ``(B, L, columns)``.
        future: shape ``(B, h, columns known ahead)``, or None.
        statics: shape ``(B, S)``, or None.

    Attributes:
        is_cancelled: nobody wants them any more.
    """

    def __init__(self, past: Floats, future: Floats | None, statics: Floats | None) -> None:
        self.past, self.future, self.statics = past, future, statics
        self.is_cancelled = False

    def __len__(self) -> int:
        """B."""
        return len(self.past)


class BatchResult(NamedTuple):
    """One pass of the network.

    Attributes:
        seconds: it took.
        answers: forecasts of each request's windows, or why there are none.
    """

    seconds: float
    answers: Sequence[tuple[ForecastRequest, Forecasts | ApiError]]


class DynamicBatcher:
    """Runs a forecaster on a thread of its own.

    Args:
        model: the forecaster.
        max_batch: windows of one pass.
        max_queue: windows that may wait beside them.
        threads: of each pass.
        deliver: is called from the thread after each pass; must not block.
        is_shared: by several keys: none of them gets all places.
    """

    def __init__(
        self,
        model: WindowForecaster,
        *,
        max_batch: int,
        max_queue: int,
        threads: int,
        deliver: Callable[[BatchResult], object],
        is_shared: bool = False,
    ) -> None:
        self._model, self._threads, self._deliver = model, threads, deliver
        self.max_batch, self.max_queue = max_batch, max_queue
        self._changed = threading.Condition()
        self._waiting: deque[ForecastRequest] = deque()
        self._places = Places(max_batch + max_queue, is_shared=is_shared)
        self._num_active = 0
        self._is_closed = self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="fastlstm-engine", daemon=True)
        self._thread.start()

    @property
    def num_held(self) -> int:
        """Places taken: windows that wait, are computed or whose answer is being sent."""
        return self._places.num_taken

    @property
    def num_active(self) -> int:
        """Windows being computed."""
        return self._num_active

    @property
    def has_work(self) -> bool:
        """Whether windows wait or are computed."""
        return bool(self._waiting) or self._num_active > 0

    def reserve(self, count: int, tenant: bytes = NOBODY, held: int = 0) -> None:
        """Takes places for so many windows; to be given back by `release`, whatever comes.

        Args:
            count: windows.
            tenant: whose request it is.
            held: places among them that the request has already.

        Raises:
            ApiError: more windows than a pass takes (400), all places, or all that a key may have,
                are taken or the server is closing (503).
        """
        most = min(self.max_batch, self._places.most)
        if count > most:
            raise ApiError(
                400,
                f"the request has {count} windows, this server forecasts at most {most}"
                " at a time; send fewer",
            )
        with self._changed:
            if self._is_closed:
                raise Unavailable(ENDING)
            if not self._places.has_room(tenant, count - held, held):
                raise QueueFull(is_full=self._places.num_taken + count - held > self._places.total)
            self._places.take(tenant, count - held)

    def release(self, count: int, tenant: bytes = NOBODY) -> None:
        """Gives back places."""
        with self._changed:
            self._places.give_back(tenant, count)
            # What was given up waits for nothing: its numbers go with its place.
            self._waiting = deque(one for one in self._waiting if not one.is_cancelled)

    def submit(self, windows: ForecastRequest) -> None:
        """Has windows forecast, in the order of the calls."""
        with self._changed:
            if self._is_stopping:
                raise Unavailable(ENDING)
            self._waiting.append(windows)
            self._changed.notify()

    def close(self) -> None:
        """Admits nothing more; what is admitted goes on."""
        self._is_closed = True

    def stop(self) -> None:
        """Ends every request with an error, and the thread; a frozen pass is not waited for."""
        with self._changed:
            self._is_closed = self._is_stopping = True
            self._changed.notify()
        self._thread.join(_STOP_S)

    # What follows runs on the thread.

    def _run(self) -> None:
        import torch

        torch.set_num_threads(self._threads)
        while True:
            with self._changed:
                while not (self._is_stopping or self._waiting):
                    self._changed.wait()
                if self._is_stopping:
                    break
                batch = self._taken()
                self._num_active = sum(map(len, batch))
            if batch:
                self._compute(batch)
                self._num_active = 0
        error = Unavailable(ENDING)
        self._deliver(BatchResult(0.0, [(windows, error) for windows in self._waiting]))

    def _taken(self) -> list[ForecastRequest]:
        """Takes what fits into one pass, without what nobody wants any more."""
        batch: list[ForecastRequest] = []
        room = self.max_batch
        while self._waiting and (self._waiting[0].is_cancelled or len(self._waiting[0]) <= room):
            windows = self._waiting.popleft()
            if not windows.is_cancelled:
                batch.append(windows)
                room -= len(windows)
        return batch

    def _compute(self, batch: list[ForecastRequest]) -> None:
        start_s = time.perf_counter()
        answers: list[tuple[ForecastRequest, Forecasts | ApiError]]
        try:
            answers = self._forecast(batch)
        except Exception:
            _LOG.exception("a pass of the network for %d requests failed", len(batch))
            answers = [(windows, self._alone(windows, len(batch))) for windows in batch]
        self._deliver(BatchResult(time.perf_counter() - start_s, answers))

    def _alone(self, windows: ForecastRequest, num_failed: int) -> Forecasts | ApiError:
        """Returns the forecasts of one of so many requests whose pass failed."""
        if num_failed > 1:
            try:
                return self._forecast([windows])[0][1]
            except Exception:
                _LOG.exception("a request failed; the others go on")
        return ApiError(500, _FAILED)

    def _forecast(
        self, batch: list[ForecastRequest]
    ) -> list[tuple[ForecastRequest, Forecasts | ApiError]]:
        found = self._model.run(
            np.concatenate([windows.past for windows in batch]),
            _joined([windows.future for windows in batch]),
            _joined([windows.statics for windows in batch]),
        )
        firsts = np.cumsum([0, *map(len, batch)]).tolist()
        return [
            (windows, found.part(first, len(windows)))
            for windows, first in zip(batch, firsts, strict=False)
        ]


def _joined(parts: Sequence[Floats | None]) -> Floats | None:
    found = [part for part in parts if part is not None]
    return np.concatenate(found) if found else None
