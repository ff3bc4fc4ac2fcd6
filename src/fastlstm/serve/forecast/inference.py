"""The routes of the Open Inference Protocol, version 2: /v2/..."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from fastlstm.report.markup import clipped
from fastlstm.serve.forecast.engine import VERSION, ForecastEngine, Outputs, PendingForecast
from fastlstm.serve.forecast.request import NO_BINARY
from fastlstm.serve.http.errors import MAX_SHOWN, ApiError, Disconnected, no_model
from fastlstm.serve.http.transfer import Sender
from fastlstm.serve.service import Service

EXTENSIONS = ("parameters", "sequence", "sequence(string_id)")
_BINARY = b"inference-header-content-length"
_SLICE = 1 << 12
"""Numbers encoded at a time; an answer with no more numbers is sent whole, with its length."""


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
    engine = service.forecast_engine
    if path["model"] != engine.name:
        raise no_model(path["model"], engine.name)
    version = path.get("version", VERSION)
    if version != VERSION:
        message = (
            f"'{engine.name}' has no version '{clipped(version, MAX_SHOWN)}', it has {VERSION} only"
        )
        raise ApiError(404, message)
    return engine


@dataclass
class Infer:
    """Answers inference requests, an ASGI application."""

    _service: Service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, record = self._service, scope["state"]["record"]
        engine = _engine(service, scope["path_params"])
        if any(name == _BINARY for name, _ in scope["headers"]):
            raise ApiError(400, NO_BINARY, closes=True)
        pending = PendingForecast(scope["state"]["tenant"])
        async with service.admitted(engine, pending, scope, receive, send) as (sender, body):
            request = await engine.read(pending, body)
            del body
            engine.submit(pending, request)
            record.windows = pending.num_places
            forecasts = await pending.wait(pending.result)
            outputs = await engine.outputs_of(pending, request, forecasts)
            del forecasts  # shares memory with all of its pass
            head = {"model_name": engine.name, "model_version": VERSION}
            head |= {} if request.id is None else {"id": request.id}
            await _send(head, outputs, pending, sender, service.bodies.turns)


async def _send(
    head: dict[str, str],
    outputs: Outputs,
    pending: PendingForecast,
    sender: Sender,
    turns: asyncio.Semaphore,
) -> None:
    parts = answer_parts(head, outputs)
    if sum(values.size for values in outputs.values()) <= _SLICE:
        whole = b"".join(parts)
        await sender.start(b"application/json", len(whole))
        await sender.body(whole, is_last=True)
        return
    await sender.start(b"application/json")
    part = b"0"
    while part:
        async with turns:  # a few parts of all answers in each turn of the event loop
            part = next(parts, b"")
            await asyncio.sleep(0)
        if pending.has_left:
            raise Disconnected
        await sender.body(part, is_last=not part)


def answer_parts(head: Mapping[str, str], outputs: Outputs) -> Iterator[bytes]:
    """Yields the JSON of an answer, `head` and the outputs, so many numbers at a time."""
    encode = msgspec.json.encode
    text = encode(head)[:-1] + b',"outputs":['
    for place, (name, values) in enumerate(outputs.items()):
        datatype = f"FP{8 * values.itemsize}"
        tensor = {"name": name, "shape": list(values.shape), "datatype": datatype}
        text += (b"," if place else b"") + encode(tensor)[:-1] + b',"data":['
        flat = values.ravel()
        for first in range(0, flat.size, _SLICE):
            part = encode(flat[first : first + _SLICE].tolist())[1:-1]
            yield text + (b"," + part if first else part)
            text = b""
        text += b"]}"
    yield text + b"]}"
