"""Where a run computes."""

from __future__ import annotations

import pytest
import torch

from fastlstm.errors import ConfigError
from fastlstm.text.config import TrainConfig
from fastlstm.training.device import set_up_device


def test_no_gpu_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert set_up_device(TrainConfig(device="auto")).type == "cpu"
    with pytest.raises(ConfigError, match="no usable NVIDIA GPU here"):
        set_up_device(TrainConfig(device="cuda"))


def test_a_memory_limit_is_for_a_gpu() -> None:
    with pytest.raises(ConfigError, match="memory_limit_gb bounds GPU memory and this run is on"):
        set_up_device(TrainConfig(device="cpu", memory_limit_gb=1.0))
    assert set_up_device(TrainConfig(device="cpu")).type == "cpu"
