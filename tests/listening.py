"""The sockets on which a process and all that it has started listen, as Linux lists them."""

from __future__ import annotations

import ipaddress
import os
import re
from contextlib import suppress
from pathlib import Path

_LISTENS = "0A"


def descendants(process: int) -> list[int]:
    """Returns a process and all processes below it."""
    found = [process]
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            for child in task.read_text().split():
                found += descendants(int(child))
    return found


def listening(process: int) -> set[tuple[str, int]]:
    """Returns address and port of every listening TCP socket of a process and those below it."""
    inodes = set[str]()
    for one in descendants(process):
        with suppress(OSError):
            for name in os.listdir(f"/proc/{one}/fd"):
                with suppress(OSError):
                    inodes.update(
                        re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/{one}/fd/{name}"))
                    )
    found = set[tuple[str, int]]()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and fields[9] in inodes:
                    found.add(_place(fields[1]))
    return found


def is_loopback(address: str) -> bool:
    """Returns whether only this machine reaches an address."""
    own = ipaddress.ip_address(address)
    mapped = getattr(own, "ipv4_mapped", None)
    return (mapped or own).is_loopback


def _place(text: str) -> tuple[str, int]:
    address, port = text.split(":")
    words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
    return str(ipaddress.ip_address(b"".join(words))), int(port, 16)
