"""The ASGI application: its routes, log, counters and keys; the pages at `/`.

Each page is one file, whose policy allows only the script and the style in it, by their digests.
Text of the model, such as names of columns, is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import math
import re
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from fastlstm.errors import DataError, counted
from fastlstm.forecast.config import READING
from fastlstm.report.markup import MAX_TEXT, clipped, name_text, to_html
from fastlstm.serve.forecast.engine import ForecastEngine
from fastlstm.serve.forecast.inference import inference_routes
from fastlstm.serve.forecast.tables import TableForecasts
from fastlstm.serve.http.access import Access
from fastlstm.serve.http.errors import no_model
from fastlstm.serve.http.keys import check_access
from fastlstm.serve.metrics import CONTENT_TYPE
from fastlstm.serve.openapi import Model, ModelList, document_of
from fastlstm.serve.service import Service
from fastlstm.serve.text.completions import Completions, Tokens
from fastlstm.text.data.tokenizer import Tokenizer
from fastlstm.text.loading import InferenceModel
from fastlstm.text.stored_model import parameter_shapes
from fastlstm.text.writing import prompt_ids

if TYPE_CHECKING:
    from fastlstm.forecast.window_forecaster import WindowForecaster


def make_app(service: Service) -> ASGIApp:
    """Returns the application: log, counters, keys, routes."""
    pages = _Pages(service)
    routes = [
        Route("/", pages.page),
        Route("/health/live", pages.live),
        Route("/health/ready", pages.ready),
        Route("/health", pages.ready),
        Route("/metrics", pages.metrics),
        Route("/openapi.json", pages.openapi),
        Route("/v1/models", pages.models),
        Route("/v1/models/{name:path}", pages.model),
        Route("/v1/completions", Completions(service), methods=["POST"]),
        Route("/v1/chat/completions", Completions(service, True), methods=["POST"]),
        Route("/tokenize", Tokens(service), methods=["POST"]),
        Route("/detokenize", Tokens(service, True), methods=["POST"]),
        Route("/tokenizer_info", pages.tokenizer),
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
        html = page.html.replace("{{part}}", part)
        return Response(html, media_type="text/html", headers=page.headers)

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
        return JSONResponse(document_of(self._service.engine, has_keys=bool(self._service.keys)))

    async def models(self, request: Request) -> Response:
        return _json(ModelList([self._described()]))

    async def model(self, request: Request) -> Response:
        described, name = self._described(), request.path_params["name"]
        if name != described.id:
            raise no_model(name, described.id)
        return _json(described)

    async def tokenizer(self, request: Request) -> Response:
        own = self._service.text_engine.model.tokenizer
        begin = own.decode(prompt_ids(own, ""))
        return JSONResponse({"bos_token": begin, "eos_token": None, "tokenizer_class": own.kind})

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


_PROMPTS = ("Once upon a time", "The ", "the ")
_NUM_LETTERS = 8
_FOLDER = importlib.resources.files("fastlstm.serve")
_FUTURE = (
    "<label>The columns {names} of every step ahead, with times: a second CSV\n"
    '<input id="future" type="file" accept=".csv,.tsv,.txt,text/csv"></label>'
)
_HOST = re.compile(r"[A-Za-z0-9.:\[\]-]{1,255}", re.ASCII)


def filled(file: str, **parts: str) -> str:
    """Returns a file of this package, its placeholders such as ``{{url}}`` filled with HTML."""
    html = (_FOLDER / file).read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts.get(match[1], match[0]), html)


class Page:
    """A page of this package: `html` with the placeholder ``{{part}}``, and its `headers`."""

    def __init__(self, name: str) -> None:
        self.html = filled(name, style=(_FOLDER / "style.css").read_text("utf-8"))
        self.headers = {
            "content-security-policy": (
                f"default-src 'none'; script-src {self._digest('script')};"
                f" style-src {self._digest('style')}; connect-src 'self'; img-src data:;"
                " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            ),
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
            "vary": "authorization",
        }

    def _digest(self, tag: str) -> str:
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", self.html, re.DOTALL)
        digest = hashlib.sha256(text.encode("utf-8")).digest()
        return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def example_prompt(tokenizer: Tokenizer) -> str:
    """Returns a prompt that a model can read: a usual one, else letters of its vocabulary."""
    for text in _PROMPTS:
        try:
            tokenizer.encode(text)
        except DataError:
            continue
        return text
    letters = (piece.decode("utf-8", "ignore") for piece in tokenizer.pieces)
    return "".join(text for text in letters if len(text) == 1 and text.isalnum())[:_NUM_LETTERS]


def forecaster_html(engine: ForecastEngine, host: str, key: str | None) -> str:
    """Returns the description of a forecaster at `host`; `key` stands for the API key."""
    model = engine.model
    every = "" if model.frequency == "rows" else f", one every {model.frequency.removeprefix('1 ')}"
    ahead = f"the next {model.horizon} steps" if model.horizon > 1 else "the next step"
    shown_host = host if _HOST.fullmatch(host) else "localhost"
    texts = {
        "name": name_text(engine.name),
        "columns": _table_columns(model),
        "limit": str(engine.max_body),
        "reading": " ".join(READING),
        "forecast_url": f"http://{shown_host}/forecast",
        "rows": counted(model.input_size, "row") + every,
        "ahead": ahead,
        "targets": _names_text(model.targets),
        "path": f"/v2/models/{quote(engine.name, safe='')}",
        "shell_key": "" if key is None else f" -H 'authorization: Bearer {key}'",
    }
    parts = {name: to_html(text) for name, text in texts.items()}
    future = to_html(_names_text(model.stored.config.future))
    parts["future"] = _FUTURE.format(names=future) if future else ""
    return filled("forecaster.html", **parts)


def _table_columns(model: WindowForecaster) -> str:
    """Returns the columns of a table to forecast, in words."""
    from fastlstm.forecast.data.calendar import calendar_names  # a page of a text needs no Arrow

    config = model.stored.config
    of_calendar = calendar_names(config.calendar or ())
    names = [name for name in model.past.names if name not in of_calendar]
    names += [*config.static, *([config.series] if config.series else model.series.names)]
    if model.frequency == "rows" or config.time:
        return _names_text((*names, *([config.time] if config.time else [])))
    return f"{_names_text(tuple(names))}, and one of times"


def _names_text(names: tuple[str, ...]) -> str:
    return clipped(", ".join(map(name_text, names)), MAX_TEXT)
