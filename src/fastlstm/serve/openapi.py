"""The OpenAPI 3.1 document of a server: its routes, with msgspec's schemas."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, defstruct

from fastlstm.serve.forecast.engine import VERSION, ForecastEngine
from fastlstm.serve.forecast.request import OutputName, Size
from fastlstm.serve.forecast.tables import Query, Row, TableBody
from fastlstm.serve.http.keys import OPEN_PATHS, PAGE_PATH
from fastlstm.serve.text.engine import TextEngine
from fastlstm.serve.text.requests import MAX_PROMPTS

Schema = dict[str, Any]
Count = Annotated[int, Meta(ge=0)]
LogProbability = Annotated[float, Meta(le=0)]
_ERRORS = {
    400: "a field is wrong; `param` names it",
    401: "the API key is missing or wrong",
    404: "no such model or path",
    408: "headers or body did not arrive in time",
    409: "the sequence has too few rows so far; these are kept",
    413: "the body is too long",
    415: "the body has another type, or is compressed",
    421: "without API keys: the Host header names neither an address nor localhost",
    429: "every place is taken; Retry-After says when to ask again",
    431: "too many or too long headers",
    500: "this request failed; others are not affected",
    503: "the model is being loaded, the server is ending, or every place for windows is taken",
}
_REF = "#/components/schemas/{name}"
_TEXT: Schema = {"type": "string"}
_OBJECT: Schema = {"application/json": {"schema": {"type": "object"}}}

Health = defstruct("Health", [("status", Literal["live", "ready", "stuck"])])
Live = defstruct("Live", [("live", bool)])
Ready = defstruct("Ready", [("ready", bool)])
Name = str | None
Failure = defstruct("Failure", [("message", str), ("type", str), ("param", Name), ("code", Name)])
TextError = defstruct("Error", [("error", Failure)])
InferError = defstruct("Error", [("error", str)])
_ANSWER = [
    ("model", str),
    ("rows", list[Row]),
    ("notes", list[str]),
    ("charts", list[Schema], UNSET),
]
TableAnswer = defstruct("TableAnswer", _ANSWER)  # type: ignore[arg-type]
Server = defstruct("Server", [("name", str), ("version", str), ("extensions", list[str])])
ModelReady = defstruct("ModelReady", [("name", str), ("ready", bool)])
Tensor = defstruct("Tensor", [("name", str), ("datatype", str), ("shape", list[int])])
_TENSORS = [("inputs", list[Tensor]), ("outputs", list[Tensor])]  # type: ignore[valid-type]
Metadata = defstruct(
    "Metadata", [("name", str), ("versions", list[str]), ("platform", str), *_TENSORS]
)
_OUTPUT = [("name", OutputName), ("shape", list[Size]), ("datatype", Literal["FP32", "FP64"])]
OutputTensor = defstruct("OutputTensor", [*_OUTPUT, ("data", list[float])])
_HEAD = [("model_name", str), ("model_version", str), ("outputs", list[OutputTensor])]  # type: ignore[valid-type]
Answer = defstruct("Answer", [*_HEAD, ("id", str | UnsetType, UNSET)])
Usage = defstruct("Usage", [(f"{of}_tokens", Count) for of in ("prompt", "completion", "total")])
_LOGPROBS = [
    ("tokens", list[str]),
    ("token_logprobs", list[LogProbability | None]),
    ("top_logprobs", list[dict[str, LogProbability] | None] | None),
    ("text_offset", list[Count]),
]
Logprobs = defstruct("Logprobs", _LOGPROBS)
_TOKEN = [("token", str), ("logprob", LogProbability), ("bytes", list[int])]
Alternative = defstruct("Alternative", _TOKEN)
_TOKEN += [("top_logprobs", list[Alternative])]  # type: ignore[valid-type]
Scored = defstruct("Scored", _TOKEN)
ChatLogprobs = defstruct("ChatLogprobs", [("content", list[Scored]), ("refusal", None)])  # type: ignore[valid-type]
ChatMessage = defstruct("ChatMessage", [("role", Literal["assistant"]), ("content", str)])
_SESSION = Annotated[str, Meta(description="with return_session")] | UnsetType


def _completion(name: str, kind: str, logprobs: Any, *own: Any) -> type[Struct]:
    """Returns the schema of an answer whose choices have `own` fields."""
    end = ("finish_reason", Literal["stop", "length"])
    fields = [("index", Count), ("logprobs", logprobs | None), end, *own]
    choice = defstruct(f"{name}Choice", fields)
    choices = Annotated[list[choice], Meta(min_length=1)]  # type: ignore[valid-type]
    head = [("id", str), ("object", Literal[kind]), ("created", Count), ("model", str)]
    return defstruct(name, [*head, ("choices", choices), ("usage", Usage)])


_TEXT_PARTS = (("text", str), ("session", _SESSION, UNSET))
Completion = _completion("Completion", "text_completion", Logprobs, *_TEXT_PARTS)
_MESSAGE = ("message", ChatMessage)
ChatCompletion = _completion("ChatCompletion", "chat.completion", ChatLogprobs, _MESSAGE)


class Model(Struct):
    """A language model, as OpenAI describes one, and `about` it."""

    id: str
    created: Count
    about: dict[str, str | int | float]
    object: Literal["model"] = "model"
    owned_by: Literal["fastlstm"] = "fastlstm"


class ModelList(Struct):
    """The models of a server: one."""

    data: list[Model]
    object: Literal["list"] = "list"


def document_of(engine: TextEngine | ForecastEngine, *, has_keys: bool) -> Schema:
    """Returns the OpenAPI document of a server of this model."""
    if isinstance(engine, ForecastEngine):
        about = "Forecasts by the Open Inference Protocol"
        paths = _forecast_paths(engine)
        kinds = [InferError, Answer, Metadata, Server, Live, Ready, ModelReady, Health]
        kinds += [TableBody, TableAnswer]
    else:
        about, paths = "OpenAI's text and chat completions", _text_paths(engine)
        kinds = [TextError, Completion, ChatCompletion, Model, ModelList, Health]
        kinds += [decoder.type for decoder in (engine.chat_decoder, *engine.token_decoders)]
    _, schemas = msgspec.json.schema_components([*kinds, engine.decoder.type], ref_template=_REF)
    if isinstance(engine, TextEngine):
        # The four kinds of prompt; msgspec has one kind of list in a union.
        prompt = schemas["CompletionRequest"]["properties"]["prompt"]
        text, listed, null = prompt["anyOf"]
        *_, token, tokens = listed["items"]["anyOf"]
        some = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
        one = {"type": "array", "minItems": 1, "items": token}
        lists = [{**some, "items": text}, one, {**some, "items": tokens}]
        prompt["anyOf"] = [text, *lists, null]
    document: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "fastlstm",
            "version": importlib.metadata.version("fastlstm"),
            "description": f"{about}: the model '{engine.name}'.",
        },
        "paths": {**paths, **_shared_paths()},
        "components": {"schemas": schemas},
    }
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _text_paths(engine: TextEngine) -> Schema:
    event = {"type": "object", "properties": {"data": _TEXT}, "required": ["data"]}
    event["description"] = "the answer with the new text only; after the last event, [DONE]"
    stream = {"text/event-stream": {"schema": event}}
    errors = (400, 401, 404, 408, 413, 415, 421, 429, 431, 500, 503)
    completion, chat = (
        (_json(f"{kind}Request"), {**_json(kind), **stream}, *errors)
        for kind in ("Completion", "ChatCompletion")
    )
    return {
        **_get("/v1/models", "the models: one", "ModelList"),
        **_get("/v1/models/{name}", "the model", "Model", 404, name=engine.name),
        **_post("/v1/completions", "continues a prompt", *completion),
        **_post("/v1/chat/completions", "continues messages as a transcript", *chat),
        **_post("/tokenize", "tokens of a text", _json("TokenizeRequest"), _OBJECT, *errors),
        **_post("/detokenize", "their text", _json("DetokenizeRequest"), _OBJECT, *errors),
        **_get("/tokenizer_info", "the vocabulary's kind, and how a text begins", _OBJECT),
    }


def _forecast_paths(engine: ForecastEngine) -> Schema:
    paths = {
        **_get("/v2", "the server", "Server"),
        **_get("/v2/health/live", "whether requests make progress", "Live"),
        **_get("/v2/health/ready", "whether requests are taken", "Ready"),
    }
    live = paths["/v2/health/live"]["get"]["responses"]
    live["503"] = live["200"]
    errors = (400, 401, 404, 408, 409, 413, 415, 421, 431, 500, 503)
    about, request = "forecasts the steps after each window", _json("Request")
    listed = {"type": "array", "minItems": 1, "items": {"type": "object", "minProperties": 1}}
    either = {"anyOf": [{"$ref": _REF.format(name="TableBody")}, listed]}
    table = {"application/json": {"schema": either}, "text/csv": {"schema": _TEXT}}
    rows = {**_json("TableAnswer"), "text/csv": {"schema": _TEXT}}
    own = (400, 401, 404, 408, 413, 415, 421, 431, 500, 503)
    paths |= _post("/forecast", "forecasts the steps after the rows of a table", table, rows, *own)
    types = msgspec.json.schema_components([Query])[1]["Query"]["properties"]
    query = [{"in": "query", "name": name, "schema": types[name]} for name in types]
    paths["/forecast"]["post"]["parameters"] = query
    names = {"model": engine.name}
    for path, parts in (
        ("/v2/models/{model}", names),
        ("/v2/models/{model}/versions/{version}", {**names, "version": VERSION}),
    ):
        paths |= _get(path, "the model's inputs and outputs", "Metadata", 404, **parts)
        ready = "whether the model takes requests"
        paths |= _get(f"{path}/ready", ready, "ModelReady", 404, **parts)
        paths |= _post(f"{path}/infer", about, request, _json("Answer"), *errors, **parts)
    return paths


def _shared_paths() -> Schema:
    page, metrics = ({kind: {"schema": _TEXT}} for kind in ("text/html", "text/plain"))
    paths = {
        **_get("/metrics", "counters, for Prometheus", metrics),
        **_get("/openapi.json", "this document", _OBJECT),
        **_get("/", "the page", page),
        **_get("/health/live", "whether requests make progress", "Health"),
        **_get("/health/ready", "whether requests are taken", "Health"),
        **_get("/health", "as /health/ready", "Health"),
    }
    live = paths["/health/live"]["get"]["responses"]
    live["503"] = {**live["200"], "description": "requests are under way and make no progress"}
    return paths


def _get(path: str, summary: str, answer: str | Schema, *more: int, **parts: str) -> Schema:
    """Returns a path that is read; `parts` of it are given as examples."""
    content = _json(answer) if isinstance(answer, str) else answer
    operation = _operation(summary, content, (401, 421, 431, 503, *more), parts)
    needs_no_key = path in OPEN_PATHS or path == PAGE_PATH
    return {path: {"get": {**operation, **({"security": []} if needs_no_key else {})}}}


def _post(
    path: str, summary: str, request: Schema, answer: Schema, *errors: int, **parts: str
) -> Schema:
    body = {"required": True, "content": request}
    return {path: {"post": {**_operation(summary, answer, errors, parts), "requestBody": body}}}


def _operation(
    summary: str, answer: Schema, errors: Iterable[int], parts: Mapping[str, str]
) -> Schema:
    listed = {"200": {"description": "the answer", "content": answer}}
    for status in sorted(errors):
        listed[str(status)] = {"description": _ERRORS[status], "content": _json("Error")}
    kind = {"in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    parameters = [{"name": name, **kind, "example": value} for name, value in parts.items()]
    own = {"parameters": parameters} if parameters else {}
    return {"summary": summary, "responses": listed, **own}


def _json(name: str) -> Schema:
    return {"application/json": {"schema": {"$ref": _REF.format(name=name)}}}
