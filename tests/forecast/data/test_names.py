from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from fastlstm.forecast.data.names import Names, canonical, without_nan


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


@pytest.mark.parametrize(("text", "plain"), [("7.0", "7"), ("-3.00", "-3"), ("7.5", "7.5")])
def test_a_fraction_of_zeros_is_dropped(text: str, plain: str) -> None:
    names = Names(pa.float64())  # read as text
    names.number(pa.array([text]))
    assert names.plain() == [plain]


def test_names_are_numbered_in_order_of_first_appearance() -> None:
    names = Names()
    assert names.number(pa.array(["b", "a", "b", "c"])).tolist() == [0, 1, 0, 2]
    assert names.number(pa.array(["c", "d"])).tolist() == [2, 3]
    assert names.plain() == ["b", "a", "c", "d"]


def test_a_dictionary_is_numbered_by_what_its_rows_use() -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([2, 0, 2]), pa.array(["x", "unused", "y"]))
    names = Names()
    assert names.number(column).tolist() == [0, 1, 0]
    assert names.plain() == ["y", "x"]


def test_two_spellings_of_a_name_are_noted() -> None:
    names = Names()
    names.number(pa.array([7]))
    assert names.number(pa.array(["7"])).tolist() == [0]
    assert names.notes("shop") == ["column 'shop': 7 and '7' are the same name"]


def test_names_of_several_types_become_texts() -> None:
    names = Names()
    names.number(pa.array([7]))
    names.number(pa.array(["a"]))
    assert names.plain() == ["7", "a"]


@pytest.mark.parametrize(
    ("kind", "text", "name"), [(pa.float64(), "7.0", "7"), (pa.bool_(), "True", "true")]
)
def test_a_column_read_as_text_has_the_names_of_its_type(
    kind: pa.DataType, text: str, name: str
) -> None:
    names = Names(kind)
    names.number(pa.array([text]))
    assert names.plain() == [name]


def test_nan_and_nulls_of_a_dictionary_are_null() -> None:
    assert without_nan(pa.array([1.0, float("nan")])).to_pylist() == [1.0, None]
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["a", None]))
    assert without_nan(column).to_pylist() == ["a", None]
    assert Names().number(pa.array([None, None], pa.string())).tolist() == [0, 0]
