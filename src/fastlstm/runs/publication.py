"""Replaces several top-level files of a directory atomically.

The new set is written to `.publish.tmp-<pid>/`; renaming that to `.publish/` commits it, like a
write-ahead log. Then its files move into place, the manifest last. Readers that find the journal
read from it; writers complete it first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fastlstm.errors import CorruptFileError
from fastlstm.runs.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    check_name,
    read_file,
    read_manifest,
    write_directory,
)
from fastlstm.system import storage

JOURNAL = ".publish"
_READ_ATTEMPTS = 4


def publish(directory: Path, files: Mapping[str, bytes], extra: Mapping[str, Any]) -> None:
    """Replaces files as one set; other published files stay.

    After a kill or power cut at any instant, readers find the old set or the new one.

    Raises:
        StorageError: a write failed; the old set is intact.
    """
    storage.require_space(directory, sum(map(len, files.values())))
    staged = directory / f"{JOURNAL}.tmp-{os.getpid()}"
    with storage.storage_errors(directory, "publish the model"):
        finish(directory)
        records = _published_records(directory)
        for name, data in files.items():
            check_name(name, directory / MANIFEST)
            records[name] = FileRecord.of(data)
        try:
            write_directory(staged, files, Manifest(records, extra=dict(extra)))
            storage.rename(staged, directory / JOURNAL)  # the commit
        except BaseException:
            with contextlib.suppress(OSError):
                storage.remove_tree(staged)
            raise
        finish(directory)


def _published_records(directory: Path) -> dict[str, FileRecord]:
    try:
        return dict(read_manifest(directory).files)
    except CorruptFileError:
        return {}  # none yet, or damaged: the new set replaces it


def finish(directory: Path) -> None:
    """Moves a committed set into place; can be repeated at any point. Raises OSError."""
    journal = directory / JOURNAL
    if journal.is_symlink():
        storage.remove_file(journal)  # not made by a publication
    if not journal.is_dir():
        return
    try:
        names = [name for name in read_manifest(journal).files if (journal / name).exists()]
    except CorruptFileError:
        storage.discard(journal)  # damaged on disk: the top-level manifest decides
        return
    for name in names:
        storage.place(journal / name, directory / name)
    storage.place(journal / MANIFEST, directory / MANIFEST)
    storage.fsync_dir(directory)
    storage.discard(journal)


def is_published(directory: Path) -> bool:
    """Returns whether a set is published here, intact or damaged."""
    return (directory / MANIFEST).exists() or (directory / JOURNAL).exists()


def read_published(
    directory: Path, names: Collection[str] | None = None
) -> tuple[Manifest, dict[str, bytes]]:
    """Reads and checks published files of one set, even while another process publishes.

    Args:
        directory: a run or a checkpoint.
        names: files to read, if the manifest lists them; default all.

    Returns:
        The manifest and the content of the files.

    Raises:
        CorruptFileError: names the damaged or missing file.
        FormatError: published by a newer fastlstm.
        StorageError: a file is not readable.
    """
    for _ in range(_READ_ATTEMPTS):
        base = _base(directory)
        before = _identity(base)
        try:
            return _read_set(directory, base, names)
        except CorruptFileError:
            if _base(directory) == base and _identity(base) == before:
                raise  # nothing was published meanwhile: this is damage
    return _read_set(directory, _base(directory), names)


def _read_set(
    directory: Path, base: Path, names: Collection[str] | None
) -> tuple[Manifest, dict[str, bytes]]:
    manifest = read_manifest(base)
    files = {}
    for name, record in manifest.files.items():
        if names is None or name in names:
            path = base / name
            files[name] = read_file(path if path.exists() else directory / name, record)
    return manifest, files


def _base(directory: Path) -> Path:
    journal = directory / JOURNAL
    return journal if journal.is_dir() and not journal.is_symlink() else directory


def _identity(base: Path) -> tuple[int, int, int] | None:
    try:
        info = (base / MANIFEST).stat()
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns, info.st_size
