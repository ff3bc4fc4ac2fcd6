"""What verbs print: rows, JSON, and messages on standard error."""

import io
import json
import os
import sys

import pytest

from fastlstm.cli import output
from fastlstm.cli.output import print_json, print_result, say, with_flags, write_page
from fastlstm.errors import UsageError


def test_names_with_digits_are_flags_too():
    text = with_flags("pass `invalid_utf8='replace'` or `vocab='byte'`")
    assert text == "pass `--invalid-utf8 replace` or `--vocab byte`"


ROWS = [("model", "runs/book"), ("bits/char", "1.5"), ("damage", "a\x1b[31mred")]


def test_rows_are_aligned_and_control_characters_shown(capsys):
    print_result({}, ROWS, use_json=False)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "model      runs/book"
    assert second == "bits/char  1.5"
    assert "\x1b" not in third
    assert third.startswith("damage     a")


def test_long_text_is_wrapped_on_a_terminal_only(monkeypatch, capsys):
    rows = [("note", "word " * 30)]
    print_result({}, rows, use_json=False)
    assert len(capsys.readouterr().out.splitlines()) == 1
    monkeypatch.setattr(output, "is_terminal", lambda _: True)
    monkeypatch.setattr(output, "columns", lambda: 40)
    print_result({}, rows, use_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3
    assert all(len(line) <= 40 and line.startswith("      word") for line in lines[1:])


def test_a_result_as_json_is_its_facts(capsys):
    print_result({"loss": 1.5}, ROWS, use_json=True)
    assert json.loads(capsys.readouterr().out) == {"loss": 1.5}


def test_secrets_are_hidden_in_texts_of_json(capsys, monkeypatch):
    monkeypatch.setenv("DB_PASSWORD", "000000")
    given = {"a": ['{"token": "abcdefgh"}', 'x?token=abc"d'], "share": 0.30000000004}
    print_result(given, ROWS, use_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["share"] == given["share"]
    assert "abcdefgh" not in str(shown)


def test_json_has_no_nan(capsys):
    print_json({"a": float("nan"), "b": [float("inf"), 1.0]})
    shown = capsys.readouterr().out
    assert shown.count("\n") == 1
    assert json.loads(shown) == {"a": None, "b": [None, 1.0]}


def test_a_message_has_indented_details(capsys):
    say("3 problems", ["row 1\x07", "row 2"])
    out, err = capsys.readouterr()
    assert out == ""
    first, second, third = err.splitlines()
    assert (first, third) == ("fastlstm: 3 problems", "  row 2")
    assert "\x07" not in second


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("`decimal=','`, `wide=True`; or `look=False`", "`--decimal , --wide`; or `--no-look`"),
        ("add `thousands=\"'\"`, `na='***'`", "add `--thousands ''\"'\"'' --na '***'`"),
        ("give `keep_value=-99` or name `series`", "give `--keep-value -99` or name `--series`"),
        ("`DataFrame` and `reset_index(drop=True)`", "`DataFrame` and `reset_index(drop=True)`"),
    ],
)
def test_settings_of_a_message_are_shown_as_flags(text, shown):
    assert with_flags(text) == shown


def test_a_message_to_a_closed_pipe_is_dropped(monkeypatch):
    class Closed(io.StringIO):
        def write(self, *_):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    say("to nobody")


def test_write_page_refuses_devices_and_keeps_links(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "page.html")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for place in (tmp_path, tmp_path / "pipe", tmp_path / "loop"):
        with pytest.raises(UsageError, match=r"--html is .*expected a file"):
            write_page(str(place), b"x", "--html")
    write_page(str(tmp_path / "link"), b"x", "--html")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "page.html").read_bytes() == b"x"
