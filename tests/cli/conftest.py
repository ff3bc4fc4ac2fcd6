"""A tiny trained run for the commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from recorded_run import events, terminal  # noqa: F401


@pytest.fixture
def tiny_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
