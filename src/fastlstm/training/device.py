"""Where a run computes."""

from __future__ import annotations

import torch

from fastlstm.errors import ConfigError, Setting
from fastlstm.system import hardware
from fastlstm.training.options import TrainingOptions


def choose_device(asked: str) -> torch.device:
    """Returns the device; `auto` takes the GPU when there is one.

    Raises:
        ConfigError: cuda was asked for and there is none.
    """
    if asked == "cpu":
        return torch.device("cpu")
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise ConfigError(
            Setting("device", "cuda"), ": no usable NVIDIA GPU here; use ",
            Setting("device", "cpu"), " or auto",
        )  # fmt: skip
    return torch.device("cuda" if available else "cpu")


def set_up_device(options: TrainingOptions) -> torch.device:
    """Returns the device of a run, its memory bounded as asked.

    Raises:
        ConfigError: the device is not there, or has no memory limit.
    """
    hardware.keep_freed_memory()
    device = choose_device(options.device)
    limit = options.memory_limit_gb
    if limit is None:
        return device
    if device.type == "cpu":
        raise ConfigError(
            Setting("memory_limit_gb"),
            " bounds GPU memory and this run is on the CPU; leave it out",
        )
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit * 2**30 / total), device)
    return device


def generators(device: torch.device) -> list[int]:
    """Returns what `torch.random.fork_rng` takes to keep the caller's random numbers."""
    return [torch.cuda.current_device()] if device.type == "cuda" else []
