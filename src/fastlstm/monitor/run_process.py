"""The process that writes a run, seen from another one of the same machine."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from fastlstm.report.events import Event
from fastlstm.runs.lock_holder import lock_holder
from fastlstm.system.machine_counters import MachineCounters
from fastlstm.system.machine_usage import MachineUsage, free_bytes


class RunProcess:
    """Makes the `process` events of a run, for rules of alerts.

    Args:
        run: the run directory.
        machine: counters that several runs share; default its own.
    """

    def __init__(self, run: Path, machine: MachineCounters | None = None) -> None:
        self._run, self._pid, self._machine = run, -1, machine
        self._usage: MachineUsage | None = None

    def look(self, held: Mapping[int, int] | None = None) -> Event:
        """Returns `time silent_s is_locked`, `pid state cpu_share` and what `MachineUsage` has.

        `is_locked` is None where it cannot be known; `silent_s` counts from the last event. `held`
        is as in `lock_holder`.
        """
        now = time.time()
        is_locked, pid = lock_holder(self._run / ".lock", held)
        if pid != self._pid:
            self._pid, self._usage = pid, None
            if pid > 0:
                self._usage = MachineUsage(self._run, pid, machine=self._machine)
        event: Event = {"event": "process", "time": now, "is_locked": is_locked}
        try:
            event["silent_s"] = max(now - os.stat(self._run / "metrics.jsonl").st_mtime, 0.0)
        except OSError:
            return event
        if self._usage is None:
            disk = free_bytes(self._run)
            return event if disk is None else event | {"disk_free_bytes": disk}
        used = self._usage.read()
        share = used.get("own_cores")
        return event | used | {"pid": pid, "state": _state(pid), "cpu_share": share}


def _state(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return words.rpartition(")")[2].split()[0]
