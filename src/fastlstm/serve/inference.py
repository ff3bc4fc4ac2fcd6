"""The routes of the Open Inference Protocol, version 2: /v2/..."""

from __future__ import annotations

import asyncio
import importlib.metadata
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fastlstm.serve.body import HEADER_LENGTH, read_tensor_bytes, until_left
from fastlstm.serve.channel import Disconnected
from fastlstm.serve.errors import ApiError, shown
from fastlstm.serve.forecast_engine import VERSION
from fastlstm.serve.sender import Sender

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from fastlstm.infer.forecast_windows import Forecasts
    from fastlstm.serve.access import Record
    from fastlstm.serve.forecast_engine import ForecastEngine, Ticket
    from fastlstm.serve.forecast_request import Asked
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
        self._service.served  # noqa: B018  raises while there is none
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
        engine.scheduler.require_room(tenant)
        settings = service.settings
        body, header_length = await read_tensor_bytes(
            scope, receive, settings.max_body, settings.body_timeout
        )
        asked = await engine.read(body, header_length)
        ticket = engine.submit(asked, tenant)
        record.windows = len(ticket.windows)
        sender = Sender(scope, send, ticket.cancel, record, service.metrics)
        watch = asyncio.create_task(until_left(receive, ticket.cancel))
        service.stalls.senders.add(sender)
        try:
            found = await _answer(ticket, asked, record)
            answer, json_length = await engine.encode(asked, found)
            kind, more = b"application/json", []
            if json_length is not None:
                kind = b"application/octet-stream"
                more.append((HEADER_LENGTH, b"%d" % json_length))
            await sender.start(kind, len(answer), *more)
            await sender.body(answer, is_last=True)
        finally:
            service.stalls.senders.discard(sender)
            engine.release(ticket)
            watch.cancel()


async def _answer(ticket: Ticket, asked: Asked, record: Record) -> Forecasts:
    """Waits for the forecasts, as long as the client does."""
    end_s = None if asked.timeout_s is None else record.start_s + asked.timeout_s
    try:
        async with asyncio.timeout_at(end_s):
            # Shielded: a cancelled future is the client's leaving, and nothing else.
            return await asyncio.shield(ticket.answer)
    except TimeoutError:
        kept = "" if asked.step is None else "; its rows were added to the sequence"
        raise ApiError(504, f"there was no forecast within the request's timeout{kept}") from None
    except asyncio.CancelledError:
        if ticket.answer.cancelled():
            raise Disconnected from None
        raise
