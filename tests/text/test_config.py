import dataclasses

import pytest

from fastlstm.errors import ConfigError
from fastlstm.forecast.config import ForecastConfig
from fastlstm.system.fields import built, parse_duration, parse_split
from fastlstm.text.config import OPTIONS_OF_TABLES, PRESETS, TrainConfig


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("90s", 90), ("5m", 300), ("1h30m", 5400), ("2.5m", 150), ("45", 45), (" 1H ", 3600)),
        *(("2min", 120), ("90 sec", 90), ("5 minutes", 300), ("1 hour 30 min", 5400)),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5 minuets", "-3m", "0s", "m", "nan", "1e9h"])
def test_bad_durations_say_what_is_expected(text):
    with pytest.raises(ConfigError, match="`budget` is"):
        parse_duration(text)


def test_splits():
    assert parse_split("90/5/5") == (0.9, 0.05, 0.05)
    assert parse_split("90/10") == (0.9, 0.1, 0.0)
    for bad in ("90/5", "abc", "0/50/50", "100/0/0", "90/5/5/0", "nan/5/5", "-10/100/10"):
        with pytest.raises(ConfigError, match="`split` is"):
            parse_split(bad)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"steps": 5, "budget": "1m"}, "`steps` and `budget` exclude each other"),
        ({"steps": 0}, "`steps` is 0, expected a number from 1"),
        ({"dropout": 1.0}, "`dropout` is 1.0, expected a number from 0.0 to 0.95"),
        ({"learning_rate": float("nan")}, "`learning_rate` is nan"),
        ({"warmup": 0.6, "cooldown": 0.6}, "more than the whole run"),
        ({"rnn_size": True}, "`rnn_size` is True, expected a whole number"),
        ({"batch_size": 2.5}, "`batch_size` is 2.5, expected a whole number"),
        ({"layer_norm": "yes"}, "`layer_norm` is 'yes', expected True or False"),
        ({"split": 90}, "`split` is 90, expected a text"),
        (
            {"encoding": "utf-9"},
            "`encoding` is 'utf-9', expected the name of a codec, such as utf-8",
        ),
        ({"encoding": "hex"}, "`encoding` is 'hex', expected the name of a codec"),
        ({"budget": "9999999999h"}, "`budget` is '9999999999h', expected 1s to 27777h"),
        ({"preset": "huge"}, "`preset` is 'huge', expected one of"),
    ],
)
def test_bad_values_name_the_flag(fields, text):
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**fields)
    assert text in str(caught.value)


def test_a_budget_may_be_a_number_of_seconds():
    assert TrainConfig(budget=300).budget == "300s"
    assert TrainConfig(budget="300").budget == "300s"


def test_unknown_key_names_the_nearest():
    with pytest.raises(ConfigError, match=r"f.yaml: unknown key 'rnn_siz' \(did you mean 'rnn_siz"):
        built(TrainConfig, {"rnn_siz": 5}, "f.yaml")


def test_preset_and_overrides():
    model = TrainConfig(preset="medium", num_layers=3).model_config(100, 0.1)
    rnn_size = PRESETS["medium"]["rnn_size"]
    assert (model.rnn_size, model.num_layers, model.dropout) == (rnn_size, 3, 0.1)
    tied = TrainConfig(tie_weights=True).model_config(100, 0.0)
    assert tied.embed_size == tied.rnn_size
    with pytest.raises(ConfigError, match="`tie_weights` needs"):
        TrainConfig(tie_weights=True, embed_size=3).model_config(100, 0.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"output_rank": 128, "rnn_size": 128}, "`output_rank` is 128, expected less than 100"),
        ({"output_rank": 64, "rnn_size": 64}, "of 100 tokens and 64 hidden units"),
        ({"output_rank": 8, "tie_weights": True}, "`output_rank` needs an output matrix of its"),
    ],
)
def test_an_output_rank_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**fields).model_config(100, 0.0)
    with pytest.raises(ConfigError, match="`output_rank` is -1, expected a number from 0"):
        TrainConfig(output_rank=-1)


def test_options_of_tables_are_those_of_forecasters_alone():
    own = {field.name for field in dataclasses.fields(TrainConfig)}
    tables = {field.name for field in dataclasses.fields(ForecastConfig)}
    assert tables - own == OPTIONS_OF_TABLES
