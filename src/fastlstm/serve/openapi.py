"""The OpenAPI 3.1 document of a server: its routes, and msgspec's schemas of what they carry."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, defstruct

from fastlstm.serve.forecast.engine import VERSION, ForecastEngine
from fastlstm.serve.forecast.request import OutputName
from fastlstm.serve.forecast.tensors import Size
from fastlstm.serve.text.requests import MAX_PROMPTS

if TYPE_CHECKING:
    from fastlstm.serve.text.engine import TextEngine

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
    415: "the body is not `application/json`, or compressed",
    421: "without API keys: the Host header names neither an address nor localhost",
    429: "every place is taken; Retry-After says when to ask again",
    431: "too many or too long headers",
    500: "this request failed; others are not affected",
    503: "the model is being loaded, the server is ending, or every place for windows is taken",
    504: "the request's timeout has passed",
}
_REF = "#/components/schemas/{name}"
_TEXT: Schema = {"type": "string"}


Health = defstruct("Health", [("status", Literal["live", "ready", "stuck"])])
Live = defstruct("Live", [("live", bool)])
Ready = defstruct("Ready", [("ready", bool)])
Name = str | None
Failure = defstruct("Failure", [("message", str), ("type", str), ("param", Name), ("code", Name)])
TextError = defstruct("TextError", [("error", Failure)])
InferError = defstruct("InferError", [("error", str)])
Server = defstruct("Server", [("name", str), ("version", str), ("extensions", list[str])])
ModelReady = defstruct("ModelReady", [("name", str), ("ready", bool)])
Tensor = defstruct("Tensor", [("name", str), ("datatype", str), ("shape", list[int])])
_TENSORS = [("inputs", list[Tensor]), ("outputs", list[Tensor])]  # type: ignore[valid-type]
Metadata = defstruct(
    "Metadata", [("name", str), ("versions", list[str]), ("platform", str), *_TENSORS]
)


class Usage(Struct):
    """Tokens of a request."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count


class Logprobs(Struct):
    """Log probabilities of tokens."""

    tokens: list[str]
    token_logprobs: list[LogProbability | None]
    top_logprobs: list[dict[str, LogProbability] | None] | None
    text_offset: list[Count]


class Choice(Struct):
    """One text."""

    text: str
    index: Count
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"]
    session: Annotated[str, Meta(description="with return_session")] | UnsetType = UNSET


class Completion(Struct):
    """The answer to a completion request."""

    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    choices: Annotated[list[Choice], Meta(min_length=1)]
    usage: Usage


class Model(Struct):
    """A language model, as OpenAI describes one."""

    id: str
    created: Count
    object: Literal["model"] = "model"
    owned_by: Literal["fastlstm"] = "fastlstm"


class ModelList(Struct):
    """The models of a server: one."""

    data: list[Model]
    object: Literal["list"] = "list"


class OutputTensor(Struct):
    """An output with its numbers."""

    name: OutputName
    shape: list[Size]
    datatype: Literal["FP32", "FP64"]
    data: list[float]


class Answer(Struct):
    """The answer to an inference request."""

    model_name: str
    model_version: str
    outputs: list[OutputTensor]
    id: str | UnsetType = UNSET


def document_of(engine: TextEngine | ForecastEngine, *, has_keys: bool) -> Schema:
    """Returns the OpenAPI document of a server of this model."""
    if isinstance(engine, ForecastEngine):
        about, paths = _forecast_paths(engine)
        kinds = [InferError, Answer, Metadata, Server, Live, Ready, ModelReady, Health]
        error = "InferError"
    else:
        about, paths = _text_paths(engine)
        kinds, error = [TextError, Completion, Model, ModelList, Health], "TextError"
    _, schemas = msgspec.json.schema_components([*kinds, engine.decoder.type], ref_template=_REF)
    if not isinstance(engine, ForecastEngine):
        _narrow_prompt(schemas["CompletionRequest"]["properties"])
    schemas["Error"] = _ref(error)
    document: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "fastlstm",
            "version": importlib.metadata.version("fastlstm"),
            "description": about,
        },
        "paths": {**paths, **_shared_paths()},
        "components": {"schemas": schemas},
    }
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _narrow_prompt(properties: Schema) -> None:
    """States the four kinds of prompt; msgspec has one kind of list in a union."""
    text, listed, null = properties["prompt"]["anyOf"]
    *_, token, tokens = listed["items"]["anyOf"]
    some = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
    one = {"type": "array", "minItems": 1, "items": token}
    kinds = [text, {**some, "items": text}, one, {**some, "items": tokens}, null]
    properties["prompt"]["anyOf"] = kinds


def _text_paths(engine: TextEngine) -> tuple[str, Schema]:
    event = {"type": "object", "properties": {"data": _TEXT}, "required": ["data"]}
    event["description"] = "a Completion whose texts are what is new; after the last one, [DONE]"
    answer = {**_json("Completion"), "text/event-stream": {"schema": event}}
    model = _get("the model", _json("Model"), 404)
    chat = {
        "summary": "not supported by this model: answers 404 and says so",
        "requestBody": {"content": {"application/json": {"schema": {"type": "object"}}}},
        "responses": _responses(None, 401, 404, 421, 431, 503),
    }
    errors = (400, 401, 404, 408, 413, 415, 421, 429, 431, 500, 503)
    return f"OpenAI's text completions for the model '{engine.name}'.", {
        "/v1/completions": {
            "post": _post("continues a prompt", "CompletionRequest", answer, *errors)
        },
        "/v1/models": {"get": _get("the models: one", _json("ModelList"))},
        "/v1/models/{name}": {"get": _with_path(model, name=engine.name)},
        "/v1/chat/completions": {"post": chat},
    }


def _forecast_paths(engine: ForecastEngine) -> tuple[str, Schema]:
    live = _get("whether requests make progress", _json("Live"))
    live["responses"]["503"] = live["responses"]["200"]
    metadata = _get("the model's inputs and outputs", _json("Metadata"), 404)
    ready = _get("whether the model takes requests", _json("ModelReady"), 404)
    errors = (400, 401, 404, 408, 409, 413, 415, 421, 431, 500, 503, 504)
    infer = _post("forecasts the steps after each window", "Request", _json("Answer"), *errors)
    paths: Schema = {
        "/v2": {"get": _get("the server", _json("Server"))},
        "/v2/health/live": {"get": {**live, "security": []}},
        "/v2/health/ready": {
            "get": {**_get("whether requests are taken", _json("Ready")), "security": []}
        },
    }
    names = {"model": engine.name}
    for path, parts in (
        ("/v2/models/{model}", names),
        ("/v2/models/{model}/versions/{version}", {**names, "version": VERSION}),
    ):
        paths[path] = {"get": _with_path(metadata, **parts)}
        paths[f"{path}/ready"] = {"get": _with_path(ready, **parts)}
        paths[f"{path}/infer"] = {"post": _with_path(infer, **parts)}
    about = f"Forecasts of the model '{engine.name}' by the Open Inference Protocol, version 2."
    return about, paths


def _shared_paths() -> Schema:
    health, text = _json("Health"), {"schema": _TEXT}
    live = _get("whether requests make progress", health)
    stuck = {"description": "requests are under way and make no progress", "content": health}
    live["responses"]["503"] = stuck
    document = {"application/json": {"schema": {"type": "object"}}}
    return {
        "/metrics": {"get": _get("counters, for Prometheus", {"text/plain": text})},
        "/openapi.json": {"get": _get("this document", document)},
        "/": {"get": {**_get("the page", {"text/html": text}), "security": []}},
        "/health/live": {"get": {**live, "security": []}},
        "/health/ready": {"get": {**_get("whether requests are taken", health), "security": []}},
    }


def _get(summary: str, answer: Schema, *more: int) -> Schema:
    return {"summary": summary, "responses": _responses(answer, 401, 421, 431, 503, *more)}


def _post(summary: str, request: str, answer: Schema, *errors: int) -> Schema:
    body = {"required": True, "content": _json(request)}
    return {"summary": summary, "requestBody": body, "responses": _responses(answer, *errors)}


def _with_path(operation: Schema, **examples: str) -> Schema:
    """Returns an operation with parameters of its path, each with an example."""
    kind = {"in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    parameters = [{"name": name, **kind, "example": value} for name, value in examples.items()]
    return {**operation, "parameters": parameters}


def _responses(answer: Schema | None, *errors: int) -> Schema:
    listed = {} if answer is None else {"200": {"description": "the answer", "content": answer}}
    for status in sorted(errors):
        listed[str(status)] = {"description": _ERRORS[status], "content": _json("Error")}
    return listed


def _json(name: str) -> Schema:
    return {"application/json": {"schema": _ref(name)}}


def _ref(name: str) -> Schema:
    return {"$ref": _REF.format(name=name)}
