"""The OpenAPI document of a server of texts; the request's fields describe themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastlstm.serve.http import openapi as api
from fastlstm.serve.http.fields import fields_schema, or_null

if TYPE_CHECKING:
    from fastlstm.serve.http.fields import Schema
    from fastlstm.serve.text.engine import TextEngine


def text_document(engine: TextEngine, *, has_keys: bool) -> Schema:
    """Returns the OpenAPI 3.1 document of a server of texts."""
    model = api.get("the model", api.json_of(api.ref("Model")), 404)
    chat = {
        "summary": "not supported by this model: answers 404 and says so",
        "requestBody": {"content": api.json_of({"type": "object"})},
        "responses": api.responses(None, 401, 404, 421, 431, 503),
    }
    paths = {
        "/v1/completions": {"post": _completions(engine)},
        "/v1/models": {"get": api.get("the models: one", api.json_of(api.ref("ModelList")))},
        "/v1/models/{name}": {"get": api.with_path(model, name=engine.name)},
        "/v1/chat/completions": {"post": chat},
    }
    title = f"OpenAI's text completions for the model '{engine.name}'."
    return api.document_of(title, paths, _schemas(), has_keys=has_keys)


def _completions(engine: TextEngine) -> Schema:
    event = api.object_of(data=api.TEXT)
    event["description"] = "a Completion whose texts are what is new; after the last one, [DONE]"
    answer = {**api.json_of(api.ref("Completion")), "text/event-stream": {"schema": event}}
    return {
        "summary": "continues a prompt",
        "requestBody": {"required": True, "content": api.json_of(fields_schema(engine.fields))},
        "responses": api.responses(answer, 400, 401, 404, 408, 413, 415, 421, 429, 431, 500, 503),
    }


def _schemas() -> Schema:
    count = {"type": "integer", "minimum": 0}
    maybe = {"type": ["string", "null"]}
    logprob = {"type": ["number", "null"], "maximum": 0}
    top = {"type": ["object", "null"], "additionalProperties": {"type": "number", "maximum": 0}}
    logprobs = api.object_of(
        tokens=api.list_of(api.TEXT),
        token_logprobs=api.list_of(logprob),
        top_logprobs={"type": ["array", "null"], "items": top},
        text_offset=api.list_of(count),
    )
    choice = api.object_of(
        text=api.TEXT,
        index=count,
        logprobs=or_null(logprobs),
        finish_reason={"enum": ["stop", "length"]},
    )
    choice["properties"]["session"] = {
        **api.TEXT,
        "description": "where return_session asked for it",
    }
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {
        "Completion": api.object_of(
            id=api.TEXT,
            object={"const": "text_completion"},
            created=count,
            model=api.TEXT,
            choices=api.list_of(choice, minItems=1),
            usage=api.object_of(**dict.fromkeys(names, count)),
        ),
        "Model": api.object_of(
            id=api.TEXT, object={"const": "model"}, created=count, owned_by={"const": "fastlstm"}
        ),
        "ModelList": api.object_of(object={"const": "list"}, data=api.list_of(api.ref("Model"))),
        "Error": api.object_of(
            error=api.object_of(message=api.TEXT, type=api.TEXT, param=maybe, code=maybe)
        ),
    }
