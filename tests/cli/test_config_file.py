import dataclasses
import json

import pytest

from fastlstm.cli.command import parse
from fastlstm.cli.config_file import read_config_file
from fastlstm.cli.options import FORECAST_OPTIONS, TEXT_OPTIONS
from fastlstm.cli.train import COMMAND
from fastlstm.errors import ConfigError, FormatError
from fastlstm.forecast.config import ForecastConfig
from fastlstm.text.config import TrainConfig


def read(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_config_file(path, TEXT_OPTIONS)


def test_values_come_typed(tmp_path):
    text = "rnn-size: 512\nlearning_rate: 1e-3\nbudget: 300\nlayer_norm: yes\ndropout: null\n"
    assert read(tmp_path, text) == {
        "rnn_size": 512,
        "learning_rate": 0.001,
        "budget": "300",
        "layer_norm": True,
        "dropout": None,
    }


def test_empty_file_says_nothing(tmp_path):
    assert read(tmp_path, "# nothing\n") == {}


def test_the_saved_configuration_of_a_run_is_taken(tmp_path):
    config = TrainConfig(rnn_size=64, budget="90s", dropout=0.25)
    train = dataclasses.asdict(config)
    saved = {"format": "fastlstm-run", "format_version": 2, "train": train, "model": {}}
    assert TrainConfig(**read(tmp_path, json.dumps(saved))) == config  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rnn_siz: 5", "unknown key 'rnn_siz' (did you mean 'rnn_size'?)"),
        ("rnn_size: many", "'rnn_size' is 'many', expected a whole number"),
        ("rnn_size: 5.0", "'rnn_size' is 5.0, expected a whole number"),
        ("rnn_size: true", "'rnn_size' is True, expected a whole number"),
        ("vocab: words", "'vocab' is 'words', expected one of char, byte, bpe"),
        ("layer_norm: 3", "'layer_norm' is 3, expected true or false"),
        ("steps: [1]", "'steps' is [1], expected a whole number"),
        ("steps: 1\nsteps: 2", "key 'steps' appears twice"),
        ("lane_reset: 1\nlane-reset: 0", "key 'lane-reset' appears twice"),
        ("format: fastlstm-run\ntrain: {}\nformat_version: 99", "has format version 99"),
        ("- a\n- b", "contains a list, expected keys and values"),
        ("just text", "contains a str, expected keys and values"),
        ("a: b: c", "line 1, column 5: mapping values are not allowed here"),
        ("a: !!python/object:os.system x", "could not determine a constructor"),
        (b"a: \xff\xfe", "not UTF-8 text (byte 3)"),
        (b"a: \x00", "not YAML"),
        ("a: !!bool x", "not YAML"),
        ("a: !!float ''", "not YAML"),
        ("a: !!timestamp x", "not YAML"),
        ("[" * 20_000, "not YAML"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path, text, message):
    with pytest.raises((ConfigError, FormatError)) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)
    assert "config.yaml" in str(caught.value)


def test_no_such_file(tmp_path):
    with pytest.raises(ConfigError, match="no such file or directory; give a YAML file"):
        read_config_file(tmp_path / "none.yaml", TEXT_OPTIONS)


def test_a_huge_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="larger than 64 KiB"):
        read(tmp_path, b"#" * (1 << 16) + b"\n")


@pytest.mark.parametrize("written", ["zoneout: 0.2", "zoneout: [0.2, 0.1]", "zoneout: 0.2,0.1"])
def test_zoneout_in_a_file_and_on_the_command_line(written, tmp_path):
    pair = (0.2, 0.1) if "1" in written else (0.2, 0.2)
    assert TrainConfig(**read(tmp_path, written)).zoneout == pair
    flag = f"--zoneout={written.partition(': ')[2].strip('[]').replace(' ', '')}"
    parsed = parse(COMMAND, ["book.txt", "--out", "r", flag])
    assert TrainConfig(zoneout=parsed.values["zoneout"]).zoneout == pair


def test_codes_of_columns_are_a_mapping_as_on_the_command_line(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("horizon: 3\nmissing_value: {humidity: -1, wind: [-9, -9.5]}\nkeep_value: -7\n")
    config = ForecastConfig(**read_config_file(path, FORECAST_OPTIONS))
    assert config.missing_value == ("humidity=-1", "wind=-9", "wind=-9.5")
    assert config.keep_value == (-7.0,)
    path.write_text("target: {humidity: -1}\n")
    with pytest.raises(ConfigError, match=r"'target' is \{'humidity': -1\}, expected text"):
        read_config_file(path, FORECAST_OPTIONS)
