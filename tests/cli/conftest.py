"""A tiny trained run for the commands, and commands that must succeed or be refused."""

import pytest

from fastlstm.cli.main import main
from fastlstm.errors import EXIT_USAGE
from recorded_run import events, terminal  # noqa: F401


@pytest.fixture
def tiny_run(tmp_path, monkeypatch):
    """A published run whose model is small and untrained; the cache is a temporary one."""
    import torch

    from fastlstm.runs.run_directory import RunDirectory
    from fastlstm.text.config import ModelConfig
    from fastlstm.text.data.tokenizer import CharTokenizer
    from fastlstm.text.files import save_language_model
    from fastlstm.text.model import LanguageModel

    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    tokenizer = CharTokenizer("".join(sorted("abcdefghijklmnopqrstuvwxyz .\n")))
    model = LanguageModel(ModelConfig(vocab_size=29, embed_size=8, rnn_size=16))
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.publish(save_language_model(model, tokenizer, train={"split": "80/15/5"}))
    return run.path


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
