"""What a run on a GPU refuses, and when: before its input is read, and in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastlstm
from fastlstm.cli import train as cli_train
from fastlstm.errors import ConfigError, DeviceMemoryError, KernelError
from fastlstm.text.task import TextTask
from fastlstm.text.train import TextSession
from fastlstm.training import precision
from recorded_gpu import use_gpu

OPTIONS: dict[str, Any] = {
    "rnn_size": 16, "embed_size": 8, "batch_size": 4, "seq_length": 16, "steps": 3,
    "precision": "fp32", "device": "cpu", "tensorboard": False, "sample_every": 0,
}  # fmt: skip


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("the cat sat on the mat, and so it did.\n" * 400)
    return path


def test_strict_kernels_are_refused_before_the_text_is_read(text, tmp_path, monkeypatch):
    asked = list[Any]()

    def refuse(call, *, strict):
        asked.append((call.H, call.options.layer_norm, strict))
        raise KernelError("LSTM would run on a slow path")

    def read(*_):
        raise AssertionError("the text was read")

    monkeypatch.setattr(precision, "select", refuse)
    monkeypatch.setattr(TextSession, "_prepare", read)
    out = tmp_path / "run"
    with pytest.raises(KernelError, match="slow path"):
        fastlstm.train(text, out=out, strict_kernels=True, layer_norm=True, observers=(), **OPTIONS)
    assert asked == [(16, True, True)]
    assert not out.exists()


def test_a_run_that_finds_too_little_memory_ends_with_one_line(text, tmp_path, monkeypatch):
    def losses(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        yield torch.zeros(1)

    use_gpu(monkeypatch)
    monkeypatch.setattr(TextTask, "losses", losses)
    events = list[Any]()
    with pytest.raises(DeviceMemoryError, match=r"out of GPU memory: this GPU has 80\.0 GB"):
        fastlstm.train(
            text, out=tmp_path / "run", observers=[events.append],
            cache_dir=str(tmp_path / "cache"), **OPTIONS,
        )  # fmt: skip
    said = [e["text"] for e in events if e["event"] == "message"]
    assert "out of GPU memory: a batch now runs in 4 parts, with the same result" in said


def test_processes_that_would_share_a_gpu_are_not_started(monkeypatch):
    use_gpu(monkeypatch)
    with pytest.raises(ConfigError) as caught:
        cli_train._require_gpus(2, "auto")
    assert caught.value.lines() == [
        "`nproc=2`: each process needs a GPU, and there is 1 GPU; start 1, or give `device='cpu'`"
    ]
    cli_train._require_gpus(2, "cpu")
    use_gpu(monkeypatch, count=2)
    cli_train._require_gpus(2, "auto")
