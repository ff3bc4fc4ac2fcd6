"""A small text run to export."""

import json

import pytest
import torch

from fastlstm.errors import FormatError
from fastlstm.exchange import converter, model_file
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.text.config import ModelConfig
from fastlstm.text.data.tokenizer import CharTokenizer
from fastlstm.text.files import save_language_model
from fastlstm.text.model import LanguageModel

CHARACTERS = "\n ,.abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def text_run(tmp_path):
    """Stores a text model of random weights as a run; fields of its `ModelConfig` are given.

    `recurrent_gain` multiplies its recurrent matrices: from 6 on states diverge. `data` is what
    config.json says of its text.
    """

    def store(name="run", recurrent_gain=1, data=None, **fields):
        torch.manual_seed(0)
        sizes = {"rnn_size": 24, "embed_size": 16, "vocab_size": len(CHARACTERS), **fields}
        model = LanguageModel(ModelConfig(**sizes))
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))  # biases and norms are 0 and 1
                if "weight_hh" in key:
                    parameter.mul_(recurrent_gain)
        run = RunDirectory(tmp_path / name)
        run.create()
        run.publish(save_language_model(model, CharTokenizer(CHARACTERS), data=data))
        return run.path

    return store


@pytest.fixture
def converts_here(monkeypatch):
    """Has this process read what the converter's own would read; what that refuses, it says."""
    in_another = model_file._converted

    def converted(kind, data, path):
        if kind == "onnx":  # sets its limit on memory while it reads
            return in_another(kind, data, path)
        try:
            arrays, about = converter._READERS[kind][0](data)
        except (FormatError, MemoryError):
            return in_another(kind, data, path)
        return arrays, json.loads(json.dumps(about))

    monkeypatch.setattr(model_file, "_converted", converted)


@pytest.fixture
def text(tmp_path):
    """A text of characters that the model knows."""
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return path
