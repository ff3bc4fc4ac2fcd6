"""A tiny trained run for the commands, and commands that must succeed or be refused."""

import pytest

from fastlstm.cli.main import main
from fastlstm.errors import EXIT_USAGE
from recorded_run import events, terminal  # noqa: F401


@pytest.fixture
def tiny_run(tmp_path, monkeypatch):
    """A published run whose model is small and untrained; the cache is a temporary one."""
    from stored_run import publish  # which needs torch

    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path / "cache"))
    return publish(tmp_path / "run")


@pytest.fixture
def printed(capsys):
    """Returns what runs a command that must succeed, and returns its standard output."""

    def run(*words):
        capsys.readouterr()
        code, (out, err) = main([str(word) for word in words]), capsys.readouterr()
        assert code == 0, err
        return out

    return run


@pytest.fixture
def refused(capsys):
    """Returns what runs a command that must end with exit code 2, and returns its error line."""

    def run(*words):
        capsys.readouterr()
        code, (_, err) = main([str(word) for word in words]), capsys.readouterr()
        assert code == EXIT_USAGE, err
        assert err.startswith("fastlstm: error: "), err
        assert err.count("\n") == 1, err
        return err

    return run
