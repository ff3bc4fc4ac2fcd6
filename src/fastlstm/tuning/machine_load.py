"""How much of the machine others used while something was measured."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from fastlstm.system import hardware


class MachineLoad:
    """Counts processor time from its construction on; processes that it may not see count too.

    Args:
        stat: Linux' counters of the whole machine.
    """

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._start = self._counters()

    def others(self) -> float | None:
        """Returns the share of all cores that other processes used, 0..1; None where unknown.

        Own processes count once they have ended.
        """
        end = self._counters()
        if self._start is None or end is None:
            return None
        busy, idle, own = (now - then for now, then in zip(end, self._start, strict=True))
        if busy + idle <= 0.0:
            return None
        return min(1.0, max(0.0, (busy - own) / (busy + idle)))

    def _counters(self) -> tuple[float, float, float] | None:
        """Returns seconds of all cores busy and idle, and those of this process' children."""
        try:
            words = self._stat.read_text(encoding="ascii").splitlines()[0].split()[1:9]
            ticks = [int(word) for word in words]
        except (OSError, ValueError, IndexError):
            return None
        second = os.sysconf("SC_CLK_TCK")
        idle = sum(ticks[3:5]) / second
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return sum(ticks) / second - idle, idle, used.ru_utime + used.ru_stime


def describe_machine() -> dict[str, object]:
    """Returns CPU, instruction set, cores and versions."""
    import platform
    from importlib.metadata import version

    cpu = hardware.cpu()
    about = {"cpu": cpu.model, "isa": cpu.isa, "cores": cpu.cores}
    return {
        **about,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "fastlstm": version("fastlstm"),
    }
