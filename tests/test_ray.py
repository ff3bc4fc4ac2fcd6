"""`fastlstm.ray` without a cluster."""

import sys

import pytest

from fastlstm import ray as ray_train
from fastlstm.cli.command import split_arguments, typed
from fastlstm.cli.options import FORECAST_OPTIONS, TEXT_OPTIONS
from fastlstm.errors import ConfigError, MissingExtraError


def test_without_ray_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'fastlstm\[ray\]'"):
        ray_train.train("book.txt", out=tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--help"], ""),
        (["nowhere.txt"], "--out is missing"),
        (["nowhere.txt", "--out", "run"], "nowhere.txt"),
    ],
)
def test_a_process_tells_why_it_ended(words, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text = ray_train._run(words, {})
    found = ray_train._reason(code, text)
    assert why in found
    assert (found == "") == (code == 0)
    assert "\n" not in found


def test_a_killed_process_is_named_by_its_signal(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nkill -9 $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    code, text = ray_train._run([], {})
    assert (code, ray_train._reason(code, text)) == (-9, "killed by SIGKILL")


@pytest.mark.parametrize(
    ("options", "values"),
    [
        (TEXT_OPTIONS, {"rnn_size": 64, "tie_weights": False, "budget": "1m", "valid": None}),
        (FORECAST_OPTIONS, {"target": ("a", "b"), "missing_value": [-9.0], "tensorboard": True}),
    ],
)
def test_options_become_flags_and_back(options, values):
    found = split_arguments(options, ray_train._flags(values))
    assert not found.unknown
    read = {option.name: typed(text, option.type) for option, text in found.options}
    expected = {
        name: ",".join(map(str, value)) if isinstance(value, tuple | list) else value
        for name, value in values.items()
        if value is not None
    }
    assert read == expected


@pytest.mark.parametrize("number", [0, (0, 2), (4, 2)])
def test_a_number_of_workers_that_cannot_be_is_refused(number, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_train, "import_ray", lambda: None)
    with pytest.raises(ConfigError, match="num_workers is"):
        ray_train.train("book.txt", out=tmp_path, num_workers=number)
