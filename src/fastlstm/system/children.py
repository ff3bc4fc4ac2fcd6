"""The processes that this one has started."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

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
