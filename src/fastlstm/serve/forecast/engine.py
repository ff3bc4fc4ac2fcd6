"""The engine of a forecaster: batches of windows, sequences, answers.

Dynamic batching: one thread runs the network on all windows that arrived during the last pass.
There is no time window to wait for: what arrives while a batch is computed is the next batch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fastlstm.errors import counted
from fastlstm.serve.admission import Engine, ModelThread, Places, Reservation
from fastlstm.serve.forecast.request import (
    Floats,
    InferRequest,
    SequenceStep,
    input_specs,
    output_specs,
    parse_request,
    request_decoder,
)
from fastlstm.serve.http.errors import ENDING, ApiError, Unavailable
from fastlstm.serve.http.keys import NOBODY
from fastlstm.serve.http.worker import settle

if TYPE_CHECKING:
    from fastlstm.forecast.window_forecaster import WindowForecaster, WindowForecasts
    from fastlstm.serve.metrics import Metrics
    from fastlstm.serve.settings import Settings

Result = TypeVar("Result")
VERSION = "1"
_SHORT_BODY = 1 << 16
"""Bytes of a request that are parsed on the event loop; longer ones are parsed by a worker."""
_FEW_NUMBERS = 1 << 10
"""Numbers of an answer that are computed on the event loop; more are computed by a worker."""
Outputs = dict[str, Floats]
_TOO_MANY = (
    "the request has {count} windows, this server forecasts at most {limit} at a time; send fewer,"
    " or fewer series of a table"
)
_FAILED = "forecasting failed; send the request again, or start its sequence again"
_LOG = logging.getLogger("fastlstm.serve")


class PendingForecast(Reservation):
    """An inference request under way: its places, and the forecasts to come (`result`)."""

    def __init__(self, tenant: bytes = NOBODY) -> None:
        super().__init__(tenant)
        self.result: asyncio.Future[WindowForecasts] = asyncio.get_running_loop().create_future()


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


Answer = tuple[ForecastRequest, "WindowForecasts | ApiError"]
Pass = tuple[float, Sequence[Answer]]
"""A pass of the network: its seconds, and forecasts or an error for each request."""


class DynamicBatcher(ModelThread):
    """Runs a forecaster on one thread, which delivers each `Pass`.

    A pass has at most `max_streams` windows, and runs on `threads` threads.
    """

    too_many, status = _TOO_MANY, 503
    num_active = 0

    def __init__(
        self,
        model: WindowForecaster,
        settings: Settings,
        threads: int,
        deliver: Callable[[Pass], object],
        *,
        is_shared: bool = False,
    ) -> None:
        self._model, self._threads, self._max_batch = model, threads, settings.max_streams
        super().__init__(deliver, settings, self._max_batch, is_shared=is_shared)

    @property
    def has_work(self) -> bool:  # type: ignore[override]
        return bool(self._waiting) or self.num_active > 0

    def release(self, pending: PendingForecast) -> None:
        """Gives back a request's places; its windows are dropped unless they are being computed."""
        with self._changed:
            pending.is_cancelled = True
            self._give_back(pending)
            self._waiting = deque(r for r in self._waiting if r.pending is not pending)

    # What follows runs on the batcher's thread.

    def _run(self) -> None:
        import torch

        torch.set_num_threads(self._threads)
        while True:
            with self._changed:
                while not (self.is_stopping or self._waiting):
                    self._changed.wait()
                if self.is_stopping:
                    break
                batch = self._next_batch()
                self.num_active = sum(map(len, batch))
            start_s = time.perf_counter()
            answers = self._answers(batch)
            self._deliver((time.perf_counter() - start_s, answers))
            del batch, answers  # not kept in memory until the next pass
            self.num_active = 0
        error = Unavailable(ENDING)
        self._deliver((0.0, [(request, error) for request in self._waiting]))

    def _next_batch(self) -> list[ForecastRequest]:
        """Takes what fits into one pass: at least one request, as none is larger than a pass."""
        batch: list[ForecastRequest] = []
        room = self._max_batch
        while self._waiting and len(self._waiting[0]) <= room:
            batch.append(self._waiting.popleft())
            room -= len(batch[-1])
        return batch

    def _answers(self, batch: list[ForecastRequest]) -> list[Answer]:
        """Forecasts all requests together; if that fails, each one alone."""
        try:
            return self._forecast(batch)
        except Exception:
            _LOG.exception("a forecast of %s failed", counted(len(batch), "request"))
        if len(batch) == 1:
            return [(batch[0], ApiError(500, _FAILED))]
        return [self._answers([request])[0] for request in batch]

    def _forecast(self, batch: list[ForecastRequest]) -> list[Answer]:
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


@dataclass
class _Sequence:
    rows: Floats
    statics: Floats | None
    used_s: float


class SequenceStore:
    """The newest rows of every sequence; not thread-safe.

    A sequence belongs to the key that started it. Other keys neither see nor change it, and may
    have another sequence of the same name.

    The store keeps the newest `num_rows` rows of each sequence, which a forecast needs. It forgets
    a sequence after `idle_s` seconds without a request.
    """

    def __init__(
        self,
        num_rows: int,
        places: Places,
        idle_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_rows, self._places, self._idle_s = num_rows, places, idle_s
        self._clock = clock
        self._sequences: OrderedDict[tuple[bytes, str | int], _Sequence] = OrderedDict()

    def __len__(self) -> int:
        self._forget_idle()
        return len(self._sequences)

    def add(
        self, step: SequenceStep, rows: Floats, statics: Floats | None, tenant: bytes = NOBODY
    ) -> tuple[Floats, Floats | None]:
        """Adds rows; returns the window that ends with them, and the static values.

        Shapes: `rows` ``(n, columns)``, `statics` ``(S,)``; None keeps the earlier ones.

        Raises:
            ApiError: 404 without such a sequence and 503 without room for another, and no row is
                stored; 409 for too few rows so far, and the rows are stored.
        """
        self._forget_idle()
        key = (tenant, step.id)
        if step.starts:
            if key not in self._sequences:
                self._take_place(tenant)
            sequence = _Sequence(rows[:0], statics, 0.0)
        elif key in self._sequences:
            sequence = self._sequences[key]
        else:
            why = f"it was not started, has ended, or was idle for {self._idle_s:g} s"
            start = f"start it with sequence_start and its last {counted(self._num_rows, 'row')}"
            raise ApiError(404, f"there is no sequence {step.id!r}: {why}; {start}")
        if statics is not None:
            sequence.statics = statics
        # A new array: windows that were handed out stay as they are.
        sequence.rows = np.concatenate([sequence.rows, rows])[-self._num_rows :].copy()
        sequence.used_s = self._clock()
        self._sequences[key] = sequence
        self._sequences.move_to_end(key)
        if step.ends:
            self._forget(key)
        if len(sequence.rows) < self._num_rows:
            missing = self._num_rows - len(sequence.rows)
            what = "it has ended" if step.ends else f"they are kept, send {missing} more"
            rows_so_far = f"{counted(len(sequence.rows), 'row')} so far"
            needed = f"a forecast needs {self._num_rows}"
            raise ApiError(409, f"sequence {step.id!r} has {rows_so_far}, {needed}; {what}")
        return sequence.rows, sequence.statics

    def _take_place(self, tenant: bytes) -> None:
        if not self._places.has_room(tenant, 1):
            who, count = "the server keeps", self._places.num_taken
            if not self._places.is_full:
                who, count = "this API key has", self._places.held(tenant)
            what = "end one (sequence_end), or send this one again later"
            message = f"{who} {counted(count, 'sequence')}, the limit now; {what}"
            raise ApiError(503, message, headers={"retry-after": "5"})
        self._places.take(tenant, 1)

    def _forget(self, key: tuple[bytes, str | int]) -> None:
        del self._sequences[key]
        self._places.release(key[0], 1)

    def _forget_idle(self) -> None:
        before_s = self._clock() - self._idle_s
        while self._sequences:
            first = next(iter(self._sequences))
            if self._sequences[first].used_s >= before_s:
                return
            self._forget(first)


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
            model, settings, threads, self._deliver, is_shared=is_shared
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
        """Parses a request; requests of one key in order, long ones by a worker."""
        args, tenant = (body, self.model, self.decoder), pending.tenant
        if len(body) <= _SHORT_BODY and not self._num_reading[tenant]:
            return parse_request(*args)
        self._num_reading[tenant] += 1
        try:
            return await self.call(pending, parse_request, *args)
        finally:
            self._num_reading[tenant] -= 1

    async def call(
        self, pending: Reservation, function: Callable[..., Result], *args: Any
    ) -> Result:
        """Calls a function on the thread that reads, when it is the turn of the request's key."""
        return await pending.wait(self._reader.call(function, *args, tenant=pending.tenant))

    def submit(self, pending: PendingForecast, request: InferRequest) -> None:
        """Queues a request's windows; raises ApiError if they have no room or the store refuses.

        A sequence gets its rows here and now, so that a window has the rows that were known when
        its request had been read.
        """
        count = len(request.past)
        values = [len(request.levels) if name == "quantiles" else 1 for name in request.outputs]
        self.check_numbers(count, sum(values))
        self.scheduler.reserve(pending, count)
        past, statics = request.past, request.statics
        if request.step is not None:
            static = None if statics is None else statics[0]
            rows, static = self._sequences.add(request.step, past[0], static, pending.tenant)
            past, statics = rows[None], None if static is None else static[None]
        self._note_start()
        self.scheduler.submit(ForecastRequest(pending, past, request.future, statics))

    def check_numbers(self, count: int, values: int) -> None:
        horizon, targets = self.model.horizon, len(self.model.targets)
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
        self, pending: PendingForecast, request: InferRequest, forecasts: WindowForecasts
    ) -> Outputs:
        """Returns the outputs that a request asks for, by name.

        Raises ApiError 400 where the forecast is not finite, or validation had too few values for
        a quantile.
        """
        if forecasts.parameters.numel() * (1 + len(request.levels)) <= _FEW_NUMBERS:
            return self._outputs(request, forecasts)
        return await pending.wait(
            self._writer.call(self._outputs, request, forecasts, tenant=pending.tenant)
        )

    def _outputs(self, request: InferRequest, forecasts: WindowForecasts) -> Outputs:
        levels = request.levels if "quantiles" in request.outputs else ()
        if levels and (text := forecasts.stored.unsupported(levels)) is not None:
            raise ApiError(400, f"{text}{request.rows_note}")
        found = forecasts.arrays(levels)
        outputs = {name: found[name] for name in request.outputs}
        if not all(np.isfinite(values).all() for values in outputs.values()):
            message = "the forecast is not finite: the inputs are far beyond what the model knows"
            raise ApiError(400, f"{message}{request.rows_note}")
        return outputs

    def _spread(self, output: Pass) -> None:
        seconds, answers = output
        self._progress_s = time.monotonic()
        if seconds:
            self._metrics.tick.observe(seconds)
            self._metrics.batch.observe(sum(len(request) for request, _ in answers))
        for request, answer in answers:
            if isinstance(answer, ApiError):
                self._metrics.failures.inc()
                settle(request.pending.result, error=answer)
            else:
                self._metrics.windows.inc(len(request))
                settle(request.pending.result, answer)
