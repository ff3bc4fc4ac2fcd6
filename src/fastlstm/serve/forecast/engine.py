"""A loaded forecaster that is served: requests in their order, batches, sequences, answers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fastlstm.errors import counted
from fastlstm.serve.forecast.batcher import BatchResult, DynamicBatcher, ForecastRequest
from fastlstm.serve.forecast.request import Asked, input_specs, output_specs, parse_request
from fastlstm.serve.forecast.sequence_store import SequenceStore
from fastlstm.serve.forecast.tensors import Answer, encode_answer
from fastlstm.serve.http.channel import Presence
from fastlstm.serve.http.errors import ApiError
from fastlstm.serve.http.keys import NOBODY
from fastlstm.serve.places import Places
from fastlstm.serve.worker import Worker

if TYPE_CHECKING:
    from fastlstm.forecast.window_forecaster import Forecasts, WindowForecaster
    from fastlstm.serve.metrics import Metrics
    from fastlstm.serve.settings import Settings

VERSION = "1"
_SHORT_BODY = 1 << 16
"""Bytes that are read at once; more are read on another thread meanwhile."""
_FEW_NUMBERS = 1 << 10
"""Numbers of an answer that are written at once; more are written on another thread."""


class PendingForecast(Presence):
    """What one request holds, from its headers until its answer was sent.

    Attributes:
        num_places: held.
        windows: to be forecast, once the request was read.
        answer: comes when they are.
    """

    def __init__(self, tenant: bytes = NOBODY) -> None:
        super().__init__(tenant)
        self.num_places = 1
        self.windows: ForecastRequest | None = None
        self.answer: asyncio.Future[Forecasts] = asyncio.get_running_loop().create_future()

    def leave(self) -> None:
        """Nobody wants the answer any more."""
        super().leave()
        self.answer.cancel()
        if self.windows is not None:
            self.windows.is_cancelled = True


class ForecastEngine:
    """A forecaster behind batches; to be made on the event loop that answers the clients.

    Args:
        model: the forecaster.
        settings: the server's.
        metrics: counts.
        threads: of each pass of the network.
        is_shared: by several keys.

    Attributes:
        name: what clients call the model.
        model: as given.
        scheduler: computes the batches.
        inputs: what the model takes, by name.
        outputs: what it gives.
    """

    def __init__(
        self,
        model: WindowForecaster,
        settings: Settings,
        metrics: Metrics,
        threads: int,
        *,
        is_shared: bool = False,
    ) -> None:
        self.model, self.name = model, model.name
        self.inputs, self.outputs = input_specs(model), output_specs(model)
        self._settings, self._metrics = settings, metrics
        self._loop = asyncio.get_running_loop()
        self._progress_s = time.monotonic()
        self._tickets: dict[ForecastRequest, PendingForecast] = {}
        self._sequences = SequenceStore(
            model.input_size,
            Places(settings.max_sequences, is_shared=is_shared),
            settings.sequence_idle,
        )
        self._reader, self._writer = Worker("fastlstm-reader"), Worker("fastlstm-writer")
        self._num_reading: Counter[bytes] = Counter()
        metrics.slots.set(settings.max_streams)
        self.scheduler = DynamicBatcher(
            model,
            max_batch=settings.max_streams,
            max_queue=settings.max_queue,
            threads=threads,
            deliver=self._deliver,
            is_shared=is_shared,
        )

    def described(self) -> dict[str, Any]:
        """The protocol's model metadata."""
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

    def is_stuck(self) -> bool:
        """Whether windows wait and no batch was finished, or a thread is busy, for too long."""
        idle_s = time.monotonic() - self._progress_s if self.scheduler.has_work else 0.0
        return max(idle_s, self._reader.busy_s, self._writer.busy_s) > self._settings.watchdog

    def show(self) -> None:
        """Brings the gauges up to date."""
        active = self.scheduler.num_active
        self._metrics.active.set(active)
        self._metrics.waiting.set(max(0, self.scheduler.num_held - active))
        self._metrics.sequences.set(len(self._sequences))

    def admit(self, tenant: bytes = NOBODY) -> PendingForecast:
        """Takes a place for a request that is to be read; `release` must follow.

        Raises:
            ApiError: all places, or all that a key may have, are taken, or the server is closing
                (503).
        """
        self.scheduler.reserve(1, tenant)
        return PendingForecast(tenant)

    async def read(self, ticket: PendingForecast, body: bytes, header_length: int | None) -> Asked:
        """Returns a request, checked; a key's are read one after the other, in their order.

        Raises:
            ApiError: 400, it is wrong.
            Disconnected: its client has left.
        """
        if len(body) <= _SHORT_BODY and not self._num_reading[ticket.tenant]:
            return parse_request(body, header_length, self.model, self.inputs)
        self._num_reading[ticket.tenant] += 1
        try:
            given = body, header_length, self.model, self.inputs
            return await ticket.wait(self._reader.call(parse_request, *given, tenant=ticket.tenant))
        finally:
            self._num_reading[ticket.tenant] -= 1

    def submit(self, ticket: PendingForecast, asked: Asked) -> None:
        """Has a request's windows forecast.

        The rows of a sequence are added here and now: a window is what the sequence held when its
        request had been read.

        Raises:
            ApiError: no room (503), too many windows or numbers (400), or the sequence's.
        """
        count = len(asked.past)
        self._check_numbers(count, asked)
        self.scheduler.reserve(count, ticket.tenant, ticket.num_places)
        ticket.num_places = count
        past, statics = asked.past, asked.statics
        if asked.step is not None:
            static = None if statics is None else statics[0]
            rows, static = self._sequences.add(asked.step, past[0], static, ticket.tenant)
            past, statics = rows[None], None if static is None else static[None]
        ticket.windows = ForecastRequest(past, asked.future, statics)
        if not self.scheduler.has_work:  # the time without work is no time without progress
            self._progress_s = time.monotonic()
        self.scheduler.submit(ticket.windows)
        self._tickets[ticket.windows] = ticket

    def _check_numbers(self, count: int, asked: Asked) -> None:
        horizon, targets = self.model.horizon, len(self.model.targets)
        values = sum(len(asked.levels) if name == "quantiles" else 1 for name in asked.outputs)
        number, most = count * horizon * targets * values, self._settings.max_numbers
        if number > most:
            raise ApiError(
                400,
                f"the answer would have {number:,} numbers ({counted(count, 'window')} x"
                f" {counted(horizon, 'step')} x {counted(targets, 'target')} x"
                f" {counted(values, 'value')} each), this server gives at most {most:,}; send fewer"
                " windows at a time, ask for fewer quantiles, or start the server with a larger"
                " --max-numbers",
            )

    def release(self, ticket: PendingForecast) -> None:
        """Gives back what a request holds; windows that wait are not computed any more."""
        ticket.leave()
        if ticket.windows is not None:
            self._tickets.pop(ticket.windows, None)
        self.scheduler.release(ticket.num_places, ticket.tenant)

    async def encode(self, ticket: PendingForecast, asked: Asked, found: Forecasts) -> Answer:
        """Returns the answer, whose `parts` is still to be written.

        Raises:
            ApiError: 400, the forecast is not finite, or a quantile is one for which validation had
                too few values.
            Disconnected: the client has left.
        """
        if found.parameters.numel() * (1 + len(asked.levels)) <= _FEW_NUMBERS:
            return self._encode(asked, found)
        return await ticket.wait(
            self._writer.call(self._encode, asked, found, tenant=ticket.tenant)
        )

    def next_part(self, ticket: PendingForecast, answer: Answer) -> asyncio.Future[bytes]:
        """Has the next part of an answer written; empty when there is none."""
        return self._writer.call(next, answer.parts, b"", tenant=ticket.tenant)

    def _encode(self, asked: Asked, found: Forecasts) -> Answer:
        make: dict[str, Callable[[], Any]] = {
            "forecast": found.values,
            "quantiles": lambda: found.quantiles(asked.levels),
        }
        text = found.stored.unsupported(asked.levels) if "quantiles" in asked.outputs else None
        kept = "" if asked.step is None else "; its rows were added to the sequence"
        if text is not None:
            raise ApiError(400, text + kept)
        outputs = {name: make[name]() for name in asked.outputs}
        if not all(np.isfinite(values).all() for values in outputs.values()):
            raise ApiError(
                400,
                "the forecast is not finite: the inputs are far beyond what the model knows" + kept,
            )
        head: dict[str, Any] = {"model_name": self.name, "model_version": VERSION}
        if asked.id is not None:
            head["id"] = asked.id
        binary = frozenset(name for name, is_binary in asked.outputs.items() if is_binary)
        return encode_answer(head, outputs, binary)

    def stop(self) -> None:
        """Ends every request with an error."""
        self.scheduler.stop()
        self._reader.stop()
        self._writer.stop()

    def _deliver(self, batch: BatchResult) -> None:
        try:
            self._loop.call_soon_threadsafe(self._spread, batch)
        except RuntimeError:
            pass  # the loop has ended, and its clients with it

    def _spread(self, batch: BatchResult) -> None:
        self._progress_s = time.monotonic()
        if batch.seconds:
            self._metrics.tick.observe(batch.seconds)
            self._metrics.batch.observe(sum(len(windows) for windows, _ in batch.answers))
        for windows, found in batch.answers:
            ticket = self._tickets.get(windows)
            if isinstance(found, ApiError):
                self._metrics.failures.inc()
            else:
                self._metrics.windows.inc(len(windows))
            if ticket is None or ticket.answer.done():
                continue
            if isinstance(found, ApiError):
                ticket.answer.set_exception(found)
            else:
                ticket.answer.set_result(found)
