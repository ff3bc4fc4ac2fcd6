"""Where a run computes."""

from __future__ import annotations

from collections import Counter

import torch

from fastlstm.distributed.world import World
from fastlstm.errors import ConfigError, Setting
from fastlstm.system import hardware
from fastlstm.system.devices import no_gpu
from fastlstm.training.options import TrainingOptions


def set_up_device(options: TrainingOptions) -> torch.device:
    """Returns the device of a run, its memory bounded; `auto` takes the GPU when there is one.

    Raises:
        ConfigError: there is no such device, or it has no memory limit.
    """
    hardware.keep_freed_memory()
    has_gpu = options.device != "cpu" and torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        raise no_gpu()
    device, limit = torch.device("cuda" if has_gpu else "cpu"), options.memory_limit_gb
    if limit is None:
        return device
    if device.type == "cpu":
        raise ConfigError(
            Setting("memory_limit_gb"),
            " bounds GPU memory and this run is on the CPU; leave it out",
        )
    number = torch.cuda.current_device()  # torch takes no device without a number here
    total = torch.cuda.get_device_properties(number).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit * 2**30 / total), number)
    return device


def require_own_gpus(world: World, device: torch.device) -> None:
    """Raises ConfigError where processes of a run would share a GPU, which NCCL cannot sum over."""
    shared = Counter(gpu for gpu in world.gpus if gpu).most_common(1)
    if device.type == "cpu" or not shared or shared[0][1] == 1:
        return
    gpu, num = shared[0]
    ranks = ", ".join(str(rank) for rank, other in enumerate(world.gpus) if other == gpu)
    raise ConfigError(
        f"{num} processes would compute on one GPU (ranks {ranks}); start one for each GPU, or"
        " give ", Setting("device", "cpu"),
    )  # fmt: skip
