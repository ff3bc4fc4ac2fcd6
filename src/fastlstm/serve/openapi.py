"""The server's OpenAPI document: what it takes and answers, for programs that generate clients.

The bounds are those of `requests.py`; tests/serve/test_openapi.py holds one against the other. What
no schema can say is in the descriptions: which fields exclude each other, the characters that a
model of characters has seen.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

from fastlstm.infer.sampling import SMALLEST
from fastlstm.serve import requests

if TYPE_CHECKING:
    from fastlstm.serve.engine import Engine
    from fastlstm.serve.settings import Settings

Schema = dict[str, Any]

_ERRORS = {
    400: "a field is wrong; `param` names it",
    401: "the API key is missing or wrong",
    404: "no such model or path",
    408: "headers or body did not come in time",
    413: "the body is too long",
    415: "the body is not `application/json`, or compressed",
    421: "without API keys: the Host header names neither an address nor localhost",
    429: "every place is taken; Retry-After says when to ask again",
    431: "too many or too long headers",
    500: "this request failed; others are not affected",
    503: "the model is being loaded, or the server is ending",
}


def document(engine: Engine, settings: Settings, *, has_keys: bool) -> Schema:
    """Returns the OpenAPI 3.1 document of a server."""
    paths = {
        "/v1/completions": {"post": _completions(engine, settings)},
        "/v1/models": {"get": _get("the models: one", _json(_ref("ModelList")))},
        "/v1/models/{name}": {"get": _model(engine.name)},
        "/v1/chat/completions": {"post": _chat()},
        "/metrics": {"get": _get("counters, for Prometheus", _text("text/plain"))},
        "/openapi.json": {"get": _get("this document", _json({"type": "object"}))},
        "/health/live": {"get": _open(_get("whether texts go on", _json(_ref("Health"))))},
        "/health/ready": {"get": _open(_get("whether requests are taken", _json(_ref("Health"))))},
        "/": {"get": _open(_get("a page to try it", _text("text/html")))},
    }
    stuck = {"description": "texts are under way and nothing moves"}
    paths["/health/live"]["get"]["responses"]["503"] = {**stuck, "content": _json(_ref("Health"))}
    found: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "fastlstm",
            "version": importlib.metadata.version("fastlstm"),
            "description": f"OpenAI's text completions for the model '{engine.name}'.",
        },
        "paths": paths,
        "components": {"schemas": _schemas()},
    }
    if has_keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _completions(engine: Engine, settings: Settings) -> Schema:
    event = _object(data={"type": "string"})
    event["description"] = "a Completion whose texts are what is new; after the last one, [DONE]"
    answer = {**_json(_ref("Completion")), "text/event-stream": {"schema": event}}
    body = {"required": True, "content": _json(_request(engine, settings))}
    return {
        "summary": "goes on from a prompt",
        "requestBody": body,
        "responses": _responses(answer, 400, 401, 404, 408, 413, 415, 421, 429, 431, 500, 503),
    }


def _request(engine: Engine, settings: Settings) -> Schema:
    fields = {
        "model": {"enum": [engine.name, None]},
        **_prompt_fields(engine.vocab_size),
        **_length_fields(settings),
        **_sampling_fields(engine.vocab_size),
        "logprobs": _whole(0, requests.MAX_LOGPROBS),
        "echo": _flag(),
        "stream": _flag(),
        "stream_options": _or_null(
            {
                "type": "object",
                "properties": {name: {"type": "boolean"} for name in requests.STREAM_OPTIONS},
                "additionalProperties": False,
            },
            description="with `stream` only",
        ),
        "user": _or_null({"type": "string", "maxLength": 1000}),
        "suffix": {"enum": ["", None]},
    }
    return {"type": "object", "properties": fields, "additionalProperties": False}


def _prompt_fields(vocab_size: int) -> Schema:
    token = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    prompts = {"minItems": 1, "maxItems": requests.MAX_PROMPTS}
    tokens = {"type": "array", "items": token}
    return {
        "prompt": _or_null(
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, **prompts},
            {**tokens, "minItems": 1},
            {"type": "array", "items": tokens, **prompts},
        ),
        "session": _or_null(
            {"type": "string", "maxLength": requests.MAX_SESSION_CHARS},
            description="what `return_session` gave",
        ),
        "return_session": _flag(),
    }


def _length_fields(settings: Settings) -> Schema:
    stop = {"type": "string", "minLength": 1, "maxLength": requests.MAX_STOP_CHARS}
    count = {"type": "integer", "minimum": 1, "maximum": requests.MAX_CHOICES}
    return {
        "max_tokens": _whole(0, min(settings.max_tokens, requests.MAX_WHOLE)),
        "n": _or_null(count),
        "best_of": _or_null(count, description="equals n"),
        "stop": _or_null(stop, {"type": "array", "items": stop, "maxItems": requests.MAX_STOPS}),
    }


def _sampling_fields(vocab_size: int) -> Schema:
    bias = {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,11}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": requests.MAX_BIASES,
    }
    return {
        "seed": _whole(-(1 << 63), (1 << 64) - 1),
        "temperature": _number(0, 2),
        "top_p": _number(SMALLEST, 1),
        "min_p": _number(0, 1),
        "top_k": _whole(-1, (1 << 31) - 1),
        "repetition_penalty": _number(SMALLEST, 100),
        "presence_penalty": _number(-2, 2),
        "frequency_penalty": _number(-2, 2),
        "logit_bias": _or_null(bias, description=f"tokens 0 to {vocab_size - 1}"),
    }


def _model(name: str) -> Schema:
    parameter = {
        "name": "name",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
        "example": name,
    }
    found = _get("the model", _json(_ref("Model")), 404)
    return {**found, "parameters": [parameter]}


def _chat() -> Schema:
    return {
        "summary": "not what this model can do: answers 404 and says so",
        "requestBody": {"content": _json({"type": "object"})},
        "responses": _responses(None, 401, 404, 421, 431),
    }


def _get(summary: str, answer: Schema, *more: int) -> Schema:
    return {"summary": summary, "responses": _responses(answer, 401, 421, 431, 503, *more)}


def _open(operation: Schema) -> Schema:
    return {**operation, "security": []}


def _responses(answer: Schema | None, *errors: int) -> Schema:
    found = {} if answer is None else {"200": {"description": "the answer", "content": answer}}
    for status in sorted(errors):
        found[str(status)] = {"description": _ERRORS[status], "content": _json(_ref("Error"))}
    return found


def _schemas() -> Schema:
    text, count = {"type": "string"}, {"type": "integer", "minimum": 0}
    maybe = {"type": ["string", "null"]}
    logprob = {"type": ["number", "null"], "maximum": 0}
    top = {"type": ["object", "null"], "additionalProperties": {"type": "number", "maximum": 0}}
    logprobs = _object(
        tokens={"type": "array", "items": text},
        token_logprobs={"type": "array", "items": logprob},
        top_logprobs={"type": ["array", "null"], "items": top},
        text_offset={"type": "array", "items": count},
    )
    choice = _object(
        text=text,
        index=count,
        logprobs=_or_null(logprobs),
        finish_reason={"enum": ["stop", "length"]},
    )
    choice["properties"]["session"] = {**text, "description": "where return_session asked for it"}
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    model = _object(
        id=text, object={"const": "model"}, created=count, owned_by={"const": "fastlstm"}
    )
    error = _object(message=text, type=text, param=maybe, code=maybe)
    return {
        "Completion": _object(
            id=text,
            object={"const": "text_completion"},
            created=count,
            model=text,
            choices={"type": "array", "items": choice, "minItems": 1},
            usage=_object(**dict.fromkeys(names, count)),
        ),
        "Model": model,
        "ModelList": _object(
            object={"const": "list"}, data={"type": "array", "items": _ref("Model")}
        ),
        "Health": _object(status={"enum": ["live", "ready", "stuck"]}),
        "Error": _object(error=error),
    }


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _or_null(*schemas: Schema, description: str = "") -> Schema:
    found: Schema = {"anyOf": [*schemas, {"type": "null"}]}
    return {**found, "description": description} if description else found


def _number(low: float, high: float) -> Schema:
    return _or_null({"type": "number", "minimum": low, "maximum": high})


def _whole(low: int, high: int) -> Schema:
    return _or_null({"type": "integer", "minimum": low, "maximum": high})


def _flag() -> Schema:
    return _or_null({"type": "boolean"})


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _text(kind: str) -> Schema:
    return {kind: {"schema": {"type": "string"}}}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}
