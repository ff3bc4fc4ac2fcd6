"""Fields: what they parse, how they refuse, and that their schemas say the same."""

from __future__ import annotations

from typing import Any

import pytest

from fastlstm.serve.http.errors import ApiError
from fastlstm.serve.http.fields import (
    Field,
    Flag,
    Integer,
    Number,
    Object,
    Text,
    check_names,
    fields_schema,
    parse_fields,
)

FIELDS: dict[str, Field] = {
    "count": Integer(1, 5, " of apples", "how many"),
    "share": Number(0, 1),
    "positive": Number(1e-30, 2, "above 0 and at most 2"),
    "on": Flag(),
    "name": Text(3),
    "options": Object({"loud": Flag()}, "more"),
}


def refused(**values: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_fields(values, FIELDS)
    assert caught.value.status == 400
    return caught.value


def test_good_values_are_returned_and_null_counts_as_not_given() -> None:
    values = {"count": 3.0, "share": 1, "on": False, "name": "abc", "options": {"loud": True}}
    assert parse_fields({**values, "positive": None}, FIELDS) == {**values, "count": 3}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 6, "count is 6, expected a whole number of apples, 1 to 5"),
        ("count", 2.5, "count is 2.5, expected a whole number of apples, 1 to 5"),
        ("count", True, "count is true, expected a whole number of apples, 1 to 5"),
        ("share", float("nan"), "share is nan, expected a number, 0 to 1"),
        ("share", "1", "share is '1', expected a number, 0 to 1"),
        ("positive", 0, "positive is 0, expected a number, above 0 and at most 2"),
        ("on", 1, "on is 1, expected true or false"),
        ("name", 7, "name is 7, expected a string"),
        ("name", "abcd", "name has 4 characters, expected at most 3"),
        ("name", "a\ud800", "name has an unpaired surrogate at character 1; send whole ones"),
        ("options", [], "options is a list of 0, expected an object"),
    ],
)
def test_what_is_wrong_is_named(name: str, value: Any, message: str) -> None:
    error = refused(**{name: value})
    assert (error.message, error.param) == (message, name)


def test_fields_are_checked_in_their_own_order() -> None:
    assert refused(name=7, count=9).param == "count"


def test_an_object_takes_its_fields_only_and_no_null() -> None:
    error = refused(options={"lowd": True})
    hint = "unknown field 'lowd' of options (did you mean 'loud'?)"
    assert (error.message, error.param) == (hint, "options")
    error = refused(options={"loud": None})
    assert error.message == "options.loud is null, expected true or false"
    assert error.param == "options.loud"


def test_unknown_names_are_shown_short() -> None:
    assert refused(nam=1).message == "unknown field 'nam' (did you mean 'name'?)"
    error = refused(**{"x" * 5000: 1})
    assert len(error.message) < 300
    assert error.param == "x" * 64
    with pytest.raises(ApiError, match="unknown parameter 'a'"):
        check_names(["a"], ["b", "c"], "parameter")


def test_the_schema_says_what_is_parsed() -> None:
    schema = fields_schema(FIELDS)
    assert schema["additionalProperties"] is False
    assert list(schema["properties"]) == list(FIELDS)
    count = schema["properties"]["count"]
    assert count["description"] == "how many"
    assert count["anyOf"] == [
        {"type": "integer", "minimum": 1, "maximum": 5},
        {"type": "null"},
    ]
    assert schema["properties"]["options"]["anyOf"][0]["additionalProperties"] is False
