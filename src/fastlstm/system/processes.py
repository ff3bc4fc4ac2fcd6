"""The processes that this one has started, and how it ends with the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_TASKS = Path("/proc/self/task")


def can_list_children() -> bool:
    """Returns whether the system says which they are; Linux does."""
    return any(_TASKS.glob("*/children"))


def children() -> list[int]:
    """Returns the numbers of the processes that this one has started and that still run."""
    found = list[int]()
    for place in _TASKS.glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found += map(int, place.read_text(encoding="ascii").split())
    return found


def die_with_parent(parent: int | None = None) -> None:
    """Has Linux kill this process when the one that started it dies: none goes on alone.

    Args:
        parent: its process number, where it is known: it may be dead already. It may be 1, that of
            an agent in a container.
    """
    if os.name == "posix" and hasattr(signal, "SIGKILL"):
        parent = os.getppid() if parent is None else parent
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        except (OSError, AttributeError):
            return
        if os.getppid() != parent:  # it was dead before
            os._exit(128 + signal.SIGKILL)
