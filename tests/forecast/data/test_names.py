from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from fastlstm.forecast.data.names import Names, canonical


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (7, "7"),
        (7.0, "7"),
        ("7", "7"),
        (Decimal("7.00"), "7"),
        (7.5, "7.5"),
        (True, "true"),
        ("True", "True"),
        ("007", "007"),
    ],
)
def test_names_are_compared_by_their_text(name: Any, text: str) -> None:
    assert canonical(name) == text


def test_names_are_numbered_in_order_of_first_appearance() -> None:
    names = Names()
    assert names.number(pa.array(["b", "a", "b", "c"])).tolist() == [0, 1, 0, 2]
    assert names.number(pa.array(["c", "d"])).tolist() == [2, 3]
    assert names.plain() == ["b", "a", "c", "d"]


@pytest.mark.parametrize(
    ("kind", "text", "name"),
    [
        (pa.float64(), "7.0", "7"),
        (pa.float64(), "-3.00", "-3"),
        (pa.float64(), "7.5", "7.5"),
        (pa.bool_(), "True", "true"),
    ],
)
def test_a_column_read_as_text_has_the_names_of_its_type(
    kind: pa.DataType, text: str, name: str
) -> None:
    names = Names(kind)
    names.number(pa.array([text]))
    assert names.plain() == [name]
