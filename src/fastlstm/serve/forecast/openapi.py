"""The OpenAPI document of a server of forecasts: the Open Inference Protocol of one model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastlstm.serve.forecast.engine import VERSION
from fastlstm.serve.forecast.request import request_schema
from fastlstm.serve.forecast.tensors import SIZE
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
    without_key,
)

if TYPE_CHECKING:
    from fastlstm.serve.forecast.engine import ForecastEngine
    from fastlstm.serve.http.fields import Schema


def forecast_document(engine: ForecastEngine, *, has_keys: bool) -> Schema:
    """Returns the OpenAPI 3.1 document of a server of forecasts."""
    live = get("whether requests make progress", json_of(object_of(live={"type": "boolean"})))
    live["responses"]["503"] = live["responses"]["200"]
    ready = get("whether requests are taken", json_of(object_of(ready={"const": True})))
    metadata = get("the model's inputs and outputs", json_of(ref("Model")), 404)
    model_ready = object_of(name=TEXT, ready={"const": True})
    is_ready = get("whether the model takes requests", json_of(model_ready), 404)
    binary = {"application/octet-stream": {"schema": TEXT}}  # JSON, and tensors behind it
    infer = {
        "summary": "forecasts the steps after each window",
        "requestBody": {"required": True, "content": json_of(ref("Request"))},
        "responses": responses(
            {**json_of(ref("Answer")), **binary},
            *(400, 401, 404, 408, 409, 413, 415, 421, 431, 500, 503, 504),
        ),
    }
    paths: Schema = {
        "/v2": {"get": get("the server", json_of(ref("Server")))},
        "/v2/health/live": {"get": without_key(live)},
        "/v2/health/ready": {"get": without_key(ready)},
    }
    names = {"model": engine.name}
    for path, parts in (
        ("/v2/models/{model}", names),
        ("/v2/models/{model}/versions/{version}", {**names, "version": VERSION}),
    ):
        paths[path] = {"get": with_path(metadata, **parts)}
        paths[f"{path}/ready"] = {"get": with_path(is_ready, **parts)}
        paths[f"{path}/infer"] = {"post": with_path(infer, **parts)}
    about = f"Forecasts of the model '{engine.name}' by the Open Inference Protocol, version 2."
    return document_of(about, paths, _schemas(engine), has_keys=has_keys)


def _schemas(engine: ForecastEngine) -> Schema:
    tensors = list_of(object_of(name=TEXT, shape={"type": "array"}, datatype=TEXT))
    output = object_of(
        name={"enum": list(engine.outputs)},
        shape=list_of(SIZE),
        datatype={"enum": sorted({spec.datatype for spec in engine.outputs.values()})},
    )
    output["properties"]["data"] = list_of({"type": "number"})
    answer = object_of(model_name=TEXT, model_version=TEXT, outputs=list_of(output))
    answer["properties"]["id"] = TEXT
    return {
        "Request": request_schema(engine.inputs.values()),
        "Answer": answer,
        "Server": object_of(name=TEXT, version=TEXT, extensions={"type": "array"}),
        "Model": object_of(
            name=TEXT, versions={"type": "array"}, platform=TEXT, inputs=tensors, outputs=tensors
        ),
        "Error": object_of(error=TEXT),
    }
