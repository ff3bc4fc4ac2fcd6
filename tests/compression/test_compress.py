"""`fastlstm.compress`: what it refuses before anything is read or written."""

import json

import pytest

import fastlstm
from fastlstm.compression.options import CompressConfig
from fastlstm.errors import ConfigError, FormatError, RunDirectoryError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": CompressConfig(to="int8"), "to": "int8"}, "either config=… or single fields"),
        ({"config": {"to": "int8"}}, "config is a dict, expected a CompressConfig"),
        ({"too": "int8"}, r"compress\(\): unknown key 'too' \(did you mean 'to'"),
        ({"to": "int8", "stop": 3}, "stop is an int, expected a function that is polled"),
        ({"to": "int8", "observers": print}, "expected a list of functions"),
        ({"to": "int8", "callbacks": [3]}, "callbacks holds an int"),
        ({}, "there is nothing to do; give `to` "),
        ({"output_rank": 99}, "`output_rank` is 99, expected less than 14, the rank of the model"),
        ({"output_rank": 8, "max_bytes": "4k"}, "`max_bytes` chooses .* out `output_rank`"),
        ({"hidden_size": 8}, "`hidden_size` is not an option for a text"),
    ],
)
def test_refusals(source, tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        fastlstm.compress(source, out=tmp_path / "out", **{"observers": (), **arguments})
    assert not (tmp_path / "out").exists()


def test_a_path_that_is_no_run_is_refused(tmp_path, source):
    with pytest.raises(RunDirectoryError, match="no such run"):
        fastlstm.compress(tmp_path / "gone", out=tmp_path / "out", to="int8")
    (tmp_path / "sequence").mkdir()
    (tmp_path / "sequence/config.json").write_text(json.dumps({"kind": "sequence"}))
    with pytest.raises(FormatError, match="is a sequence model, which `fastlstm compress` does"):
        fastlstm.compress(tmp_path / "sequence", out=tmp_path / "out", to="int8")
    with pytest.raises(RunDirectoryError, match="holds the run to compress"):
        fastlstm.compress(source / "checkpoint-12", out=source, to="int8")
