"""Where a run computes."""

from __future__ import annotations

import pytest
import torch

from fastlstm.distributed.world import World
from fastlstm.errors import ConfigError
from fastlstm.text.config import TrainConfig
from fastlstm.training.device import require_own_gpus, set_up_device


def test_no_gpu_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert set_up_device(TrainConfig(device="auto")).type == "cpu"
    with pytest.raises(ConfigError, match="no usable NVIDIA GPU here"):
        set_up_device(TrainConfig(device="cuda"))


def test_a_memory_limit_is_for_a_gpu() -> None:
    with pytest.raises(ConfigError, match="memory_limit_gb bounds GPU memory and this run is on"):
        set_up_device(TrainConfig(device="cpu", memory_limit_gb=1.0))
    assert set_up_device(TrainConfig(device="cpu")).type == "cpu"


def test_processes_that_would_share_a_gpu_are_refused() -> None:
    world, gpu = World(0, 4), torch.device("cuda")
    world.gpus = ["one", "two", "one", ""]
    require_own_gpus(world, torch.device("cpu"))
    with pytest.raises(ConfigError) as caught:
        require_own_gpus(world, gpu)
    assert str(caught.value) == (
        "2 processes would compute on one GPU (ranks 0, 2); start one for each GPU, or give"
        " device='cpu'"
    )
    world.gpus = ["one", "two", "three", "four"]
    require_own_gpus(world, gpu)
    require_own_gpus(World(), gpu)
