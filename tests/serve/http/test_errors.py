"""Error objects: clipped texts and the form of each protocol."""

import json

import pytest

from fastlstm.serve.http.errors import ApiError


@pytest.mark.parametrize(
    ("path", "is_inference"),
    [("/v2", True), ("/v2/models/a/infer", True), ("/v2x", False), ("/v1/completions", False)],
)
def test_an_error_has_the_shape_of_its_protocol(path, is_inference):
    error = json.loads(ApiError(408, "too slow", "prompt", "slow").body_at(path))["error"]
    whole = {"message": "too slow", "type": "timeout_error", "param": "prompt", "code": "slow"}
    assert error == ("too slow" if is_inference else whole)
