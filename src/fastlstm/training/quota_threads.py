"""How many threads a run has where a container's CPU quota is no whole number of cores."""

from __future__ import annotations

import math
import time

import torch

from fastlstm.errors import counted
from fastlstm.system import hardware, measurements
from fastlstm.system.measurements import CpuTimer

_TURN_S = 0.35
"""Longer than three periods of Linux' scheduler: in the first one nothing is held back yet."""
_ROUNDS = 2
_ROWS, _UNITS = 256, 512
_QUIET_SHARE = 0.9


def threads_within_quota() -> tuple[int, str] | None:
    """Returns a number of threads, and why; None without a quota, or where it limits nothing.

    With a quota of 1.5 cores two threads are held back half of the time that one is not used:
    which is faster depends on the machine, so both are timed, once.
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
        gain = float(found["gain"])
    best = high if gain > 1 else low
    compared = f"{counted(high, 'thread')} compute {gain:.2f} times as much as {low}, measured"
    return best, f"{told}: {counted(best, 'thread')} ({compared})"


def _gain(low: int, high: int) -> tuple[float, bool]:
    """Returns what more threads compute in a second over what fewer do, in turns, and whether no
    other process took the time of the fewer, which the quota does not hold back."""
    before, done, is_quiet = torch.get_num_threads(), dict.fromkeys((low, high), 0.0), True
    x, weight = torch.zeros(_ROWS, _UNITS), torch.zeros(_UNITS, 4 * _UNITS)
    try:
        for threads in (low, high) * _ROUNDS:
            torch.set_num_threads(threads)
            count, end_s = 0, time.perf_counter() + _TURN_S
            with CpuTimer(threads) as timer:
                while time.perf_counter() < end_s:
                    torch.mm(x, weight)
                    count += 1
            done[threads] += count / timer.wall_s
            is_quiet &= threads == high or not timer.was_busy(_QUIET_SHARE)
    finally:
        torch.set_num_threads(before)
    return done[high] / done[low], is_quiet
