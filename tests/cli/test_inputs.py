"""Runs and tables of a command line: opened, or refused before anything is loaded."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from fastlstm.cli import inputs
from fastlstm.cli.command import parse
from fastlstm.cli.forecast import COMMAND
from fastlstm.errors import DataError, FormatError


def test_a_model_is_opened_with_the_note_of_its_files(tiny_run, monkeypatch, capsys):
    assert inputs.open_model(str(tiny_run)).tokenizer.vocab_size == 29
    assert capsys.readouterr().err == ""
    from fastlstm.text import lm

    loaded = dataclasses.replace(lm.load_language_model(tiny_run), note="an older\nfile")
    monkeypatch.setattr(lm, "load_language_model", lambda _: loaded)
    model = inputs.open_model(str(tiny_run), "int8", "cpu")
    assert (model.note, model.weights, model.device) == ("an older\nfile", "int8", "cpu")
    assert capsys.readouterr() == ("", "fastlstm: note: an older\\nfile\n")


def test_a_forecaster_reads_tables_as_its_options_say(tiny_run, tmp_path, monkeypatch, capsys):
    table = tmp_path / "a.csv"
    table.write_text("ds,y\n1,2\n")
    calls: list[Any] = []

    def load(path: str, **reading: Any) -> SimpleNamespace:
        calls.append((path, reading))
        return SimpleNamespace(stored_=SimpleNamespace(compression=SimpleNamespace(note="int8")))

    monkeypatch.setattr("fastlstm.forecast.forecaster.Forecaster.load", load)
    parsed = parse(COMMAND, [str(tiny_run), str(table), "--gaps", "fill"])
    with pytest.raises(
        FormatError,
        match="is a text model, which `fastlstm forecast` does not take; `fastlstm gene",
    ):
        inputs.open_forecaster(parsed, [str(table)])
    monkeypatch.setattr(inputs, "require_run", lambda *_: None)
    with pytest.raises(DataError, match="there is no file"):
        inputs.open_forecaster(parsed, [str(table), str(tmp_path / "future.csv")])
    assert calls == []
    capsys.readouterr()
    inputs.open_forecaster(parsed, [str(table)])
    assert calls == [(str(tiny_run), {"gaps": "fill", "device": "auto"})]
    assert capsys.readouterr().err == "fastlstm: note: int8\n"
