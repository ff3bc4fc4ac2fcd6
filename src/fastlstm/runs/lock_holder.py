"""Whether a process writes a run directory, seen from outside."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection
from pathlib import Path


def held_locks() -> set[int]:
    """Returns the inodes of the locked files of this machine."""
    found = set[int]()
    try:
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            words = line.split()
            if words[1] == "FLOCK" and "->" not in words:
                found.add(int(words[5].rpartition(":")[2]))
    except (OSError, ValueError, IndexError):
        return found
    return found


def is_locked(lock: Path, held: Collection[int] | None = None) -> bool | None:
    """Returns whether a process holds the lock; None: not known, such as of a missing file.

    /proc/locks is asked first, so that a run that is just starting never finds its lock taken.

    Args:
        lock: the file that is locked.
        held: a new result of `held_locks`, for looks at many runs; what it lacks is asked for.
    """
    if held is not None:
        try:
            if os.lstat(lock).st_ino in held:
                return True
        except OSError:
            return None
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_ino in held_locks():
            return True
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # seen from another container
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False
