"""The OpenAPI document of a server of texts, for programs that generate clients.

The bounds are those of `requests.py`; tests/serve/text/test_openapi.py holds one against the
other. What no schema can say is in the descriptions: which fields exclude each
other, the characters that a model of characters has seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastlstm.serve.openapi_parts import (
    HEALTH,
    Schema,
    document_of,
    flag,
    get,
    json_of,
    number,
    object_of,
    or_null,
    ref,
    responses,
    shared_paths,
    whole,
)
from fastlstm.serve.text import requests
from fastlstm.text.sampling import SMALLEST

if TYPE_CHECKING:
    from fastlstm.serve.settings import Settings
    from fastlstm.serve.text.engine import Engine


def document(engine: Engine, settings: Settings, *, has_keys: bool) -> Schema:
    """Returns the OpenAPI 3.1 document of a server of texts."""
    paths = {
        "/v1/completions": {"post": _completions(engine, settings)},
        "/v1/models": {"get": get("the models: one", json_of(ref("ModelList")))},
        "/v1/models/{name}": {"get": _model(engine.name)},
        "/v1/chat/completions": {"post": _chat()},
        **shared_paths(),
    }
    title = f"OpenAI's text completions for the model '{engine.name}'."
    return document_of(title, paths, _schemas(), has_keys=has_keys)


def _completions(engine: Engine, settings: Settings) -> Schema:
    event = object_of(data={"type": "string"})
    event["description"] = "a Completion whose texts are what is new; after the last one, [DONE]"
    answer = {**json_of(ref("Completion")), "text/event-stream": {"schema": event}}
    body = {"required": True, "content": json_of(_request(engine, settings))}
    return {
        "summary": "goes on from a prompt",
        "requestBody": body,
        "responses": responses(answer, 400, 401, 404, 408, 413, 415, 421, 429, 431, 500, 503),
    }


def _request(engine: Engine, settings: Settings) -> Schema:
    fields = {
        "model": {"enum": [engine.name, None]},
        **_prompt_fields(engine.vocab_size),
        **_length_fields(settings),
        **_sampling_fields(engine.vocab_size),
        "logprobs": whole(0, requests.MAX_LOGPROBS),
        "echo": flag(),
        "stream": flag(),
        "stream_options": or_null(
            {
                "type": "object",
                "properties": {name: {"type": "boolean"} for name in requests.STREAM_OPTIONS},
                "additionalProperties": False,
            },
            description="with `stream` only",
        ),
        "user": or_null({"type": "string", "maxLength": 1000}),
        "suffix": {"enum": ["", None]},
    }
    return {"type": "object", "properties": fields, "additionalProperties": False}


def _prompt_fields(vocab_size: int) -> Schema:
    token = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    prompts = {"minItems": 1, "maxItems": requests.MAX_PROMPTS}
    tokens = {"type": "array", "items": token}
    return {
        "prompt": or_null(
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, **prompts},
            {**tokens, "minItems": 1},
            {"type": "array", "items": tokens, **prompts},
        ),
        "session": or_null(
            {"type": "string", "maxLength": requests.MAX_SESSION_CHARS},
            description="what `return_session` gave",
        ),
        "return_session": flag(),
    }


def _length_fields(settings: Settings) -> Schema:
    stop = {"type": "string", "minLength": 1, "maxLength": requests.MAX_STOP_CHARS}
    count = {"type": "integer", "minimum": 1, "maximum": requests.MAX_CHOICES}
    return {
        "max_tokens": whole(0, min(settings.max_tokens, requests.MAX_WHOLE)),
        "n": or_null(count),
        "best_of": or_null(count, description="equals n"),
        "stop": or_null(stop, {"type": "array", "items": stop, "maxItems": requests.MAX_STOPS}),
    }


def _sampling_fields(vocab_size: int) -> Schema:
    bias = {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,11}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": requests.MAX_BIASES,
    }
    return {
        "seed": whole(-(1 << 63), (1 << 64) - 1),
        "temperature": number(0, 2),
        "top_p": number(SMALLEST, 1),
        "min_p": number(0, 1),
        "top_k": whole(-1, (1 << 31) - 1),
        "repetition_penalty": number(SMALLEST, 100),
        "presence_penalty": number(-2, 2),
        "frequency_penalty": number(-2, 2),
        "logit_bias": or_null(bias, description=f"tokens 0 to {vocab_size - 1}"),
    }


def _model(name: str) -> Schema:
    parameter = {
        "name": "name",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
        "example": name,
    }
    found = get("the model", json_of(ref("Model")), 404)
    return {**found, "parameters": [parameter]}


def _chat() -> Schema:
    return {
        "summary": "not what this model can do: answers 404 and says so",
        "requestBody": {"content": json_of({"type": "object"})},
        "responses": responses(None, 401, 404, 421, 431, 503),
    }


def _schemas() -> Schema:
    text, count = {"type": "string"}, {"type": "integer", "minimum": 0}
    maybe = {"type": ["string", "null"]}
    logprob = {"type": ["number", "null"], "maximum": 0}
    top = {"type": ["object", "null"], "additionalProperties": {"type": "number", "maximum": 0}}
    logprobs = object_of(
        tokens={"type": "array", "items": text},
        token_logprobs={"type": "array", "items": logprob},
        top_logprobs={"type": ["array", "null"], "items": top},
        text_offset={"type": "array", "items": count},
    )
    choice = object_of(
        text=text,
        index=count,
        logprobs=or_null(logprobs),
        finish_reason={"enum": ["stop", "length"]},
    )
    choice["properties"]["session"] = {**text, "description": "where return_session asked for it"}
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    model = object_of(
        id=text, object={"const": "model"}, created=count, owned_by={"const": "fastlstm"}
    )
    error = object_of(message=text, type=text, param=maybe, code=maybe)
    return {
        "Completion": object_of(
            id=text,
            object={"const": "text_completion"},
            created=count,
            model=text,
            choices={"type": "array", "items": choice, "minItems": 1},
            usage=object_of(**dict.fromkeys(names, count)),
        ),
        "Model": model,
        "ModelList": object_of(
            object={"const": "list"}, data={"type": "array", "items": ref("Model")}
        ),
        "Health": HEALTH,
        "Error": object_of(error=error),
    }
