"""A forecaster that is served: requests in order, batches, sequences, answers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import counted
from fastlstm.serve.admission import Engine, Places, Reservation
from fastlstm.serve.forecast.batcher import BatchResult, DynamicBatcher, ForecastRequest
from fastlstm.serve.forecast.request import (
    InferRequest,
    input_specs,
    output_specs,
    parse_request,
    request_decoder,
)
from fastlstm.serve.forecast.sequence_store import SequenceStore
from fastlstm.serve.http.errors import ApiError
from fastlstm.serve.http.keys import NOBODY
from fastlstm.serve.http.worker import settle

if TYPE_CHECKING:
    from fastlstm.forecast.window_forecaster import Forecasts, WindowForecaster
    from fastlstm.serve.metrics import Metrics
    from fastlstm.serve.settings import Settings

Floats = NDArray[np.floating]
VERSION = "1"
_SHORT_BODY = 1 << 16
"""Bytes of a request that are parsed on the event loop; longer ones are parsed by a worker."""
_FEW_NUMBERS = 1 << 10
"""Numbers of an answer that are computed on the event loop; more are computed by a worker."""
Outputs = dict[str, Floats]


class PendingForecast(Reservation):
    """An inference request under way: its places, and the forecasts to come (`result`)."""

    def __init__(self, tenant: bytes = NOBODY) -> None:
        super().__init__(tenant)
        self.result: asyncio.Future[Forecasts] = asyncio.get_running_loop().create_future()


class ForecastEngine(Engine):
    """A forecaster behind a batcher, its inputs and outputs by name."""

    kind = "forecaster"
    scheduler: DynamicBatcher

    def __init__(
        self,
        model: WindowForecaster,
        settings: Settings,
        metrics: Metrics,
        threads: int,
        *,
        is_shared: bool = False,
    ) -> None:
        super().__init__(model.name, settings, metrics)
        self.model, self.path = model, f"/v2/models/{model.name}/infer"
        self.inputs, self.outputs = input_specs(model), output_specs(model)
        self.decoder = request_decoder(self.inputs.values())
        self._sequences = SequenceStore(
            model.input_size,
            Places(settings.max_sequences, is_shared=is_shared),
            settings.sequence_idle,
        )
        self._num_reading: Counter[bytes] = Counter()
        self.scheduler = DynamicBatcher(
            model,
            max_batch=settings.max_streams,
            max_queue=settings.max_queue,
            threads=threads,
            deliver=self._deliver,
            is_shared=is_shared,
        )

    def described(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "versions": [VERSION],
            "platform": "fastlstm_forecaster",
            "inputs": [spec.as_json() for spec in self.inputs.values()],
            "outputs": [spec.as_json() for spec in self.outputs.values()],
            "parameters": {
                "input_size": self.model.input_size,
                "horizon": self.model.horizon,
                "frequency": self.model.frequency,
            },
        }

    def update_gauges(self) -> None:
        super().update_gauges()
        self._metrics.sequences.set(len(self._sequences))

    async def read(self, pending: PendingForecast, body: bytes) -> InferRequest:
        """Parses a request; those of one key are parsed in order, long ones by a worker."""
        args, tenant = (body, self.model, self.decoder), pending.tenant
        if len(body) <= _SHORT_BODY and not self._num_reading[tenant]:
            return parse_request(*args)
        self._num_reading[tenant] += 1
        try:
            return await pending.wait(self._reader.call(parse_request, *args, tenant=tenant))
        finally:
            self._num_reading[tenant] -= 1

    def submit(self, pending: PendingForecast, request: InferRequest) -> None:
        """Queues a request's windows.

        The rows of a sequence are added here and now: a window is what the sequence held when its
        request had been read.

        Raises:
            ApiError: no room (503), too many windows or numbers (400), or the sequence's.
        """
        count = len(request.past)
        self._check_numbers(count, request)
        self.admission.reserve(pending, count)
        past, statics = request.past, request.statics
        if request.step is not None:
            static = None if statics is None else statics[0]
            rows, static = self._sequences.add(request.step, past[0], static, pending.tenant)
            past, statics = rows[None], None if static is None else static[None]
        self._note_start()
        self.scheduler.submit(ForecastRequest(pending, past, request.future, statics))

    def _check_numbers(self, count: int, request: InferRequest) -> None:
        horizon, targets = self.model.horizon, len(self.model.targets)
        values = sum(len(request.levels) if name == "quantiles" else 1 for name in request.outputs)
        number, limit = count * horizon * targets * values, self._settings.max_numbers
        if number > limit:
            message = (
                f"the answer would have {number:,} numbers ({counted(count, 'window')} x"
                f" {counted(horizon, 'step')} x {counted(targets, 'target')} x"
                f" {counted(values, 'value')} each), this server gives at most {limit:,}; send"
                " fewer windows or quantiles, or start the server with a larger --max-numbers"
            )
            raise ApiError(400, message)

    async def outputs_of(
        self, pending: PendingForecast, request: InferRequest, forecasts: Forecasts
    ) -> Outputs:
        """Returns the outputs that a request asks for, by name.

        Raises:
            ApiError: 400, the forecast is not finite, or validation had too few values for a
                quantile.
            Disconnected: the client has left.
        """
        if forecasts.parameters.numel() * (1 + len(request.levels)) <= _FEW_NUMBERS:
            return self._outputs(request, forecasts)
        return await pending.wait(
            self._writer.call(self._outputs, request, forecasts, tenant=pending.tenant)
        )

    def _outputs(self, request: InferRequest, forecasts: Forecasts) -> Outputs:
        make: dict[str, Callable[[], Any]] = {
            "forecast": forecasts.values,
            "quantiles": lambda: forecasts.quantiles(request.levels),
        }
        if "quantiles" in request.outputs:
            text = forecasts.stored.unsupported(request.levels)
            if text is not None:
                raise ApiError(400, f"{text}{request.rows_note}")
        outputs = {name: make[name]() for name in request.outputs}
        if not all(np.isfinite(values).all() for values in outputs.values()):
            message = "the forecast is not finite: the inputs are far beyond what the model knows"
            raise ApiError(400, f"{message}{request.rows_note}")
        return outputs

    def _spread(self, batch: BatchResult) -> None:
        self._progress_s = time.monotonic()
        if batch.seconds:
            self._metrics.tick.observe(batch.seconds)
            self._metrics.batch.observe(sum(len(request) for request, _ in batch.answers))
        for request, answer in batch.answers:
            if isinstance(answer, ApiError):
                self._metrics.failures.inc()
                settle(request.pending.result, error=answer)
            else:
                self._metrics.windows.inc(len(request))
                settle(request.pending.result, answer)
