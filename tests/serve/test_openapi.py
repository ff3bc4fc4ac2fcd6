"""Schemathesis checks the servers of both kinds of models against their OpenAPI documents."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import positive_data_acceptance
from schemathesis.generation.modes import GenerationMode

from running_server import SETTINGS, Running

MAIN = ("/v1/completions", "/v1/chat/completions", "/v2/models/{model}/infer")
TIED = {"best_of", "stream_options", "return_session", "session", "logit_bias", "store"}
"""Fields whose rules no schema can say: they depend on others, on a state, on the vocabulary."""


@pytest.fixture(scope="module")
def texts(byte_model):
    limits = replace(SETTINGS, max_tokens=40, max_streams=40_000, max_prompt_tokens=1 << 20)
    server = Running(byte_model, limits)
    yield server
    assert server.scheduler.num_held == 0
    server.end()


@pytest.mark.parametrize("mode", GenerationMode, ids=str)
@pytest.mark.parametrize(("kind", "num"), [("texts", 12), ("whole_forecasts", 15)])
def test_every_answer_is_what_the_document_says(kind, num, mode, request):
    running: Running = request.getfixturevalue(kind)
    api = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    operations = [found.ok() for found in api.get_all_operations()]
    assert len(operations) == num  # without the document itself
    for operation in operations:
        is_main = operation.path in MAIN
        with contextlib.nullcontext() if is_main else contextlib.suppress(Unsatisfiable):
            # A request without parts has nothing to be wrong.
            ask(operation.as_strategy(generation_mode=mode), kind, 100 if is_main else 8)


def ask(cases: Any, kind: str, count: int) -> None:
    @given(case=cases)
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    def one(case: Any) -> None:
        if kind == "whole_forecasts" and "model" in (case.path_parameters or {}):
            case.path_parameters["model"] = "waves"
        answer = case.call(timeout=30)
        case.validate_response(answer, excluded_checks=[positive_data_acceptance])
        is_positive = case.meta.generation.mode.is_positive
        # That the data fits the shape, and the tensors each other, no schema can say.
        if kind == "texts" and answer.status_code == 400 and is_positive:
            error = answer.json()["error"]  # a whole number such as 3.0 is an integer to a schema
            assert error["param"] in TIED or "`int" in error["message"], answer.text

    one()


def test_generators_of_clients_read_the_document(texts):
    """openapi-python-client leaves out what has an array without items, one title twice, or an
    enumeration that is neither of strings nor of numbers."""
    schemas = texts.client.get("/openapi.json").json()["components"]["schemas"]
    assert [schema.get("title") for schema in schemas.values()] == list(schemas)
    todo: list[Any] = [schemas]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            assert part.get("type") != "array" or part["items"], part
            assert not any(isinstance(value, bool) for value in part.get("enum", ())), part
        if isinstance(part, dict | list):
            todo += part.values() if isinstance(part, dict) else part


def test_the_document_lists_the_paths_without_a_key(serve):
    for keys, wanted in (((), None), (("secret",), [{"key": []}])):
        server: Running = serve(keys=keys)
        server.client.headers["authorization"] = "Bearer secret"
        document = server.client.get("/openapi.json").json()
        assert document.get("security") == wanted
        assert ("securitySchemes" in document["components"]) == bool(keys)
        open_paths = {
            path
            for path, operations in document["paths"].items()
            if operations.get("get", {}).get("security") == []
        }
        assert open_paths == {"/", "/health", "/health/live", "/health/ready"}


def test_the_document_lists_every_error_of_a_completion(texts):
    paths = texts.client.get("/openapi.json").json()["paths"]
    found = set(paths["/v1/completions"]["post"]["responses"])
    assert found == {
        "200", "400", "401", "404", "408", "413", "415", "421", "429", "431", "500", "503",
    }  # fmt: skip


def test_the_document_describes_the_model(whole_forecasts):
    document = whole_forecasts.client.get("/openapi.json").json()
    infer = document["paths"]["/v2/models/{model}/infer"]["post"]
    assert infer["parameters"][0]["example"] == "waves"
    assert {"200", "400", "404", "409", "413", "503"} <= set(infer["responses"])
    request = document["components"]["schemas"]["Request"]
    listed = request["properties"]["inputs"]["items"]["anyOf"]
    names = ["past", "past_names", "future", "future_names", "static", "static_names"]
    assert [one["$ref"].rpartition("/")[2] for one in listed] == [
        f"Input_{name}" for name in [*names, "series_names"]
    ]
    past = document["components"]["schemas"]["Input_past"]
    assert past["properties"]["name"] == {"enum": ["past"]}
    assert "last axis: y, temp, price" in past["properties"]["data"]["description"]
    assert not [path for path in document["paths"] if path.startswith("/v1")]
