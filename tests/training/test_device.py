"""Where a run computes."""

import os
import warnings

import pytest
import torch

from fastlstm.errors import ConfigError, DeviceMemoryError
from fastlstm.system import hardware
from fastlstm.text.config import TrainConfig
from fastlstm.training import device
from fastlstm.training.device import (
    memory_told,
    notes_on_device,
    set_up_device,
    threads_within_quota,
)
from recorded_gpu import use_gpu

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _looks_anew():
    hardware._cuda_warning.cache_clear()
    yield
    hardware._cuda_warning.cache_clear()


def test_no_gpu_is_a_clear_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert set_up_device(TrainConfig(device="auto")).type == "cpu"
    with pytest.raises(ConfigError, match="no usable NVIDIA GPU here"):
        set_up_device(TrainConfig(device="cuda"))


def test_a_memory_limit_is_for_a_gpu():
    with pytest.raises(ConfigError, match="`memory_limit_gb` bounds GPU memory and this run is on"):
        set_up_device(TrainConfig(device="cpu", memory_limit_gb=1.0))
    assert set_up_device(TrainConfig(device="cpu")).type == "cpu"


def test_a_memory_limit_is_a_share_of_the_gpu_of_this_process(monkeypatch):
    seen = use_gpu(monkeypatch, total_gb=4.0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert set_up_device(TrainConfig(device="cuda", memory_limit_gb=1.0)).type == "cuda"
    assert seen == [(0.25, 1)]


def test_a_memory_limit_above_the_gpus_is_refused(monkeypatch):
    seen = use_gpu(monkeypatch)
    with pytest.raises(ConfigError) as caught:
        set_up_device(TrainConfig(memory_limit_gb=500))
    assert str(caught.value) == (
        "`memory_limit_gb=500`: this GPU (Recorded GPU) has 80.0 GB; give less, or leave it out"
    )
    assert seen == []


def test_memory_of_other_processes_is_noted_from_one_gb_on(monkeypatch):
    for free_gb, said in ((79.3, []), (48.0, ["31.0 of the 80.0 GB"])):
        use_gpu(monkeypatch, free_gb=free_gb)
        notes = notes_on_device(TrainConfig(), GPU)
        assert notes == [f"other processes hold {text} of this GPU" for text in said]


def test_too_little_memory_is_one_line(monkeypatch):
    use_gpu(monkeypatch, free_gb=48.0)
    with (
        pytest.raises(DeviceMemoryError) as caught,
        memory_told(TrainConfig(memory_limit_gb=1.0), GPU),
    ):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB\n…")
    assert str(caught.value) == (
        "out of GPU memory: this GPU has 80.0 GB, of which `memory_limit_gb` allows this process"
        " 1 GB, other processes hold 31.0 GB, this one used up to 0.50 GB; give a smaller model,"
        " shorter sequences, or a larger `memory_limit_gb`"
    )


def test_an_old_gpu_is_left_alone_with_one_line(monkeypatch):
    use_gpu(monkeypatch, capability=(7, 0))
    why = "its compute capability is 7.0, this torch is for sm_75, sm_80, sm_90, compute_120"
    assert set_up_device(TrainConfig()).type == "cpu"
    assert notes_on_device(TrainConfig(), CPU) == [f"the run is on the CPU: {why}"]
    with pytest.raises(ConfigError, match=r"no usable NVIDIA GPU here .its compute capability"):
        set_up_device(TrainConfig(device="cuda"))
    assert notes_on_device(TrainConfig(device="cpu"), CPU) == []


@pytest.mark.parametrize("capability", [(7, 5), (8, 6), (9, 0), (12, 0), (12, 1)])
def test_gpus_that_torch_is_built_for_are_used(monkeypatch, capability):
    use_gpu(monkeypatch, capability=capability)
    assert set_up_device(TrainConfig()).type == "cuda"


def test_a_driver_that_is_too_old_is_named_in_every_call(monkeypatch):
    use_gpu(monkeypatch)
    said = [
        "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)."
        " Please update your GPU driver by downloading and installing a new version."
    ]

    def is_available():  # torch warns once in a process
        if said:
            warnings.warn(said.pop(), stacklevel=2)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    assert set_up_device(TrainConfig()).type == "cpu"
    (note,) = notes_on_device(TrainConfig(), CPU)
    assert note.endswith("The NVIDIA driver on your system is too old (found version 11040)")


def test_a_machine_without_a_gpu_gets_no_note(monkeypatch):
    use_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert notes_on_device(TrainConfig(), CPU) == []
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert notes_on_device(TrainConfig(), CPU) == []


@pytest.fixture
def limit(monkeypatch):
    def limit(quota, allowed=4):
        monkeypatch.setattr(hardware.cgroup, "cpu_quota", lambda: quota)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)), raising=False)

    return limit


@pytest.mark.parametrize(("gain", "threads"), [(1.31, 2), (0.8, 1)])
@pytest.mark.parametrize("is_quiet", [True, False])
def test_one_and_two_threads_are_timed_within_one_and_a_half_cores(
    limit, monkeypatch, tmp_path, gain, threads, is_quiet
):
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path))
    timed = list[tuple[int, int]]()

    def measured(low, high):
        timed.append((low, high))
        return gain, is_quiet

    monkeypatch.setattr(device, "_gain", measured)
    limit(1.5)
    for _ in range(2):
        found = threads_within_quota()
        assert found[0] == threads
        assert found[1].startswith("the CPU quota is 1.5 cores of 4: ")
        assert f"2 threads compute {gain:.2f} times as much as 1, measured" in found[1]
    assert timed == [(1, 2)] * (1 if is_quiet else 2), "what a busy machine shows is not kept"


@pytest.mark.parametrize(
    ("quota", "allowed", "expected"),
    [
        (None, 4, None),
        (8.0, 4, None),
        (2.0, 4, (2, "the CPU quota is 2 cores of 4: 2 threads")),
        (0.5, 4, (1, "the CPU quota is 0.5 cores of 4: 1 thread")),
    ],
)
def test_nothing_is_timed_without_a_choice(limit, monkeypatch, quota, allowed, expected):
    monkeypatch.setattr(device, "_gain", lambda *_: pytest.fail("timed"))
    limit(quota, allowed)
    assert threads_within_quota() == expected


def test_the_threads_of_torch_are_as_before(monkeypatch):
    monkeypatch.setattr(device, "_TURN_S", 0.001)
    before = device.torch.get_num_threads()
    assert device._gain(1, 2)[0] > 0
    assert device.torch.get_num_threads() == before
