"""What a process and the others on its machine use, from Linux' counters; cheap to read."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

from fastlstm.system import cgroup, hardware

_PRESSURES = ("cpu", "io", "memory")
CORE_WAIT = 0.25
"""Threads of a process that wait for a core, in the mean, above which it is slow for that reason.

Two training threads: 0.05 alone, 0.6 beside one busy process on two cores.
"""


class MachineUsage:
    """Shares of the time since the last reading, and what memory and disk have left.

    Args:
        directory: whose disk's free space is read; None for none.
        pid: a process of this machine; default this one.
        root: where /proc and /sys are.
    """

    def __init__(
        self, directory: Path | None = None, pid: int | None = None, root: Path = Path("/")
    ) -> None:
        self._directory, self._root = directory, root
        self._process = root / "proc" / ("self" if pid is None else str(pid))
        self._before = self._counters()

    def read(self) -> dict[str, Any]:
        """Returns what was used since the last reading, or the construction.

        Children of the process count as its own once they have ended, until then as others.

        Returns:
            Those of these that the system tells:
            seconds: since the last reading.
            cores: that this process may use.
            own_cores: cores that the process kept busy.
            waiting_threads: its threads that were ready to run and had no core, in the mean.
            others_share: share of all cores that other processes used, 0..1.
            steal_share: share of all cores that a virtual machine's host kept for others.
            cpu_pressure, io_pressure, memory_pressure: share of the time that some process of the
                machine waited for it.
            throttled_share: share of the time that a CPU quota held the process back.
            available_bytes: memory that is left, of the machine or the container.
            rss_bytes: memory of the process, with files it has mapped.
            anonymous_bytes: without them.
            disk_free_bytes: of the directory.
        """
        before, now = self._before, self._counters()
        self._before = now
        seconds = now["time"] - before["time"]
        change = {name: now[name] - before[name] for name in now.keys() & before.keys()}
        found: dict[str, Any] = {"seconds": round(seconds, 2), "cores": hardware.cores()}
        found |= _shares(change, seconds) if seconds > 0.0 else {}
        return found | self._left()

    def _counters(self) -> dict[str, float]:
        """Returns counters in seconds: of all cores, of the process, of waiting."""
        found = {"time": time.monotonic()}
        tick = os.sysconf("SC_CLK_TCK")
        words = _words(self._root / "proc/stat", 9)
        if len(words) == 9 and all(word.isdecimal() for word in words[1:]):
            ticks = [int(word) / tick for word in words[1:]]
            found |= {"all": sum(ticks), "idle": ticks[3] + ticks[4], "steal": ticks[7]}
        words = _text(self._process / "stat").rpartition(")")[2].split()[11:15]
        if len(words) == 4:
            found["own"] = sum(int(word) / tick for word in words)
        waits = [_words(path, 3) for path in self._process.glob("task/*/schedstat")]
        if known := [int(words[1]) for words in waits if len(words) == 3]:
            found["waiting"] = sum(known) / 1e9
        for name in _PRESSURES:
            total = _text(self._root / "proc/pressure" / name).partition("\n")[0]
            total = total.rpartition("total=")[2]
            if total.isdecimal():
                found[f"{name}_pressure"] = int(total) / 1e6
        throttled = cgroup.throttled_s(self._root)
        return found if throttled is None else {**found, "throttled": throttled}

    def _left(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        lines = _text(self._root / "proc/meminfo").splitlines()
        free = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
        limit = cgroup.available_memory(self._root)
        if bounds := [*free, *([] if limit is None else [limit])]:
            found["available_bytes"] = min(bounds)
        pages = _words(self._process / "statm", 3)
        if len(pages) == 3:
            size = os.sysconf("SC_PAGE_SIZE")
            found["rss_bytes"] = int(pages[1]) * size
            found["anonymous_bytes"] = (int(pages[1]) - int(pages[2])) * size
        if self._directory is not None and (disk := free_bytes(self._directory)) is not None:
            found["disk_free_bytes"] = disk
        return found


def threads_with_cores(threads: int, waiting: float) -> int:
    """Returns how many of so many threads have a core when `waiting` of them wait for one."""
    return max(1, threads - math.ceil(waiting))


def free_bytes(directory: Path) -> int | None:
    """Returns the bytes that may still be written to the disk of a directory."""
    try:
        disk = os.statvfs(directory)
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize


def _shares(change: dict[str, float], seconds: float) -> dict[str, float]:
    found = {}
    if "own" in change:
        found["own_cores"] = change["own"] / seconds
    if "waiting" in change:  # a thread that has ended takes its wait with it
        found["waiting_threads"] = max(change["waiting"] / seconds, 0.0)
    if change.get("all", 0.0) > 0.0:
        busy = change["all"] - change["idle"] - change["steal"]
        found["others_share"] = min(max((busy - change.get("own", 0.0)) / change["all"], 0.0), 1.0)
        found["steal_share"] = change["steal"] / change["all"]
    for name in _PRESSURES:
        if f"{name}_pressure" in change:
            found[f"{name}_pressure"] = min(change[f"{name}_pressure"] / seconds, 1.0)
    if "throttled" in change:
        found["throttled_share"] = min(change["throttled"] / seconds, 1.0)
    return {name: round(value, 3) for name, value in found.items()}


def _words(path: Path, count: int) -> list[str]:
    return _text(path).partition("\n")[0].split()[:count]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
