"""The OpenAPI document of a server of forecasts: the Open Inference Protocol of one model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastlstm.serve.forecast.engine import VERSION
from fastlstm.serve.forecast.request import request_schema
from fastlstm.serve.forecast.tensors import SIZE
from fastlstm.serve.http import openapi as api

if TYPE_CHECKING:
    from fastlstm.serve.forecast.engine import ForecastEngine
    from fastlstm.serve.http.fields import Schema


def forecast_document(engine: ForecastEngine, *, has_keys: bool) -> Schema:
    """Returns the OpenAPI 3.1 document of a server of forecasts."""
    live = api.get(
        "whether requests make progress", api.json_of(api.object_of(live={"type": "boolean"}))
    )
    live["responses"]["503"] = live["responses"]["200"]
    ready = api.get("whether requests are taken", api.json_of(api.object_of(ready={"const": True})))
    metadata = api.get("the model's inputs and outputs", api.json_of(api.ref("Model")), 404)
    model_ready = api.object_of(name=api.TEXT, ready={"const": True})
    is_ready = api.get("whether the model takes requests", api.json_of(model_ready), 404)
    binary = {"application/octet-stream": {"schema": api.TEXT}}  # JSON, and tensors behind it
    infer = {
        "summary": "forecasts the steps after each window",
        "requestBody": {"required": True, "content": api.json_of(api.ref("Request"))},
        "responses": api.responses(
            {**api.json_of(api.ref("Answer")), **binary},
            *(400, 401, 404, 408, 409, 413, 415, 421, 431, 500, 503, 504),
        ),
    }
    paths: Schema = {
        "/v2": {"get": api.get("the server", api.json_of(api.ref("Server")))},
        "/v2/health/live": {"get": api.without_key(live)},
        "/v2/health/ready": {"get": api.without_key(ready)},
    }
    names = {"model": engine.name}
    for path, parts in (
        ("/v2/models/{model}", names),
        ("/v2/models/{model}/versions/{version}", {**names, "version": VERSION}),
    ):
        paths[path] = {"get": api.with_path(metadata, **parts)}
        paths[f"{path}/ready"] = {"get": api.with_path(is_ready, **parts)}
        paths[f"{path}/infer"] = {"post": api.with_path(infer, **parts)}
    about = f"Forecasts of the model '{engine.name}' by the Open Inference Protocol, version 2."
    return api.document_of(about, paths, _schemas(engine), has_keys=has_keys)


def _schemas(engine: ForecastEngine) -> Schema:
    tensors = api.list_of(api.object_of(name=api.TEXT, shape={"type": "array"}, datatype=api.TEXT))
    output = api.object_of(
        name={"enum": list(engine.outputs)},
        shape=api.list_of(SIZE),
        datatype={"enum": sorted({spec.datatype for spec in engine.outputs.values()})},
    )
    output["properties"]["data"] = api.list_of({"type": "number"})
    answer = api.object_of(model_name=api.TEXT, model_version=api.TEXT, outputs=api.list_of(output))
    answer["properties"]["id"] = api.TEXT
    return {
        "Request": request_schema(engine.inputs.values()),
        "Answer": answer,
        "Server": api.object_of(name=api.TEXT, version=api.TEXT, extensions={"type": "array"}),
        "Model": api.object_of(
            name=api.TEXT,
            versions={"type": "array"},
            platform=api.TEXT,
            inputs=tensors,
            outputs=tensors,
        ),
        "Error": api.object_of(error=api.TEXT),
    }
