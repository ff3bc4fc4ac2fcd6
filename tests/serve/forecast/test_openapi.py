"""Schemathesis checks the server of a forecaster against its OpenAPI document."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import positive_data_acceptance
from schemathesis.generation.modes import GenerationMode

from running_server import Running


@pytest.fixture(scope="module")
def api(whole_forecasts: Running) -> Any:
    return schemathesis.openapi.from_url(f"{whole_forecasts.url}/openapi.json")


@pytest.mark.parametrize("mode", GenerationMode, ids=str)
def test_every_answer_is_what_the_document_says(api: Any, mode: GenerationMode) -> None:
    operations = [found.ok() for found in api.get_all_operations()]
    assert len(operations) == 14  # without the document itself
    for operation in operations:
        is_main = operation.path == "/v2/models/{model}/infer"
        with contextlib.nullcontext() if is_main else contextlib.suppress(Unsatisfiable):
            # A request without parts has nothing to be wrong.
            ask(operation.as_strategy(generation_mode=mode), 100 if is_main else 5)


def ask(cases: Any, count: int) -> None:
    # That the data fits the shape, and the tensors each other, no schema can say.
    @given(case=cases)
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    def one(case: Any) -> None:
        if "model" in (case.path_parameters or {}):
            case.path_parameters["model"] = "waves"
        case.validate_response(case.call(timeout=30), excluded_checks=[positive_data_acceptance])

    one()


def test_the_document_describes_the_model(whole_forecasts: Running) -> None:
    document = whole_forecasts.client.get("/openapi.json").json()
    infer = document["paths"]["/v2/models/{model}/infer"]["post"]
    assert infer["parameters"][0]["example"] == "waves"
    assert {"200", "400", "404", "409", "413", "503", "504"} <= set(infer["responses"])
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
