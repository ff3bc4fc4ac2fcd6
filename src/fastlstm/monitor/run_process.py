"""The process that writes a run, seen from another one of the same machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

from fastlstm.report.events import Event
from fastlstm.runs.lock_holder import lock_holder
from fastlstm.system.machine_usage import MachineUsage, free_bytes


class RunProcess:
    """Makes the `process` events of a run, for rules of alerts.

    Args:
        run: the run directory.
    """

    def __init__(self, run: Path) -> None:
        self._run, self._pid = run, -1
        self._usage: MachineUsage | None = None

    def look(self) -> Event:
        """Returns `time silent_s is_locked`, `pid state cpu_share` and what `MachineUsage` has.

        `is_locked` is None where it cannot be known; `silent_s` counts from the last event.
        """
        now = time.time()
        is_locked, pid = lock_holder(self._run / ".lock")
        if pid != self._pid:
            self._pid, self._usage = pid, MachineUsage(self._run, pid) if pid > 0 else None
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
