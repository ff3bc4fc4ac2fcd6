import importlib
import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from fastlstm.errors import ConfigError, MissingExtraError
from fastlstm.keras import check_backend


def fake_keras(monkeypatch, version, backend):
    module = SimpleNamespace(__version__=version, backend=SimpleNamespace(backend=lambda: backend))
    monkeypatch.setattr(importlib, "import_module", lambda name: module)


def test_a_missing_keras_is_one_line_with_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError) as caught:
        check_backend()
    assert str(caught.value) == "fastlstm.keras needs keras: pip install 'fastlstm[keras]'"


def test_a_folder_called_keras_is_no_keras(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=None))
    with pytest.raises(MissingExtraError):
        check_backend()


def test_another_backend_is_refused(monkeypatch):
    fake_keras(monkeypatch, "3.15.1", "tensorflow")
    with pytest.raises(ConfigError) as caught:
        check_backend()
    assert str(caught.value) == (
        "fastlstm.keras needs KERAS_BACKEND=torch, this process uses tensorflow; set it before"
        " keras is imported"
    )


def test_keras_2_is_refused(monkeypatch):
    fake_keras(monkeypatch, "2.15.0", "tensorflow")
    with pytest.raises(ConfigError, match=r"needs Keras 3, this is keras 2\.15\.0"):
        check_backend()


def test_a_backend_that_is_not_installed_is_one_line(monkeypatch):
    def fail(name):
        raise ModuleNotFoundError("No module named 'tensorflow'")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ConfigError) as caught:
        check_backend()
    assert str(caught.value) == (
        "fastlstm.keras cannot import keras (No module named 'tensorflow'); set KERAS_BACKEND=torch"
        " before keras is imported"
    )


def test_in_a_process_of_another_backend():
    done = subprocess.run(
        [sys.executable, "-c", "import fastlstm.keras"],
        env={**os.environ, "KERAS_BACKEND": "numpy"},
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("fastlstm.errors.ConfigError: fastlstm.keras ")
    assert "KERAS_BACKEND=torch" in last
