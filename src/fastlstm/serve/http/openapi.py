"""What the OpenAPI documents are made of: operations, answers, and the routes of every server."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastlstm.serve.http.fields import Schema

ERRORS = {
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
TEXT: Schema = {"type": "string"}


def document_of(about: str, paths: Schema, schemas: Schema, *, has_keys: bool) -> Schema:
    """Returns an OpenAPI 3.1 document: these paths and schemas, and those of every server."""
    info = {"title": "fastlstm", "version": importlib.metadata.version("fastlstm")}
    document: Schema = {
        "openapi": "3.1.0",
        "info": {**info, "description": about},
        "paths": {**paths, **_shared_paths()},
        "components": {"schemas": {**schemas, "Health": _HEALTH}},
    }
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _shared_paths() -> Schema:
    health = json_of(ref("Health"))
    paths = {
        "/metrics": {"get": get("counters, for Prometheus", {"text/plain": {"schema": TEXT}})},
        "/openapi.json": {"get": get("this document", json_of({"type": "object"}))},
        "/": {"get": without_key(get("the page", {"text/html": {"schema": TEXT}}))},
        "/health/live": {"get": without_key(get("whether requests make progress", health))},
        "/health/ready": {"get": without_key(get("whether requests are taken", health))},
    }
    stuck = {"description": "requests are under way and make no progress", "content": health}
    paths["/health/live"]["get"]["responses"]["503"] = stuck
    return paths


def get(summary: str, answer: Schema, *more: int) -> Schema:
    """Returns an operation that reads."""
    return {"summary": summary, "responses": responses(answer, 401, 421, 431, 503, *more)}


def without_key(operation: Schema) -> Schema:
    """Returns an operation that needs no key."""
    return {**operation, "security": []}


def with_path(operation: Schema, **examples: str) -> Schema:
    """Returns an operation with parameters of its path, each with an example."""
    kind = {"in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    parameters = [{"name": name, **kind, "example": value} for name, value in examples.items()]
    return {**operation, "parameters": parameters}


def responses(answer: Schema | None, *errors: int) -> Schema:
    """Returns the answers of an operation: 200, and errors."""
    listed = {} if answer is None else {"200": {"description": "the answer", "content": answer}}
    for status in sorted(errors):
        listed[str(status)] = {"description": ERRORS[status], "content": json_of(ref("Error"))}
    return listed


def object_of(**properties: Schema) -> Schema:
    """Returns the schema of an object that has every property."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def list_of(items: Schema, **more: int) -> Schema:
    """Returns the schema of a list."""
    return {"type": "array", "items": items, **more}


def json_of(schema: Schema) -> Schema:
    """Returns the content of a JSON body."""
    return {"application/json": {"schema": schema}}


def ref(name: str) -> Schema:
    """Returns a reference to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


_HEALTH = object_of(status={"enum": ["live", "ready", "stuck"]})
