"""The OpenAPI document of a server of texts; the request's fields describe themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastlstm.serve.http.fields import fields_schema, or_null
from fastlstm.serve.http.openapi import (
    TEXT,
    document_of,
    get,
    json_of,
    list_of,
    object_of,
    ref,
    responses,
    with_path,
)

if TYPE_CHECKING:
    from fastlstm.serve.http.fields import Schema
    from fastlstm.serve.text.engine import TextEngine


def text_document(engine: TextEngine, *, has_keys: bool) -> Schema:
    """Returns the OpenAPI 3.1 document of a server of texts."""
    model = get("the model", json_of(ref("Model")), 404)
    chat = {
        "summary": "not supported by this model: answers 404 and says so",
        "requestBody": {"content": json_of({"type": "object"})},
        "responses": responses(None, 401, 404, 421, 431, 503),
    }
    paths = {
        "/v1/completions": {"post": _completions(engine)},
        "/v1/models": {"get": get("the models: one", json_of(ref("ModelList")))},
        "/v1/models/{name}": {"get": with_path(model, name=engine.name)},
        "/v1/chat/completions": {"post": chat},
    }
    title = f"OpenAI's text completions for the model '{engine.name}'."
    return document_of(title, paths, _schemas(), has_keys=has_keys)


def _completions(engine: TextEngine) -> Schema:
    event = object_of(data=TEXT)
    event["description"] = "a Completion whose texts are what is new; after the last one, [DONE]"
    answer = {**json_of(ref("Completion")), "text/event-stream": {"schema": event}}
    return {
        "summary": "continues a prompt",
        "requestBody": {"required": True, "content": json_of(fields_schema(engine.fields))},
        "responses": responses(answer, 400, 401, 404, 408, 413, 415, 421, 429, 431, 500, 503),
    }


def _schemas() -> Schema:
    count = {"type": "integer", "minimum": 0}
    maybe = {"type": ["string", "null"]}
    logprob = {"type": ["number", "null"], "maximum": 0}
    top = {"type": ["object", "null"], "additionalProperties": {"type": "number", "maximum": 0}}
    logprobs = object_of(
        tokens=list_of(TEXT),
        token_logprobs=list_of(logprob),
        top_logprobs={"type": ["array", "null"], "items": top},
        text_offset=list_of(count),
    )
    choice = object_of(
        text=TEXT,
        index=count,
        logprobs=or_null(logprobs),
        finish_reason={"enum": ["stop", "length"]},
    )
    choice["properties"]["session"] = {**TEXT, "description": "where return_session asked for it"}
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {
        "Completion": object_of(
            id=TEXT,
            object={"const": "text_completion"},
            created=count,
            model=TEXT,
            choices=list_of(choice, minItems=1),
            usage=object_of(**dict.fromkeys(names, count)),
        ),
        "Model": object_of(
            id=TEXT, object={"const": "model"}, created=count, owned_by={"const": "fastlstm"}
        ),
        "ModelList": object_of(object={"const": "list"}, data=list_of(ref("Model"))),
        "Error": object_of(error=object_of(message=TEXT, type=TEXT, param=maybe, code=maybe)),
    }
