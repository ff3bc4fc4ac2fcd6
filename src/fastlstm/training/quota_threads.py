"""How many threads a run has where a container's CPU quota is no whole number of cores."""

from __future__ import annotations

import math
import time

import torch

from fastlstm.errors import counted
from fastlstm.system import hardware, measurements

_TURN_S = 0.35
"""Longer than three periods of Linux' scheduler: in the first one nothing is held back yet."""
_ROUNDS = 2
_ROWS, _UNITS = 256, 512


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
        found = {"gain": _gain(low, high)}
        measurements.remember("quota", about, found)
    gain = float(found["gain"])
    best = high if gain > 1 else low
    compared = f"{counted(high, 'thread')} compute {gain:.2f} times as much as {low}, measured"
    return best, f"{told}: {counted(best, 'thread')} ({compared})"


def _gain(low: int, high: int) -> float:
    """Returns what more threads compute in a second over what fewer do, in turns."""
    before, done = torch.get_num_threads(), dict.fromkeys((low, high), 0.0)
    x, weight = torch.zeros(_ROWS, _UNITS), torch.zeros(_UNITS, 4 * _UNITS)
    try:
        for _ in range(_ROUNDS):
            for threads in done:
                torch.set_num_threads(threads)
                began, count = time.perf_counter(), 0
                while (taken := time.perf_counter() - began) < _TURN_S:
                    torch.mm(x, weight)
                    count += 1
                done[threads] += count / taken
    finally:
        torch.set_num_threads(before)
    return done[high] / done[low]
