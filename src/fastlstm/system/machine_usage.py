"""Use of the machine by this process and by others, from Linux' counters; cheap to read."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from fastlstm.system import cgroup, hardware
from fastlstm.system.cgroup import first_words, lines_of

CORE_WAIT = 0.25
"""Mean number of waiting threads above which a process lacks cores.

Two training threads: 0.05 alone, 0.6 beside one busy process on two cores.
"""
LEAST_OTHERS = 0.03
"""Share of all cores used by other processes, below which they do not slow a run."""
_LEAST_S = 0.05
"""Shortest time with known shares: processor time is counted in steps of 10 ms."""


class MachineUsage:
    """Shares of the time since the last reading, and memory; `root` is the parent of /proc."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root, self._process = root, root / "proc/self"
        self._before = _machine(root), self._counters()

    def read(self) -> dict[str, Any]:
        """Returns the use since the last reading, or since the construction.

        Child processes count as this process once they have ended; until then they count as others.

        Returns:
            The figures that the system has of:
            seconds: since the last reading.
            cores: available to this process.
            own_cores: mean cores that the process kept busy.
            waiting_threads: mean number of its threads that were ready to run without a core.
            others_share: share of all cores used by other processes, 0..1.
            steal_share: share of all cores that a virtual machine's host kept for others.
            throttled_share: share of the time in which a CPU quota stopped the process.
            available_bytes: free memory of the machine or the container.
            rss_bytes: resident memory of the process, mapped files included.
            anonymous_bytes: resident memory without mapped files.
        """
        before, own_before = self._before
        now, own_now = self._before = _machine(self._root), self._counters()
        own, seconds = _change(own_now, own_before), own_now["time"] - own_before["time"]
        found: dict[str, Any] = {"seconds": round(seconds, 2), "cores": hardware.cores()}
        if seconds >= _LEAST_S:
            rates = {name: value / seconds for name, value in own.items()}
            machine = _change(now, before)
            found |= _shares(rates, machine, machine["time"])
        return found | self._left()

    def _counters(self) -> dict[str, float]:
        """Returns seconds of the process: on its cores, and waiting for one."""
        found = {"time": time.monotonic()}
        tick = os.sysconf("SC_CLK_TCK")
        words = "".join(lines_of(self._process / "stat")).rpartition(")")[2].split()[11:15]
        if len(words) == 4:
            found["own"] = sum(int(word) / tick for word in words)
        waits = [first_words(path, 3) for path in self._process.glob("task/*/schedstat")]
        if known := [int(words[1]) for words in waits if len(words) == 3]:
            found["waiting"] = sum(known) / 1e9
        return found

    def _left(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        lines = lines_of(self._root / "proc/meminfo")
        free = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
        if (limit := cgroup.available_memory(self._root)) is not None:
            free.append(limit)
        if free:
            found["available_bytes"] = min(free)
        pages = first_words(self._process / "statm", 3)
        if len(pages) == 3:
            size = os.sysconf("SC_PAGE_SIZE")
            found["rss_bytes"] = int(pages[1]) * size
            found["anonymous_bytes"] = (int(pages[1]) - int(pages[2])) * size
        return found


def _change(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: now[name] - before[name] for name in now.keys() & before.keys()}


def _shares(own: dict[str, float], machine: dict[str, float], seconds: float) -> dict[str, float]:
    """Returns shares, from the process' use per second and the machine's in `seconds`."""
    found = {}
    if "own" in own:
        found["own_cores"] = own["own"]
    if "waiting" in own:  # a thread that has ended takes its wait with it
        found["waiting_threads"] = max(own["waiting"], 0.0)
    if (whole := machine.get("all", 0.0)) > 0.0:
        busy = whole - machine["idle"] - machine["steal"]
        others = busy - own.get("own", 0.0) * seconds
        found["others_share"] = min(max(others / whole, 0.0), 1.0)
        found["steal_share"] = machine["steal"] / whole
    if seconds > 0.0 and "throttled" in machine:
        found["throttled_share"] = min(machine["throttled"] / seconds, 1.0)
    return {name: round(value, 3) for name, value in found.items()}


def _machine(root: Path) -> dict[str, float]:
    """Returns counters in seconds: all, idle, steal of all cores; throttled; time of the reading.
    A counter that the system lacks is missing."""
    found = {"time": time.monotonic()}
    tick = os.sysconf("SC_CLK_TCK")
    words = first_words(root / "proc/stat", 9)
    if len(words) == 9 and all(word.isdecimal() for word in words[1:]):
        ticks = [int(word) / tick for word in words[1:]]
        found |= {"all": sum(ticks), "idle": ticks[3] + ticks[4], "steal": ticks[7]}
    throttled = cgroup.throttled_s(root)
    return found if throttled is None else {**found, "throttled": throttled}
