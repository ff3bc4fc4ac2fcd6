"""A GPU as torch tells of one, on a machine without: it answers, and computes nothing."""

from types import SimpleNamespace

import torch

from fastlstm.system import hardware

GB = 2**30


def use_gpu(
    monkeypatch,
    *,
    capability=(9, 0),
    total_gb=80.0,
    free_gb=79.5,
    built_for=("sm_75", "sm_80", "sm_90", "compute_120"),
    count=1,
):
    """Has torch tell of a GPU; returns the shares of memory that are set, with the GPU's number."""
    shares = list[tuple[float, int]]()
    about = SimpleNamespace(
        name="Recorded GPU", major=capability[0], minor=capability[1],
        total_memory=int(total_gb * GB), multi_processor_count=132,
    )  # fmt: skip

    def set_share(share, device):
        shares.append((share, torch.cuda._utils._get_device_index(device)))  # as torch does

    answers = {
        "is_available": lambda: True,
        "device_count": lambda: count,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: about,
        "get_device_capability": lambda device=None: capability,
        "get_arch_list": lambda: list(built_for),
        "mem_get_info": lambda device=None: (int(free_gb * GB), int(total_gb * GB)),
        "memory_reserved": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: GB // 2,
        "empty_cache": lambda: None,
        "set_per_process_memory_fraction": set_share,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    hardware._cuda_warning.cache_clear()
    return shares
