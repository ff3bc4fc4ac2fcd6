"""The ASGI application: its routes, log, counters and keys."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from fastlstm.report.markup import to_html
from fastlstm.serve.forecast.engine import ForecastEngine
from fastlstm.serve.forecast.inference import inference_routes
from fastlstm.serve.forecast.tables import TableForecasts
from fastlstm.serve.http.access import Access
from fastlstm.serve.http.errors import no_model
from fastlstm.serve.http.keys import check_access
from fastlstm.serve.metrics import CONTENT_TYPE
from fastlstm.serve.openapi import Model, ModelList, document_of
from fastlstm.serve.pages import Page, example_prompt, filled, forecaster_html
from fastlstm.serve.service import Service
from fastlstm.serve.text.completions import Completions
from fastlstm.text.loading import InferenceModel
from fastlstm.text.stored_model import parameter_shapes


def make_app(service: Service) -> ASGIApp:
    """Returns the application: log, counters, keys, routes."""
    pages = _Pages(service)
    routes = [
        Route("/", pages.page),
        Route("/health/live", pages.live),
        Route("/health/ready", pages.ready),
        Route("/metrics", pages.metrics),
        Route("/openapi.json", pages.openapi),
        Route("/v1/models", pages.models),
        Route("/v1/models/{name:path}", pages.model),
        Route("/v1/completions", Completions(service), methods=["POST"]),
        Route("/v1/chat/completions", Completions(service, True), methods=["POST"]),
        Route("/forecast", TableForecasts(service), methods=["POST"]),
        *inference_routes(service),
    ]
    own_name = service.settings.host if service.is_local else ""
    check = partial(check_access, keys=service.keys, own_name=own_name)
    log = service.log if service.settings.log else None
    return Access(Router(routes, redirect_slashes=False), service.metrics, log=log, check=check)


class _Pages:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._text_page, self._forecast_page = Page("page.html"), Page("forecast.html")

    async def page(self, request: Request) -> Response:
        service, key = self._service, "KEY" if self._service.keys else None
        engine = service.engine
        page = self._forecast_page
        if not isinstance(engine, ForecastEngine):
            page, part = self._text_page, to_html(example_prompt(engine.model.tokenizer))
        elif key is None or service.keys.tenant(request.scope["headers"]):
            part = forecaster_html(engine, request.headers.get("host", ""), key)
        else:
            part = filled("locked.html")
        return Response(page.with_part(part), media_type="text/html", headers=page.headers)

    async def live(self, request: Request) -> Response:
        if self._service.is_stuck:
            return JSONResponse({"status": "stuck"}, 503)
        return JSONResponse({"status": "live"})

    async def ready(self, request: Request) -> Response:
        self._service.require_ready()
        return JSONResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        if self._service.loaded is not None:
            self._service.loaded.update_gauges()
        return Response(self._service.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> Response:
        has_keys = bool(self._service.keys)
        return JSONResponse(document_of(self._service.engine, has_keys=has_keys))

    async def models(self, request: Request) -> Response:
        return _json(ModelList([self._described()]))

    async def model(self, request: Request) -> Response:
        described, name = self._described(), request.path_params["name"]
        if name != described.id:
            raise no_model(name, described.id)
        return _json(described)

    def _described(self) -> Model:
        engine = self._service.text_engine
        return Model(engine.name, engine.created, _facts(engine.model))


def _facts(model: InferenceModel) -> dict[str, Any]:
    """Returns sizes, best validation and name of the text, as far as they are known."""
    sizes, data = model.decoder.config, model.config.get("data")
    source = data.get("source") if isinstance(data, dict) else None
    facts = {
        **{"units": sizes.rnn_size, "layers": sizes.num_layers},
        "parameters": sum(map(math.prod, parameter_shapes(sizes).values())),
        **{"weights": model.decoder.weight_format, "vocab": model.tokenizer.kind},
        **{"vocab_size": sizes.vocab_size, "top_p": model.generation.get("top_p", 1.0)},
        "bits_per_char": model.bits_per_char,
        "text": str(source or "").rstrip("/").rpartition("/")[2] or None,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _json(value: Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
