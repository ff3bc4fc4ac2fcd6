"""Child processes, and the end of a process with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_TASKS = Path("/proc/self/task")


def can_list_children() -> bool:
    """Returns whether the system lists child processes, as Linux does."""
    return any(_TASKS.glob("*/children"))


def children() -> list[int]:
    """Returns the process ids of the running children of this process."""
    found = list[int]()
    for place in _TASKS.glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found += map(int, place.read_text(encoding="ascii").split())
    return found


def die_with_parent(parent: int | None = None) -> None:
    """Makes Linux kill this process when its parent dies.

    The `parent` whose process id is known may be dead already. An agent in a container may have 1.
    """
    parent = os.getppid() if parent is None else parent
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:  # it has died before the call
        os._exit(128 + signal.SIGKILL)
