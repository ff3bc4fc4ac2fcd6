"""Schemathesis checks the server of a text model against its OpenAPI document."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import positive_data_acceptance
from schemathesis.generation.modes import GenerationMode

from fastlstm.text.loading import InferenceModel
from running_server import SETTINGS, Running

TIED = {"best_of", "stream_options", "return_session", "session", "logit_bias"}
"""Fields whose rules no schema can say: they depend on others, on a state, on the vocabulary."""


@pytest.fixture(scope="module")
def running(byte_model: InferenceModel) -> Iterator[Running]:
    limits = replace(SETTINGS, max_tokens=40, max_streams=40_000, max_prompt_tokens=1 << 20)
    server = Running(byte_model, limits)
    yield server
    assert server.scheduler.num_held == 0
    server.end()


@pytest.fixture(scope="module")
def api(running: Running) -> Any:
    return schemathesis.openapi.from_url(f"{running.url}/openapi.json")


@pytest.mark.parametrize("mode", GenerationMode, ids=str)
def test_every_answer_is_what_the_document_says(api: Any, mode: GenerationMode) -> None:
    operations = [found.ok() for found in api.get_all_operations()]
    assert len(operations) == 8  # without the document itself
    for operation in operations:
        is_main = operation.path.endswith("/completions")
        with contextlib.nullcontext() if is_main else contextlib.suppress(Unsatisfiable):
            # A request without parts has nothing to be wrong.
            ask(operation.as_strategy(generation_mode=mode), 100 if is_main else 10)


def test_the_document_lists_the_paths_without_a_key(serve: Any) -> None:
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
        assert open_paths == {"/", "/health/live", "/health/ready"}


def test_the_document_lists_every_error_of_a_completion(running: Running) -> None:
    paths = running.client.get("/openapi.json").json()["paths"]
    found = set(paths["/v1/completions"]["post"]["responses"])
    assert found == {
        "200", "400", "401", "404", "408", "413", "415", "421", "429", "431", "500", "503",
    }  # fmt: skip


def ask(cases: Any, count: int) -> None:
    @given(case=cases)
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    def one(case: Any) -> None:
        answer = case.call(timeout=30)
        case.validate_response(answer, excluded_checks=[positive_data_acceptance])
        if answer.status_code == 400 and case.meta.generation.mode.is_positive:
            error = answer.json()["error"]  # a whole number such as 3.0 is an integer to a schema
            assert error["param"] in TIED or "`int" in error["message"], answer.text

    one()
