"""Cores of this machine and their NUMA nodes: a process of several stays where its memory is."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from fastlstm.system.hardware import machine_id

_NODES = Path("/sys/devices/system/node")


class Place(NamedTuple):
    """Where a process computes: several with the same place share its cores.

    Attributes:
        machine: see `hardware.machine_id`.
        cores: that the process may use; None where the system does not say.
    """

    machine: str
    cores: tuple[int, ...] | None

    @classmethod
    def own(cls) -> Place:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        return cls(machine_id(), None if cores is None else tuple(cores))


def numa_nodes(place: Path = _NODES) -> list[set[int]]:
    """Returns the cores of each NUMA node that this process may use; empty where unknown."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    allowed, found = os.sched_getaffinity(0), list[set[int]]()
    names = sorted(place.glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node")))
    for name in names:
        with suppress(OSError, ValueError):
            found.append(_cores((name / "cpulist").read_text()) & allowed)
    return [cores for cores in found if cores]


def _cores(text: str) -> set[int]:
    """Reads a list such as ``0-3,8``."""
    cores = set[int]()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def own_cores(number: int, count: int, nodes: Sequence[set[int]]) -> set[int] | None:
    """Returns the cores of one of several processes of a machine.

    Whole nodes, so that a process finds its memory on the nodes it computes on; where there are
    more processes than nodes, several share one.

    Args:
        number: of the process, from 0.
        count: processes of this machine.
        nodes: of the machine.

    Returns:
        None where binding gains nothing: of one process, or one node.
    """
    if count < 2 or len(nodes) < 2:
        return None
    first = number * len(nodes) // count
    end = max(first + 1, (number + 1) * len(nodes) // count)
    return set().union(*nodes[first:end])


@contextmanager
def bound_to_nodes(number: int, count: int) -> Iterator[None]:
    """Binds this thread, and those it starts, to `own_cores`, if the system lets it."""
    cores = own_cores(number, count, numa_nodes())
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    with suppress(OSError):
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)
