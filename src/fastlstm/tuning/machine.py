"""The machine that something was measured on."""

from __future__ import annotations

import platform
from importlib.metadata import version

from fastlstm.system import hardware


def describe_machine() -> dict[str, object]:
    """Returns CPU, instruction set, cores and versions."""
    cpu = hardware.cpu()
    about = {"cpu": cpu.model, "isa": cpu.isa, "cores": cpu.cores}
    return {
        **about,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "fastlstm": version("fastlstm"),
    }
