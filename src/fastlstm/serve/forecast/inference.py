"""The routes of the Open Inference Protocol, version 2: /v2/..."""

from __future__ import annotations

import asyncio
import importlib.metadata
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fastlstm.serve.forecast.engine import VERSION, PendingForecast
from fastlstm.serve.http.body import HEADER_LENGTH
from fastlstm.serve.http.errors import ApiError, no_model, shown
from fastlstm.serve.http.sender import Sender

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from fastlstm.forecast.window_forecaster import Forecasts
    from fastlstm.serve.forecast.engine import ForecastEngine
    from fastlstm.serve.forecast.request import InferRequest
    from fastlstm.serve.forecast.tensors import Answer
    from fastlstm.serve.http.access import Record
    from fastlstm.serve.service import Service

EXTENSIONS = ("binary_tensor_data", "parameters", "sequence", "sequence(string_id)")


def inference_routes(service: Service) -> list[Route]:
    """Returns the routes."""

    async def server(request: Request) -> Response:
        version = importlib.metadata.version("fastlstm")
        return JSONResponse({"name": "fastlstm", "version": version, "extensions": EXTENSIONS})

    async def live(request: Request) -> Response:
        is_live = not service.is_stuck
        return JSONResponse({"live": is_live}, 200 if is_live else 503)

    async def ready(request: Request) -> Response:
        service.require_ready()
        return JSONResponse({"ready": True})

    async def model(request: Request) -> Response:
        return JSONResponse(_engine(service, request.path_params).described())

    async def model_ready(request: Request) -> Response:
        return JSONResponse({"name": _engine(service, request.path_params).name, "ready": True})

    models = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
    return [
        Route("/v2", server),
        Route("/v2/health/live", live),
        Route("/v2/health/ready", ready),
        *[Route(path, model) for path in models],
        *[Route(f"{path}/ready", model_ready) for path in models],
        *[Route(f"{path}/infer", Infer(service), methods=["POST"]) for path in models],
    ]


def _engine(service: Service, path: Mapping[str, str]) -> ForecastEngine:
    """Returns the model that a path names."""
    engine = service.forecast_engine
    if path["model"] != engine.name:
        raise no_model(path["model"], engine.name)
    version = path.get("version", VERSION)
    if version != VERSION:
        message = f"'{engine.name}' has no version '{shown(version)}', it has {VERSION} only"
        raise ApiError(404, message)
    return engine


class Infer:
    """Answers inference requests, an ASGI application."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, record = self._service, scope["state"]["record"]
        engine = _engine(service, scope["path_params"])
        pending = PendingForecast(scope["state"]["tenant"])
        # A place is taken before the body is read: so the memory of bodies is bounded, too.
        engine.admission.reserve(pending)
        try:
            with Sender(scope, receive, send, pending.leave, service) as sender:
                body = await service.bodies.read_tensors(scope, receive)
                sender.watch_client()
                request = await engine.read(pending, *body)
                del body
                engine.submit(pending, request)
                record.windows = pending.num_places
                forecasts = await _forecasts(pending, request, record)
                answer = await engine.encode(pending, request, forecasts)
                del forecasts  # shares memory with all of its pass
                await _send(answer, engine, pending, sender)
        finally:
            engine.scheduler.release(pending)


async def _forecasts(pending: PendingForecast, request: InferRequest, record: Record) -> Forecasts:
    """Waits for the forecasts, until the request's timeout."""
    end_s = None if request.timeout_s is None else record.start_s + request.timeout_s
    try:
        async with asyncio.timeout_at(end_s):
            return await pending.wait(pending.result)
    except TimeoutError:
        message = f"there was no forecast within the request's timeout{request.rows_note}"
        raise ApiError(504, message) from None


async def _send(
    answer: Answer, engine: ForecastEngine, pending: PendingForecast, sender: Sender
) -> None:
    kind, more = b"application/json", []
    if answer.json_length is not None:
        kind = b"application/octet-stream"
        more.append((HEADER_LENGTH, b"%d" % answer.json_length))
    await sender.start(kind, answer.length, *more)
    if answer.length is not None:
        await sender.body(b"".join(answer.parts), is_last=True)
        return
    while part := await pending.wait(engine.next_part(pending, answer)):
        await sender.body(part)
    await sender.body(b"", is_last=True)
