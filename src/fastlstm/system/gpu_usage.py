"""Load, memory and power of GPUs, read with nvidia-ml-py if it is installed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from fastlstm.system import environment

_HELD_BACK = 0x08 | 0x20 | 0x40 | 0x80
"""Reasons for lower clocks: hardware slow-down, heat by software and by hardware, power brake."""


def gpu_usage() -> dict[str, Any]:
    """Returns `gpus`, one dict for each GPU of the driver, and `cuda_visible_devices`.

    A GPU has the figures that it supports among `index`, `busy_share` 0..1, `used_bytes`,
    `others_bytes` (memory of other processes), `total_bytes`, `power_w`, `power_limit_w`,
    `clock_mhz` of its processors, `is_held_back` (by heat or power). Empty without the package or a
    driver.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # no package, no driver, another version of it
        return {}
    try:
        gpus = [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return {}
    finally:
        nvml.nvmlShutdown()
    return {"gpus": gpus, "cuda_visible_devices": environment.cuda_visible_devices()}


def _gpu(nvml: Any, index: int) -> dict[str, Any]:
    """Returns the figures of one GPU; any may be missing."""
    device, found = nvml.nvmlDeviceGetHandleByIndex(index), dict[str, Any](index=index)

    def others_bytes() -> int | None:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(device)
        used = [p.usedGpuMemory for p in processes if p.pid != os.getpid()]
        return sum(used) if None not in used else None

    figures: dict[str, Callable[[], Any]] = {
        "busy_share": lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100,
        "used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(device).used,
        "total_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(device).total,
        "others_bytes": others_bytes,
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1000,
        "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(device) / 1000,
        "clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM),
        "is_held_back": lambda: bool(
            nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device) & _HELD_BACK
        ),
    }
    for name, read in figures.items():
        try:
            value = read()
        except (nvml.NVMLError, AttributeError):  # not supported by this GPU or package
            continue
        found |= {} if value is None else {name: value}
    return found
