"""Which machine a result belongs to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import fastlstm
from fastlstm.system import hardware


def describe_machine() -> dict[str, Any]:
    """Returns CPU, ISA, cores, versions and, where there is one, the GPU."""
    cpu, gpu = hardware.cpu(), hardware.gpu()
    return {
        "cpu": cpu.model + _generation(),
        "isa": cpu.isa,
        "cores": cpu.cores,
        "threads": torch.get_num_threads(),
        "gpu": None if gpu is None else gpu.name,
        "torch": torch.__version__,
        "fastlstm": fastlstm.__version__,
    }


def _generation() -> str:
    """Returns family and model of the CPU, which virtual machines leave out of its name."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = [re.search(rf"^{name}\s*: (\d+)$", text, re.M) for name in ("cpu family", "model")]
    numbers = [match[1] for match in found if match]
    return f" (family {numbers[0]}, model {numbers[1]})" if len(numbers) == 2 else ""


def results_folder() -> Path:
    """Returns benchmarks/results/<cpu-isa-cores>, made when missing."""
    cpu = hardware.cpu()
    name = re.sub(r"[^a-z0-9]+", "-", f"{cpu.vendor}-{cpu.isa}-{cpu.cores}cores".lower()).strip("-")
    folder = Path(__file__).parent / "results" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
