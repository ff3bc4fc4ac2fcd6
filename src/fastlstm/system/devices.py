"""Checks of the device that a user asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from fastlstm.errors import ConfigError, nearest_hint
from fastlstm.system import hardware
from fastlstm.system.fields import Device

_DRIVER = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
"""Files of an NVIDIA driver, on Linux and in its subsystem for Windows."""


def check_device(device: Any) -> None:
    """Raises ConfigError for an unknown device and for one that this machine lacks."""
    if device not in get_args(Device):
        expected = ", ".join(get_args(Device))
        raise ConfigError(
            f"`device` is {device!r}{nearest_hint(device, get_args(Device))}, expected one of"
            f" {expected}"
        )
    if device == "cuda" and (why := _refusal()) is not None:
        raise no_gpu(why)


def no_gpu(why: str) -> ConfigError:
    """Returns the error for a GPU that cannot be used."""
    return ConfigError(
        f"`device='cuda'`: no usable NVIDIA GPU here ({why}); use `device='cpu'` or auto"
    )


def has_gpu() -> bool:
    """Returns whether torch can compute on a GPU here."""
    return _refusal() is None


def _refusal() -> str | None:
    """Returns why there is no usable GPU, or None. Imports torch only if there is a driver."""
    has_driver = any(Path(name).exists() for name in _DRIVER)
    return hardware.gpu_refusal() if has_driver else "there is no NVIDIA driver"
