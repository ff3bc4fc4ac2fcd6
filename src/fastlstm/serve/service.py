"""The state that routes share: settings, counters, and the engine after loading."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.types import Receive, Scope, Send

from fastlstm.serve.admission import Engine, Reservation
from fastlstm.serve.forecast.engine import ForecastEngine
from fastlstm.serve.http.errors import ENDING, ApiError, Unavailable
from fastlstm.serve.http.keys import Keys
from fastlstm.serve.http.transfer import JSON, Bodies, Sender
from fastlstm.serve.log import Log
from fastlstm.serve.metrics import Metrics
from fastlstm.serve.settings import Settings
from fastlstm.serve.text.engine import TextEngine

Kind = TypeVar("Kind", bound=Engine)


class Service:
    """A server's state; `is_local`: it can be reached from this machine only.

    `loaded` is the engine, whatever the server's state; None while the model is loaded.
    """

    def __init__(self, settings: Settings, keys: Keys) -> None:
        self.settings, self.keys = settings, keys
        self.bodies = Bodies(settings.max_body, settings.body_timeout)
        self.metrics = Metrics()
        self.log = Log(self.metrics.log_dropped)
        self.is_draining = self.is_local = False
        self.loaded: TextEngine | ForecastEngine | None = None

    @property
    def engine(self) -> TextEngine | ForecastEngine:
        """The engine; raises Unavailable while the model is loaded or the server closes."""
        if self.is_draining:
            raise Unavailable(ENDING)
        if self.loaded is None:
            raise Unavailable("the model is still being loaded; send the request again")
        return self.loaded

    @property
    def text_engine(self) -> TextEngine:
        """The engine of a language model; raises ApiError 404 for a forecaster."""
        return self._engine_of(TextEngine, "not_a_text_model")

    @property
    def forecast_engine(self) -> ForecastEngine:
        """The engine of a forecaster; raises ApiError 404 for a language model."""
        return self._engine_of(ForecastEngine)

    def _engine_of(self, kind: type[Kind], code: str | None = None) -> Kind:
        engine = self.engine
        if isinstance(engine, kind):
            return engine
        message = f"'{engine.name}' is a {engine.kind}, not a {kind.kind}; it is at {engine.path}"
        raise ApiError(404, message, None, code)

    @asynccontextmanager
    async def admitted(
        self, engine: Engine, request: Reservation, scope: Scope, receive: Receive, send: Send,
        kinds: Mapping[bytes, int] = JSON,
    ) -> AsyncIterator[tuple[Sender, bytes]]:  # fmt: skip
        """Yields the sender and the body of a request, which holds its places meanwhile."""
        # A place is taken before the body is read: this bounds the memory of bodies.
        engine.scheduler.reserve(request)
        try:
            with Sender(scope, receive, send, request.leave, self.metrics) as sender:
                yield sender, await self._body(sender, scope, receive, kinds)
        finally:
            engine.scheduler.release(request)

    async def _body(
        self, sender: Sender, scope: Scope, receive: Receive, kinds: Mapping[bytes, int]
    ) -> bytes:
        body = await self.bodies.read(scope, receive, kinds)
        sender.watch_client()
        return body

    @property
    def is_stuck(self) -> bool:
        return self.loaded is not None and self.loaded.is_stuck()

    def require_ready(self) -> None:
        """Raises Unavailable if no requests should come: while loading, closing or stuck."""
        self.engine  # noqa: B018
        if self.is_stuck:
            raise Unavailable("requests are under way but make no progress; ask another server")

    def drain(self) -> None:
        self.is_draining = True
        if self.loaded is not None:
            self.loaded.scheduler.close()

    @property
    def num_held(self) -> int:
        return 0 if self.loaded is None else self.loaded.scheduler.num_held

    def stop(self) -> None:
        if self.loaded is not None:
            self.loaded.stop()
