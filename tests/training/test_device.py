"""Where a run computes."""

from __future__ import annotations

from types import SimpleNamespace

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


def test_a_memory_limit_is_a_share_of_the_gpu_of_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[float, int]] = []

    def set_share(share: float, device: torch.device | int) -> None:
        seen.append((share, torch.cuda._utils._get_device_index(device)))  # as torch does

    about = SimpleNamespace(total_memory=4 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_share)
    assert set_up_device(TrainConfig(device="cuda", memory_limit_gb=1.0)).type == "cuda"
    assert seen == [(0.25, 1)]


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
