"""What the OpenAPI documents are made of: schemas, operations, and the routes of every server."""

from __future__ import annotations

import importlib.metadata
from typing import Any

Schema = dict[str, Any]

ERRORS = {
    400: "a field is wrong; `param` names it",
    401: "the API key is missing or wrong",
    404: "no such model or path",
    408: "headers or body did not come in time",
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


def document_of(about: str, paths: Schema, schemas: Schema, *, has_keys: bool) -> Schema:
    """Returns an OpenAPI 3.1 document."""
    found: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "fastlstm",
            "version": importlib.metadata.version("fastlstm"),
            "description": about,
        },
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if has_keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def shared_paths() -> Schema:
    """Returns the routes of every server; `Health` and `Error` are schemas of the document."""
    health = json_of(ref("Health"))
    paths = {
        "/metrics": {"get": get("counters, for Prometheus", text_of("text/plain"))},
        "/openapi.json": {"get": get("this document", json_of({"type": "object"}))},
        "/": {"get": without_key(get("the page", text_of("text/html")))},
        "/health/live": {"get": without_key(get("whether requests go on", health))},
        "/health/ready": {"get": without_key(get("whether requests are taken", health))},
    }
    stuck = {"description": "requests are under way and nothing moves", "content": health}
    paths["/health/live"]["get"]["responses"]["503"] = stuck
    return paths


def get(summary: str, answer: Schema, *more: int) -> Schema:
    """Returns an operation that reads."""
    return {"summary": summary, "responses": responses(answer, 401, 421, 431, 503, *more)}


def without_key(operation: Schema) -> Schema:
    """Returns an operation that needs no key."""
    return {**operation, "security": []}


def responses(answer: Schema | None, *errors: int) -> Schema:
    """Returns the answers of an operation: 200, and errors."""
    found = {} if answer is None else {"200": {"description": "the answer", "content": answer}}
    for status in sorted(errors):
        found[str(status)] = {"description": ERRORS[status], "content": json_of(ref("Error"))}
    return found


def object_of(**properties: Schema) -> Schema:
    """Returns an object of which every property is there."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def or_null(*schemas: Schema, description: str = "") -> Schema:
    """Returns one of several schemas, or null."""
    found: Schema = {"anyOf": [*schemas, {"type": "null"}]}
    return {**found, "description": description} if description else found


def number(low: float, high: float) -> Schema:
    """Returns a number or null."""
    return or_null({"type": "number", "minimum": low, "maximum": high})


def whole(low: int, high: int) -> Schema:
    """Returns a whole number or null."""
    return or_null({"type": "integer", "minimum": low, "maximum": high})


def flag() -> Schema:
    """Returns true, false or null."""
    return or_null({"type": "boolean"})


def json_of(schema: Schema) -> Schema:
    """Returns JSON of a schema."""
    return {"application/json": {"schema": schema}}


def text_of(kind: str) -> Schema:
    """Returns a text of a media type."""
    return {kind: {"schema": {"type": "string"}}}


def ref(name: str) -> Schema:
    """Returns a schema of the document by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


HEALTH = object_of(status={"enum": ["live", "ready", "stuck"]})
