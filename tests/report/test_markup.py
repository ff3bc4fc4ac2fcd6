from __future__ import annotations

import pytest

from fastlstm.report.markup import MAX_NAME, failure_text, name_text, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("temp", "temp"),
        ("a\nb\r\tc", "a\\nb\\r\\tc"),
        ("\x1b[31m\x00\x7f\x9b", "\\x1b[31m\\x00\\x7f\\x9b"),
        ("\u202eevil\u2066", "\\u202eevil\\u2066"),
        ("\u2028\u2029", "\\u2028\\u2029"),
        ("\ud800\uffff\U0001fffe", "\\ud800\\uffff\\U0001fffe"),
        ("温度 é\u200d", "温度 é\u200d"),
    ],
)
def test_control_characters_can_be_seen(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_names_are_short_and_never_empty() -> None:
    assert name_text("") == '""'
    assert name_text("y") == "y"
    assert name_text("x" * 10_000) == "x" * MAX_NAME + "… (10,000 characters)"
    assert len(name_text("\x1b" * 10_000)) == len(name_text("x" * 40_000))  # as it is shown


def test_an_error_is_one_line() -> None:
    assert failure_text(ValueError("a\nb")) == "ValueError: a\\nb"
    assert failure_text(ValueError()) == "ValueError"
