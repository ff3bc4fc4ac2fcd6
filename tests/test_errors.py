"""Parts of messages, and names that are close to what came."""

import pickle

import numpy as np
import pytest

from fastlstm.errors import ConfigError, DataError, counted, kind_of_value, nearest_hint
from fastlstm.system.fields import built
from fastlstm.text.config import TrainConfig


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "row", "0 rows"), (1, "row", "1 row"), (2, "row", "2 rows"), (1.0, "epoch", "1 epoch"),
        (1234567, "token", "1,234,567 tokens"), (0.5, "epoch", "0.5 epochs"),
        (np.int64(1), "gap", "1 gap"), (1, "series", "1 series"), (2, "series", "2 series"),
    ],
)  # fmt: skip
def test_a_number_has_its_noun(number, noun, text):
    assert counted(number, noun) == text


def test_what_came_has_a_name():
    assert [kind_of_value(v) for v in (None, 5, "x", [])] == ["None", "an int", "a str", "a list"]


def test_errors_are_what_they_were_to_python():
    error = ConfigError("`steps` is 0")
    assert str(pickle.loads(pickle.dumps(error))) == "`steps` is 0"
    assert isinstance(error, ValueError)
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
def test_the_name_that_is_meant(name, known, meant):
    assert nearest_hint(name, known) == f" (did you mean '{meant}'?)"


def test_no_name_is_guessed_that_is_far():
    assert nearest_hint("--zzz", ["--rnn-size"]) == ""


def test_python_keywords_are_guessed_too():
    with pytest.raises(ConfigError, match=r"'lr' \(did you mean 'learning_rate'\?\)"):
        built(TrainConfig, {"lr": 0.1}, "train()")
    assert TrainConfig(learning_rate=0.1).learning_rate == 0.1
