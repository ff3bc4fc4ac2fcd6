"""Linux' counters of a whole machine."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from fastlstm.system import cgroup, hardware

PRESSURES = ("cpu", "io", "memory")


class MachineReading(NamedTuple):
    """The counters at one time.

    Attributes:
        time_s: when, by `time.monotonic`.
        seconds: counters in seconds, those that the system tells: all, idle, steal of all cores;
            cpu_pressure, io_pressure, memory_pressure; throttled.
        cores: that this process may use.
        available_bytes: memory that is left, of the machine or the container; None: not known.
    """

    time_s: float
    seconds: dict[str, float]
    cores: int
    available_bytes: int | None


class MachineCounters:
    """Reads the counters; `root` is where /proc and /sys are."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def read(self) -> MachineReading:
        """Returns the counters of now."""
        now, counters = time.monotonic(), self._counters()
        return MachineReading(now, counters, hardware.cores(), self._available_bytes())

    def _counters(self) -> dict[str, float]:
        found: dict[str, float] = {}
        tick = os.sysconf("SC_CLK_TCK")
        words = first_words(self._root / "proc/stat", 9)
        if len(words) == 9 and all(word.isdecimal() for word in words[1:]):
            ticks = [int(word) / tick for word in words[1:]]
            found |= {"all": sum(ticks), "idle": ticks[3] + ticks[4], "steal": ticks[7]}
        for name in PRESSURES:
            total = text_of(self._root / "proc/pressure" / name).partition("\n")[0]
            total = total.rpartition("total=")[2]
            if total.isdecimal():
                found[f"{name}_pressure"] = int(total) / 1e6
        throttled = cgroup.throttled_s(self._root)
        return found if throttled is None else {**found, "throttled": throttled}

    def _available_bytes(self) -> int | None:
        lines = text_of(self._root / "proc/meminfo").splitlines()
        free = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
        limit = cgroup.available_memory(self._root)
        return min([*free, *([] if limit is None else [limit])], default=None)


def first_words(path: Path, count: int) -> list[str]:
    """Returns so many words of a file's first line."""
    return text_of(path).partition("\n")[0].split()[:count]


def text_of(path: Path) -> str:
    """Returns the text of a file; empty where it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
