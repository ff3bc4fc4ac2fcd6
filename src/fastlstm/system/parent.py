"""How a process ends with the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


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
