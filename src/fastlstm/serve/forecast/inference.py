"""The routes of the Open Inference Protocol, version 2: /v2/..."""

from __future__ import annotations

import asyncio
import importlib.metadata
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fastlstm.serve.forecast.engine import VERSION
from fastlstm.serve.http.body import HEADER_LENGTH, until_left
from fastlstm.serve.http.errors import ApiError, shown
from fastlstm.serve.http.sender import Sender

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from fastlstm.forecast.window_forecaster import Forecasts
    from fastlstm.serve.forecast.engine import ForecastEngine, PendingForecast
    from fastlstm.serve.forecast.request import Asked
    from fastlstm.serve.http.access import Record
    from fastlstm.serve.service import Service

EXTENSIONS = ("binary_tensor_data", "parameters", "sequence", "sequence(string_id)")


def inference_routes(service: Service) -> list[Route]:
    """Returns the routes of the protocol."""
    pages, infer = _Pages(service), Infer(service)
    models = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
    return [
        Route("/v2", pages.server),
        Route("/v2/health/live", pages.live),
        Route("/v2/health/ready", pages.ready),
        *[Route(path, pages.model) for path in models],
        *[Route(f"{path}/ready", pages.model_ready) for path in models],
        *[Route(f"{path}/infer", infer, methods=["POST"]) for path in models],
    ]


class _Pages:
    """Everything but the inference."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def server(self, request: Request) -> Response:
        version = importlib.metadata.version("fastlstm")
        found = {"name": "fastlstm", "version": version, "extensions": list(EXTENSIONS)}
        return JSONResponse(found)

    async def live(self, request: Request) -> Response:
        is_live = not self._service.is_stuck
        return JSONResponse({"live": is_live}, 200 if is_live else 503)

    async def ready(self, request: Request) -> Response:
        self._service.require_ready()
        return JSONResponse({"ready": True})

    async def model(self, request: Request) -> Response:
        engine = _engine(self._service, request.path_params)
        return JSONResponse(engine.described())

    async def model_ready(self, request: Request) -> Response:
        engine = _engine(self._service, request.path_params)
        return JSONResponse({"name": engine.name, "ready": True})


def _engine(service: Service, path: Mapping[str, str]) -> ForecastEngine:
    """Returns the model that a path names."""
    engine = service.forecasts
    if path["model"] != engine.name:
        raise ApiError(
            404,
            f"there is no model '{shown(path['model'])}' here; this server serves '{engine.name}'",
        )
    version = path.get("version", VERSION)
    if version != VERSION:
        raise ApiError(
            404, f"'{engine.name}' has no version '{shown(version)}', it has {VERSION} only"
        )
    return engine


class Infer:
    """Answers inference requests, an ASGI application.

    Args:
        service: the server.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        service, record = self._service, scope["state"]["record"]
        tenant = scope["state"]["tenant"]
        engine = _engine(service, scope["path_params"])
        # The place is taken before the body comes: what is read for a request is bounded, too.
        ticket = engine.admit(tenant)
        sender = Sender(scope, send, ticket.leave, record, service.metrics)
        watch: asyncio.Task[None] | None = None
        service.stalls.senders.add(sender)
        try:
            body = await service.bodies.read_tensors(scope, receive)
            watch = asyncio.create_task(until_left(receive, ticket.leave))
            asked = await engine.read(ticket, *body)
            del body
            engine.submit(ticket, asked)
            record.windows = ticket.num_places
            found = await _forecasts(ticket, asked, record)
            answer = await engine.encode(ticket, asked, found)
            del found  # shares memory with all of its pass
            kind, more = b"application/json", []
            if answer.json_length is not None:
                kind = b"application/octet-stream"
                more.append((HEADER_LENGTH, b"%d" % answer.json_length))
            await sender.start(kind, answer.length, *more)
            if answer.length is not None:
                await sender.body(b"".join(answer.parts), is_last=True)
                return
            while part := await ticket.wait(engine.next_part(ticket, answer)):
                await sender.body(part)
            await sender.body(b"", is_last=True)
        finally:
            service.stalls.senders.discard(sender)
            engine.release(ticket)
            if watch is not None:
                watch.cancel()


async def _forecasts(ticket: PendingForecast, asked: Asked, record: Record) -> Forecasts:
    """Waits for the forecasts, until the request's timeout."""
    end_s = None if asked.timeout_s is None else record.start_s + asked.timeout_s
    try:
        async with asyncio.timeout_at(end_s):
            return await ticket.wait(ticket.answer)
    except TimeoutError:
        kept = "" if asked.step is None else "; its rows were added to the sequence"
        raise ApiError(504, f"there was no forecast within the request's timeout{kept}") from None
