"""Measurements of speed: stored in the user's cache, and checked for other load on the machine.

A measurement is a memo of the cache (`Cache.remember`), found by machine, versions and shape: each
must be equal. With a damaged memo or a read-only cache the next process measures again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from fastlstm.errors import FastLSTMError
from fastlstm.system import environment
from fastlstm.system.cache import Cache, make_key

_FORMAT = 2
"""Changes with the fields of a stored value."""
_SHORT_S = 0.01
"""CPU time is counted too coarsely for blocks shorter than this."""
_PROBE_S, _PROBE_ROWS, _PROBE_UNITS, _QUIET_SHARE = 0.1, 256, 512, 0.85
_QUIET_SHARE_OF_STEPS = 0.7
"""Least share of the threads' time spent computing on a quiet machine, in passes and steps."""


def recall(kind: str, of: Mapping[str, object]) -> dict[str, Any] | None:
    """Returns the measurement that `remember` stored for the same `of`, or None.

    `of` holds plain JSON values: machine, versions, shapes.
    """
    try:
        value = _cache().recall(make_key(_FORMAT, kind, dict(of)))
    except FastLSTMError:  # no home directory, or no cache that only this user may write
        return None
    return value if isinstance(value, dict) else None


def remember(kind: str, of: Mapping[str, object], value: Mapping[str, object]) -> None:
    """Stores a measurement; if that fails, the next process measures again."""
    with suppress(FastLSTMError):
        _cache().remember(make_key(_FORMAT, kind, dict(of)), dict(value))


def _cache() -> Cache:
    return Cache(environment.cache_dir(), "measured")


def recall_seconds(kind: str, of: Mapping[str, object]) -> float | None:
    """Returns the seconds that `timed_seconds` stored for the same `of`, or None."""
    known = recall(kind, of)
    return None if known is None else float(known["seconds"])


def timed_seconds(
    kind: str, of: Mapping[str, object], device: str, time_now: Callable[[], float]
) -> tuple[float, bool]:
    """Returns the seconds that `time_now` returns, and whether they were measured earlier.

    They are infinite if GPU memory is too small. On a "cpu" the seconds of a busy machine are not
    stored; while a GPU computes, the cores are idle.
    """
    import torch

    if (known := recall_seconds(kind, of)) is not None:
        return known, True
    try:
        with CpuTimer(torch.get_num_threads()) as timer:
            seconds = time_now()
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return math.inf, False
    if device != "cpu" or not timer.was_busy(_QUIET_SHARE_OF_STEPS):
        remember(kind, of, {"seconds": seconds})
    return seconds, False


class CpuTimer:
    """Times a `with` block and shows whether other processes used the machine meanwhile.

    Threads that only compute use all the CPU time they get. If they used less, other processes had
    the cores.

    Attributes:
        wall_s: duration of the block.
        cpu_share: CPU time of this process, divided by ``threads * wall_s``.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self.wall_s = self.cpu_share = 0.0

    def __enter__(self) -> CpuTimer:
        self._start_s, self._start_cpu_s = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *exc: object) -> None:
        cpu_s = time.process_time() - self._start_cpu_s
        self.wall_s = time.perf_counter() - self._start_s
        self.cpu_share = cpu_s / max(self.wall_s * self._threads, 1e-9)

    def was_busy(self, min_share: float) -> bool:
        """Returns whether `cpu_share` was below `min_share`; False for blocks under 10 ms."""
        return self.wall_s > _SHORT_S and self.cpu_share < min_share


def calls_per_s(call: Callable[[], object], seconds: float) -> float:
    """Returns how often `call` runs in a second: at least once, for about so many seconds."""
    count, started = 0, time.perf_counter()
    while (taken_s := time.perf_counter() - started) < seconds or not count:
        call()
        count += 1
    return count / taken_s


def is_machine_busy(threads: int) -> bool:
    """Returns whether other processes take CPU time from torch's threads; computes for 0.1 s."""
    import torch

    x, weight = torch.zeros(_PROBE_ROWS, _PROBE_UNITS), torch.zeros(_PROBE_UNITS, _PROBE_UNITS)
    until_s = time.perf_counter() + _PROBE_S
    with CpuTimer(threads) as timer:
        while time.perf_counter() < until_s:
            torch.mm(x, weight)
    return timer.was_busy(_QUIET_SHARE)
