"""The OpenAPI document of a server of forecasts: the Open Inference Protocol of one model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastlstm.serve.forecast import request as request
from fastlstm.serve.forecast.engine import VERSION
from fastlstm.serve.forecast.tensors import MAX_SIZE
from fastlstm.serve.openapi_parts import (
    HEALTH,
    Schema,
    document_of,
    get,
    json_of,
    object_of,
    or_null,
    ref,
    responses,
    shared_paths,
    without_key,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastlstm.serve.forecast.engine import ForecastEngine
    from fastlstm.serve.forecast.tensors import Spec

_TEXT: Schema = {"type": "string"}
_SIZE: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_SIZE}


def forecast_document(engine: ForecastEngine, *, has_keys: bool) -> Schema:
    """Returns the OpenAPI 3.1 document of a server of forecasts."""
    live = get("whether requests go on", json_of(object_of(live={"type": "boolean"})))
    live["responses"]["503"] = live["responses"]["200"]
    ready = get("whether requests are taken", json_of(object_of(ready={"const": True})))
    paths: Schema = {
        "/v2": {"get": get("the server", json_of(ref("Server")))},
        "/v2/health/live": {"get": without_key(live)},
        "/v2/health/ready": {"get": without_key(ready)},
    }
    model_ready = object_of(name=_TEXT, ready={"const": True})
    for path, names in (
        ("/v2/models/{model}", {"model": engine.name}),
        (
            "/v2/models/{model}/versions/{version}",
            {"model": engine.name, "version": VERSION},
        ),
    ):
        metadata = get("the model's inputs and outputs", json_of(ref("Model")), 404)
        is_ready = get("whether the model takes requests", json_of(model_ready), 404)
        paths[path] = {"get": _named(metadata, names)}
        paths[f"{path}/ready"] = {"get": _named(is_ready, names)}
        paths[f"{path}/infer"] = {"post": _named(_infer(), names)}
    about = f"Forecasts of the model '{engine.name}' by the Open Inference Protocol, version 2."
    schemas = _schemas(list(engine.inputs.values()), list(engine.outputs.values()))
    return document_of(about, {**paths, **shared_paths()}, schemas, has_keys=has_keys)


def _named(operation: Schema, names: dict[str, str]) -> Schema:
    parameters = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1},
            "example": value,
        }
        for name, value in names.items()
    ]
    return {**operation, "parameters": parameters}


def _infer() -> Schema:
    binary = {"application/octet-stream": {"schema": _TEXT}}  # JSON, and tensors behind it
    return {
        "summary": "forecasts the steps after each window",
        "requestBody": {"required": True, "content": json_of(ref("Request"))},
        "responses": responses(
            {**json_of(ref("Answer")), **binary},
            *(400, 401, 404, 408, 409, 413, 415, 421, 431, 500, 503, 504),
        ),
    }


def _schemas(inputs: Sequence[Spec], outputs: Sequence[Spec]) -> Schema:
    tensor = object_of(name=_TEXT, shape={"type": "array"}, datatype=_TEXT)
    answered = object_of(
        name={"enum": [spec.name for spec in outputs]},
        shape={"type": "array", "items": _SIZE},
        datatype={"enum": sorted({spec.datatype for spec in outputs})},
    )
    answered["properties"]["data"] = {"type": "array", "items": {"type": "number"}}
    answer = object_of(
        model_name=_TEXT, model_version=_TEXT, outputs={"type": "array", "items": answered}
    )
    answer["properties"]["id"] = _TEXT
    tensors = {"type": "array", "items": tensor}
    return {
        "Request": _request(inputs, outputs),
        "Answer": answer,
        "Server": object_of(name=_TEXT, version=_TEXT, extensions={"type": "array"}),
        "Model": object_of(
            name=_TEXT, versions={"type": "array"}, platform=_TEXT, inputs=tensors, outputs=tensors
        ),
        "Health": HEALTH,
        "Error": object_of(error=_TEXT),
    }


def _request(inputs: Sequence[Spec], outputs: Sequence[Spec]) -> Schema:
    name = {"type": "string", "maxLength": request.MAX_NAME}
    level = {
        "type": "number", "minimum": request.LOWEST_LEVEL, "maximum": request.HIGHEST_LEVEL,
    }  # fmt: skip
    flag = or_null({"type": "boolean"})
    parameters = {
        "quantiles": or_null(
            {"type": "array", "items": level, "minItems": 1, "maxItems": request.MAX_LEVELS}
        ),
        "timeout": or_null(
            {"type": "integer", "minimum": 0, "maximum": (1 << 53) - 1},
            description="microseconds; 0 is none",
        ),
        "sequence_id": or_null({"type": "integer", "minimum": 0, "maximum": (1 << 64) - 1}, name),
        "sequence_start": flag,
        "sequence_end": flag,
        "binary_data_output": flag,
    }
    asked = {
        "type": "object",
        "properties": {
            "name": {"enum": [spec.name for spec in outputs]},
            "parameters": or_null(
                {
                    "type": "object",
                    "properties": {"binary_data": {"type": "boolean"}},
                    "additionalProperties": False,
                }
            ),
        },
        "required": ["name"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {
            "id": or_null(name),
            "parameters": or_null(
                {"type": "object", "properties": parameters, "additionalProperties": False}
            ),
            "inputs": {"type": "array", "items": {"anyOf": [_input(spec) for spec in inputs]}},
            "outputs": or_null({"type": "array", "items": asked}),
        },
        "required": ["inputs"],
        "additionalProperties": False,
    }


def _input(spec: Spec) -> Schema:
    element = _TEXT if spec.datatype == "BYTES" else {"type": "number"}
    if spec.may_miss:
        element = or_null(element)
    shape = [_SIZE if size == -1 else {"const": size} for size in spec.shape]
    return {
        "type": "object",
        "description": f"the last axis: {', '.join(spec.columns)}; data may be nested like shape",
        "properties": {
            "name": {"const": spec.name},
            "shape": {
                "type": "array",
                "prefixItems": shape,
                "items": False,
                "minItems": len(shape),
            },
            "datatype": {"const": spec.datatype},
            "parameters": or_null({"type": "object", "additionalProperties": False}),
            "data": {"type": "array", "items": {"anyOf": [element, {"type": "array"}]}},
        },
        "required": ["name", "shape", "datatype", "data"],
        "additionalProperties": False,
    }
