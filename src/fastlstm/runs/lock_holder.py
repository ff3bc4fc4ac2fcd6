"""Whether a process writes a run directory, seen from outside."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def lock_holder(lock: Path) -> tuple[bool | None, int]:
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
