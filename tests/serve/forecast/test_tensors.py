"""Tensors on their own: names as binary data."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from fastlstm.serve.forecast.tensors import TensorSpec, read_inputs
from fastlstm.serve.http.errors import ApiError

NAMES = {"kind": TensorSpec("kind", "BYTES", (-1, 1), ("kind",))}


def packed(*names: str) -> bytes:
    return b"".join(struct.pack("<I", len(n.encode())) + n.encode() for n in names)


def read(count: int, data: bytes) -> Any:
    tensor = {"name": "kind", "shape": [count, 1], "datatype": "BYTES"}
    tensor["parameters"] = {"binary_data_size": len(data)}
    return read_inputs([tensor], memoryview(data), NAMES)["kind"].ravel().tolist()


@pytest.mark.parametrize("names", [("a",), ("",), ("a", ""), ("", "", "é"), ("x" * 300, "")])
def test_names_may_be_empty(names: tuple[str, ...]) -> None:
    assert read(len(names), packed(*names)) == list(names)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (packed("a") + b"\0", "holds 1 whole element and 1 more byte, its shape [1, 1] says 1"),
        (packed("a", "b"), "holds 2 whole elements and 0 more bytes"),
        (packed("ab")[:-1], "holds 0 whole elements and 5 more bytes"),
        (b"", "holds 0 whole elements and 0 more bytes"),
        (b"\xff\xff\xff\xff", "holds 0 whole elements and 4 more bytes"),
    ],
)
def test_names_that_do_not_fit_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(1, data)
    assert why in caught.value.message
