"""Tensors of requests and answers: flat and nested data, names."""

import json

import msgspec
import numpy as np
import pytest

from fastlstm.serve.forecast.inference import answer_parts
from fastlstm.serve.forecast.request import TensorSpec, read_inputs
from fastlstm.serve.http.errors import ApiError

ROWS = TensorSpec("rows", "FP32", (-1, 2), ("a", "b"), may_miss=True)
KIND = TensorSpec("kind", "BYTES", (-1, 1), ("kind",))


def read(spec, shape, data):
    tensor = {"name": spec.name, "shape": shape, "datatype": spec.datatype, "data": data}
    found = msgspec.json.decode(json.dumps(tensor), type=spec.struct())
    return read_inputs([found])[spec.name]


@pytest.mark.parametrize("names", [("a",), ("",), ("a", ""), ("", "", "é"), ("x" * 300, "")])
@pytest.mark.parametrize("is_nested", [False, True])
def test_names_may_be_empty(names, is_nested):
    data = [[name] for name in names] if is_nested else names
    assert read(KIND, [len(names), 1], data).ravel().tolist() == list(names)


def test_numbers_are_flat_or_nested_and_null_is_missing():
    expected = np.array([[1, np.nan], [3, 4.5]], dtype=np.float32)
    for data in ([1, None, 3, 4.5], [[1, None], [3, 4.5]]):
        found = read(ROWS, [2, 2], data)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)
    assert read(ROWS, [0, 2], []).shape == (0, 2)


def test_a_missing_name_is_refused_if_training_had_none():
    with pytest.raises(ApiError, match=r"has a missing value \(null\) at \[1, 0\]"):
        read(KIND, [2, 1], ["a", None])


def test_an_answer_is_made_in_parts():
    outputs = {"forecast": np.arange(10_000, dtype=np.float32), "quantiles": np.zeros((1, 2))}
    parts = list(answer_parts({"model_name": "é"}, outputs))
    assert max(map(len, parts)) < 40_000
    found = json.loads(b"".join(parts))
    assert [found["model_name"], *(one["datatype"] for one in found["outputs"])] == [
        *("é", "FP32", "FP64"),
    ]
    assert found["outputs"][0]["data"] == list(range(10_000))
    assert found["outputs"][1]["shape"] == [1, 2]
