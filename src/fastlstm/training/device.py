"""Where a run computes: its device, and its threads where a container has a CPU quota."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from fastlstm.errors import ConfigError, DeviceMemoryError, counted
from fastlstm.system import hardware, measurements
from fastlstm.system.measurements import CpuTimer, calls_per_s
from fastlstm.training.options import TrainingOptions

_CONTEXT_BYTES = 1 << 30
"""Largest GPU memory of a process outside torch's allocator: CUDA's context, libraries, graphs."""
_LEAST_OTHERS_GB = 1.0
_TURN_S = 0.35
"""More than three periods of Linux' scheduler, which never throttles in the first period."""
_ROUNDS = 2
_ROWS, _UNITS = 256, 512
_QUIET_SHARE = 0.9


def set_up_device(options: TrainingOptions) -> torch.device:
    """Returns the device of a run and limits its memory; `auto` takes a GPU if there is one. Raises
    ConfigError: there is no such device, or its memory cannot be limited so."""
    hardware.keep_freed_memory()
    refusal = "not asked for" if options.device == "cpu" else hardware.gpu_refusal()
    if options.device == "cuda" and refusal is not None:
        raise hardware.no_gpu(refusal)
    device = torch.device("cuda" if refusal is None else "cpu")
    limit = options.memory_limit_gb
    if limit is None:
        return device
    if device.type == "cpu":
        raise ConfigError(
            "`memory_limit_gb` bounds GPU memory and this run is on the CPU; leave it out"
        )
    number = torch.cuda.current_device()  # torch needs a number here
    about = torch.cuda.get_device_properties(number)
    share = limit * 2**30 / about.total_memory
    if share > 1.0:
        total_gb = about.total_memory / 2**30
        raise ConfigError(
            f"`memory_limit_gb={limit!r}`: this GPU ({about.name}) has {total_gb:.1f} GB; give"
            " less, or leave it out"
        )
    gc.collect()  # memory of earlier runs of this process would count
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(share, number)
    return device


def notes_on_device(options: TrainingOptions, device: torch.device) -> list[str]:
    """Returns notes on a GPU that is not used, or whose memory other processes hold."""
    if device.type == "cpu":
        refusal = None if options.device == "cpu" else hardware.gpu_refusal()
        is_there = refusal is not None and refusal not in hardware.NO_GPU
        return [f"the run is on the CPU: {refusal}"] if is_there else []
    others, total = _others_and_total_gb(device)
    if others < _LEAST_OTHERS_GB:
        return []
    return [f"other processes hold {others:.1f} of the {total:.1f} GB of this GPU"]


def _others_and_total_gb(device: torch.device) -> tuple[float, float]:
    """Returns about how many GB of a GPU other processes hold, and how many it has."""
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device) + _CONTEXT_BYTES
    return max(0.0, (total - free - own) / 2**30), total / 2**30


@contextmanager
def memory_told(options: TrainingOptions, device: torch.device) -> Iterator[None]:
    """Turns torch's OutOfMemoryError into DeviceMemoryError with the figures; ends the limit of
    `set_up_device`."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise DeviceMemoryError(_memory_text(options, device)) from error
    finally:
        if options.memory_limit_gb is not None and device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, torch.cuda.current_device())


def _memory_text(options: TrainingOptions, device: torch.device) -> str:
    (others, total), limit = _others_and_total_gb(device), options.memory_limit_gb
    used = torch.cuda.max_memory_allocated(device) / 2**30
    text = f"out of GPU memory: this GPU has {total:.1f} GB"
    if limit is not None:
        text += f", of which `memory_limit_gb` allows this process {limit:g} GB"
    if others >= _LEAST_OTHERS_GB:
        text += f", other processes hold {others:.1f} GB"
    text += f", this one used up to {used:.2f} GB; give a smaller model, shorter sequences"
    return text if limit is None else f"{text}, or a larger `memory_limit_gb`"


def random_numbers_kept(device: torch.device) -> AbstractContextManager[object]:
    """Returns a block that restores the random numbers of the CPU and of `device`."""
    return torch.random.fork_rng([torch.cuda.current_device()] if device.type == "cuda" else [])


def set_seed(seed: int, device: torch.device) -> None:
    """Seeds the random numbers of the CPU and of `device`, and of no other GPU."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def threads_within_quota() -> tuple[int, str] | None:
    """Returns a number of threads and the reason, or None without a CPU quota.

    With a quota of 1.5 cores it depends on the machine whether one thread or two throttled ones are
    faster, so both are timed, once per machine.
    """
    if (quota := hardware.quota()) is None:
        return None
    low, high = hardware.cores(), min(math.ceil(quota), hardware.allowed_cores())
    told = f"the CPU quota is {quota:.3g} cores of {hardware.allowed_cores()}"
    if low == high:
        return low, f"{told}: {counted(low, 'thread')}"
    about = {"quota": quota, "cpu": hardware.cpu().model, "threads": [low, high]}
    found = measurements.recall("quota", about)
    if found is None:
        gain, is_quiet = _gain(low, high)
        if is_quiet:
            measurements.remember("quota", about, {"gain": gain})
    else:
        gain = found["gain"]
    best = high if gain > 1 else low
    compared = f"{counted(high, 'thread')} compute {gain:.2f} times as much as {low}, measured"
    return best, f"{told}: {counted(best, 'thread')} ({compared})"


def _gain(low: int, high: int) -> tuple[float, bool]:
    """Returns how many times as much `high` threads compute as `low`, and whether the machine was
    quiet: the quota does not hold back the smaller number of threads."""
    before, done, is_quiet = torch.get_num_threads(), dict.fromkeys((low, high), 0.0), True
    x, weight = torch.zeros(_ROWS, _UNITS), torch.zeros(_UNITS, 4 * _UNITS)
    try:
        for threads in (low, high) * _ROUNDS:
            torch.set_num_threads(threads)
            with CpuTimer(threads) as timer:
                done[threads] += calls_per_s(lambda: torch.mm(x, weight), _TURN_S)
            is_quiet &= threads == high or not timer.was_busy(_QUIET_SHARE)
    finally:
        torch.set_num_threads(before)
    return done[high] / done[low], is_quiet
