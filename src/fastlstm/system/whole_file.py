"""Writes one file, whole or not at all, at a path or at the URL of an object store."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from fastlstm.system import storage
from fastlstm.system.object_store import is_url, open_store, store_errors


def write_whole(place: str, produce: Callable[[Any], object]) -> None:
    """Writes a file with `produce`, which gets it opened, from its begin to its end.

    A killed process leaves the file that was there, or none: on a disk it is written under a hidden
    name, synced and renamed; a store shows one when all of it has arrived.

    Raises:
        StorageError: the disk or the store refused.
    """
    if is_url(place):
        with store_errors(place, "write"):
            store, key = open_store(place)
            if store.type_name == "local":  # file://
                store.create_dir(key.rpartition("/")[0])
            with store.open_output_stream(key) as stream:
                produce(stream)
        return
    path = Path(os.path.expanduser(place))
    with storage.storage_errors(path, "write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path)
        temporary = storage.temporary_name(path)
        try:
            with _locked(temporary) as file:
                produce(file)
                file.flush()
                os.fsync(file.fileno())
                storage.rename(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise


def _locked(path: Path) -> BinaryIO:
    """Opens a new file, locked until it is closed, so that no other process sweeps it."""
    while True:
        file = open(path, "xb")  # noqa: SIM115
        with suppress(OSError):  # some network disks have no locks, and nothing is swept there
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # it was swept before it was locked


def _sweep(path: Path) -> None:
    """Removes what killed processes left of a file: hidden ones that no process has locked."""
    for left in path.parent.glob(f".{path.name}.tmp-*"):
        with suppress(OSError), left.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()
