"""What errors show of what was sent: enough to find it, never all of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fastlstm.serve.http.errors import ApiError, shown, value_name


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (None, "null"), (True, "true"), (7, "7"), (-7, "-7"), (10**400, "a huge number"),
        (-(10**400), "a huge number"), (10**20 - 1, "9" * 20), (1e300, "1e+300"), ("ab", "'ab'"),
        ("x" * 40, "'" + "x" * 40 + "'"), ("x" * 41, "a string of 41 characters"),
        ([[1] * 1000] * 3, "a list of 3"), ({"x" * 1000: 1}, "an object"),
    ],
)  # fmt: skip
def test_a_value_is_named_shortly(value: Any, name: str) -> None:
    assert value_name(value) == name


def test_a_long_text_is_cut() -> None:
    assert shown("x" * 200) == "x" * 200
    assert shown("x" * 201) == "x" * 200 + "…"


@pytest.mark.parametrize(
    ("path", "is_inference"),
    [("/v2", True), ("/v2/models/a/infer", True), ("/v2x", False), ("/v1/completions", False)],
)
def test_an_error_has_the_shape_of_its_protocol(path: str, is_inference: bool) -> None:
    error = json.loads(ApiError(408, "too slow", "prompt", "slow").body_at(path))["error"]
    whole = {"message": "too slow", "type": "timeout_error", "param": "prompt", "code": "slow"}
    assert error == ("too slow" if is_inference else whole)
