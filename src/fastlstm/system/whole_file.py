"""Writes one file, whole or not at all, at a path or at the URL of an object store."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
        with storage.staged(path, Path.touch) as temporary, temporary.open("wb") as file:
            produce(file)
            file.flush()
            os.fsync(file.fileno())
