"""Messages in parts: settings are spelt as in Python, and as flags on the command line."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from fastlstm.errors import (
    ConfigError,
    DataError,
    Message,
    MissingExtraError,
    Setting,
    counted,
    in_flags,
    in_words,
    kind_of_value,
    nearest_hint,
)
from fastlstm.system.fields import built
from fastlstm.text.config import TrainConfig


@pytest.mark.parametrize(
    ("setting", "python", "flag"),
    [
        (Setting("input_size"), "input_size", "--input-size"),
        (Setting("input_size", 720), "input_size=720", "--input-size 720"),
        (Setting("disorder", "sort"), "disorder='sort'", "--disorder sort"),
        (Setting("time_format", "%d.%m.%Y %H"), "time_format='%d.%m.%Y %H'",
         "--time-format '%d.%m.%Y %H'"),
        (Setting("ignore", ["a b", "c"]), "ignore=['a b', 'c']", "--ignore 'a b,c'"),
        (Setting("missing_value", [-9999.0, -99.9]), "missing_value=[-9999, -99.9]",
         "--missing-value -9999,-99.9"),
        (Setting("learning_rate", 1.2345678), "learning_rate=1.2345678",
         "--learning-rate 1.2345678"),
        (Setting("target", ...), "target=…", "--target NAME"),
        (Setting("future", ...), "future=…", "--future FILE"),
        (Setting("resume", True), "resume=True", "--resume"),
        (Setting("tensorboard", False), "tensorboard=False", "--no-tensorboard"),
    ],
)  # fmt: skip
def test_a_setting_is_spelt_for_python_and_for_the_command_line(
    setting: Setting, python: str, flag: str
) -> None:
    assert (str(setting), setting.flag) == (python, flag)


def test_only_settings_change_whatever_else_a_message_holds() -> None:
    error = DataError("data/series=7/part-0.parquet: horizon=3; give ", Setting("gaps", "fill"))
    assert str(error) == "data/series=7/part-0.parquet: horizon=3; give gaps='fill'"
    assert in_flags(*error.args) == "data/series=7/part-0.parquet: horizon=3; give --gaps fill"


def test_a_message_is_a_text_that_keeps_its_other_spelling() -> None:
    note = Message("give ", Setting("gaps", "fill"))
    assert note == "give gaps='fill'"
    for other in (note, pickle.loads(pickle.dumps(note)), copy.copy(note)):
        assert in_flags("a: ", other) == "a: give --gaps fill"
    assert str(DataError("a: ", note)) == "a: give gaps='fill'"
    assert Message("x", flags="y").flags == "y"


def test_a_client_of_the_server_is_told_no_python_and_no_flags() -> None:
    note = Message("train with ", Setting("vocab", "byte"))
    error = DataError("leave them out, or ", note, "; ", Setting("top_p"), " is 3")
    assert in_words(*error.args) == "leave them out, or train with vocab byte; top_p is 3"


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "row", "0 rows"), (1, "row", "1 row"), (2, "row", "2 rows"), (1.0, "epoch", "1 epoch"),
        (1234567, "token", "1,234,567 tokens"), (0.5, "epoch", "0.5 epochs"),
        (np.int64(1), "gap", "1 gap"), (1, "series", "1 series"), (2, "series", "2 series"),
    ],
)  # fmt: skip
def test_a_number_has_its_noun(number: float, noun: str, text: str) -> None:
    assert counted(number, noun) == text


def test_what_came_has_a_name() -> None:
    assert [kind_of_value(v) for v in (None, 5, "x", [])] == ["None", "an int", "a str", "a list"]


def test_errors_are_what_they_were_to_python() -> None:
    error = ConfigError(Setting("steps"), " is 0")
    assert str(pickle.loads(pickle.dumps(error))) == "steps is 0"
    assert isinstance(error, ValueError)
    assert str(MissingExtraError("needs ", "it")) == "needs it"
    assert str(DataError()) == ""


TEXT, TABLE = ("rnn_size", "learning_rate"), ("hidden_size", "learning_rate", "steps", "tbptt")


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("--lr", ["--learning-rate", "--layers"], "--learning-rate"),
        ("lr", TEXT, "learning_rate"),
        ("--hidden-size", ["--rnn-size", "--vocab-size"], "--rnn-size"),
        ("rnn_size", TABLE, "hidden_size"),
        ("--epoch", ["--epochs", "--steps"], "--epochs"),
        ("--max-tokens", ["--length", "--top-k"], "--length"),
        ("--seq-length", ["--input-size", "--horizon"], "--input-size"),  # in two lines
        ("--rnn_siz", ["--rnn-size", "--resume"], "--rnn-size"),
        ("book.tx", ["book.txt", "cook.csv"], "book.txt"),
    ],
)
def test_the_name_that_is_meant(name: str, known: list[str], meant: str) -> None:
    assert nearest_hint(name, known) == f" (did you mean '{meant}'?)"


def test_no_name_is_guessed_that_is_far() -> None:
    assert nearest_hint("--zzz", ["--rnn-size"]) == ""


def test_python_keywords_are_guessed_too() -> None:
    with pytest.raises(ConfigError, match=r"'lr' \(did you mean 'learning_rate'\?\)"):
        built(TrainConfig, {"lr": 0.1}, "train()")
    assert TrainConfig(learning_rate=0.1).learning_rate == 0.1
