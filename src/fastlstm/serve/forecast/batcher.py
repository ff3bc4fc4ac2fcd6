"""Dynamic batching: one thread runs the network on all windows that arrived during the last pass.

There is no time window to wait for: what arrives while a batch is computed is the next batch.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastlstm.serve.admission import Admission, ModelThread
from fastlstm.serve.http.errors import ENDING, ApiError, Unavailable

if TYPE_CHECKING:
    from fastlstm.forecast.window_forecaster import Forecasts, WindowForecaster
    from fastlstm.serve.forecast.engine import PendingForecast

Floats = NDArray[np.floating]

_TOO_MANY = (
    "the request has {count} windows, this server forecasts at most {limit} at a time; send fewer"
)
_FAILED = "forecasting failed; send the request again, of a sequence from its start"
_LOG = logging.getLogger("fastlstm.serve")


@dataclass(frozen=True, eq=False)
class ForecastRequest:
    """The windows of one request, and who receives their forecasts.

    Shapes: `past` ``(B, L, columns)``, `future` ``(B, h, future columns)``, `statics` ``(B, S)``.
    """

    pending: PendingForecast
    past: Floats
    future: Floats | None
    statics: Floats | None

    def __len__(self) -> int:
        return len(self.past)


class BatchResult(NamedTuple):
    """A pass of the network: its duration, and forecasts or an error for each request."""

    seconds: float
    answers: Sequence[tuple[ForecastRequest, Forecasts | ApiError]]


class DynamicBatcher(ModelThread):
    """Runs a forecaster on a thread of its own, which delivers a `BatchResult` per pass.

    Args:
        max_batch: windows of one pass.
        max_queue: windows that may wait beside them.
        threads: of each pass.
        deliver: as of ModelThread.
        is_shared: there are several API keys; none gets all places.
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
        self._model, self._threads, self._max_batch = model, threads, max_batch
        self.num_active = 0
        limits: Any = {"limit": max_batch, "too_many": _TOO_MANY, "status": 503}
        places = Admission(max_batch + max_queue, is_shared=is_shared, **limits)
        super().__init__(places, deliver)

    @property
    def has_work(self) -> bool:  # type: ignore[override]
        return bool(self._waiting) or self.num_active > 0

    def release(self, pending: PendingForecast) -> None:
        """Gives back a request's places; its windows are dropped unless they are being computed."""
        with self._changed:
            pending.is_cancelled = True
            self.admission.release(pending)
            self._waiting = deque(r for r in self._waiting if r.pending is not pending)

    # What follows runs on the batcher's thread.

    def _run(self) -> None:
        import torch

        torch.set_num_threads(self._threads)
        while True:
            with self._changed:
                while not (self.admission.is_stopping or self._waiting):
                    self._changed.wait()
                if self.admission.is_stopping:
                    break
                batch = self._next_batch()
                self.num_active = sum(map(len, batch))
            self._compute(batch)
            del batch  # not kept in memory until the next pass
            self.num_active = 0
        error = Unavailable(ENDING)
        self._deliver(BatchResult(0.0, [(request, error) for request in self._waiting]))

    def _next_batch(self) -> list[ForecastRequest]:
        """Takes what fits into one pass: at least one request, as none is larger than a pass."""
        batch: list[ForecastRequest] = []
        room = self._max_batch
        while self._waiting and len(self._waiting[0]) <= room:
            batch.append(self._waiting.popleft())
            room -= len(batch[-1])
        return batch

    def _compute(self, batch: list[ForecastRequest]) -> None:
        start_s = time.perf_counter()
        answers: list[tuple[ForecastRequest, Forecasts | ApiError]]
        try:
            answers = self._forecast(batch)
        except Exception:
            _LOG.exception("a pass of the network for %d requests failed", len(batch))
            answers = [(request, self._alone(request, len(batch))) for request in batch]
        self._deliver(BatchResult(time.perf_counter() - start_s, answers))

    def _alone(self, request: ForecastRequest, num_failed: int) -> Forecasts | ApiError:
        """Forecasts one of several requests whose pass failed."""
        if num_failed > 1:
            try:
                return self._forecast([request])[0][1]
            except Exception:
                _LOG.exception("a request failed; the others continue")
        return ApiError(500, _FAILED)

    def _forecast(
        self, batch: list[ForecastRequest]
    ) -> list[tuple[ForecastRequest, Forecasts | ApiError]]:
        forecasts = self._model.run(
            np.concatenate([request.past for request in batch]),
            _joined([request.future for request in batch]),
            _joined([request.statics for request in batch]),
        )
        firsts = np.cumsum([0, *map(len, batch)]).tolist()
        return [
            (request, forecasts.part(first, len(request)))
            for request, first in zip(batch, firsts, strict=False)
        ]


def _joined(parts: Sequence[Floats | None]) -> Floats | None:
    arrays = [part for part in parts if part is not None]
    return np.concatenate(arrays) if arrays else None
