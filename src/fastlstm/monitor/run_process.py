"""The process that writes a run, seen from another one of the same machine."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from fastlstm.report.events import Event
from fastlstm.system.machine_usage import MachineUsage


class RunProcess:
    """Makes the `process` events of a run, for rules of alerts.

    Args:
        run: the run directory.
    """

    def __init__(self, run: Path) -> None:
        self._run, self._pid = run, -1
        self._usage = MachineUsage(run)

    def look(self) -> Event:
        """Returns `time silent_s is_locked`, `pid state cpu_share` and what `MachineUsage` has.

        `is_locked` is None where it cannot be known; `silent_s` counts from the last event.
        """
        now = time.time()
        is_locked, pid = _holder(self._run / ".lock")
        if pid != self._pid:
            self._pid, self._usage = pid, MachineUsage(self._run, pid if pid > 0 else None)
        event: Event = {"event": "process", "time": now, "is_locked": is_locked}
        try:
            event["silent_s"] = max(now - os.stat(self._run / "metrics.jsonl").st_mtime, 0.0)
        except OSError:
            return event
        used = self._usage.read()
        if pid <= 0:  # figures of this process, which writes no run
            used = {name: used[name] for name in ("disk_free_bytes",) if name in used}
            return event | used
        share = used.get("own_cores")
        return event | used | {"pid": pid, "state": _state(pid), "cpu_share": share}


def _holder(lock: Path) -> tuple[bool | None, int]:
    """Returns whether the lock is held, and by which process of this machine (-1: unknown).

    /proc/locks is asked first, so that a run that is just starting never finds its lock taken.
    """
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None, -1
    try:
        inode = os.fstat(descriptor).st_ino
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            words = line.split()
            if "FLOCK" in words[1:2] and "->" not in words and words[5].endswith(f":{inode}"):
                return True, int(words[4])
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # seen from another container
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except BlockingIOError:
        return True, -1
    except (OSError, ValueError, IndexError):
        return None, -1
    finally:
        os.close(descriptor)
    return False, -1


def _state(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return words.rpartition(")")[2].split()[0]
