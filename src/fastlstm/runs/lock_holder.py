"""Whether a process writes a run directory, seen from outside."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path


def held_locks() -> dict[int, int]:
    """Returns the process that holds each locked file of this machine, by the file's inode."""
    found: dict[int, int] = {}
    try:
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            words = line.split()
            if words[1] == "FLOCK" and "->" not in words:
                found.setdefault(int(words[5].rpartition(":")[2]), int(words[4]))
    except (OSError, ValueError, IndexError):
        return found
    return found


def lock_holder(lock: Path, held: Mapping[int, int] | None = None) -> tuple[bool | None, int]:
    """Returns whether the lock is held, and by which process of this machine (-1: unknown).

    /proc/locks is asked first, so that a run that is just starting never finds its lock taken.

    Args:
        lock: the file that is locked.
        held: a new result of `held_locks`, for looks at many runs; what it lacks is asked for.
    """
    if held is not None:
        try:
            inode = os.lstat(lock).st_ino
        except OSError:
            return None, -1
        if inode in held:
            return True, held[inode]
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None, -1
    try:
        inode, held = os.fstat(descriptor).st_ino, held_locks()
        if inode in held:
            return True, held[inode]
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # seen from another container
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except BlockingIOError:
        return True, -1
    except (OSError, ValueError, IndexError):
        return None, -1
    finally:
        os.close(descriptor)
    return False, -1
