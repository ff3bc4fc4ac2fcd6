"""Folders of results, on a disk or in an object store, in which files appear whole.

A killed process leaves no file of that name, or the one that was there: on a disk a file is written
under a hidden name, synced and renamed; a store shows one when all of it has arrived. In a store a
write that fails may leave a shorter file, so what a file is worth is said by another, written
after it (`fastlstm.runs.parts`).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from fastlstm.errors import CorruptFileError
from fastlstm.system import storage
from fastlstm.system.object_store import is_url, open_store, store_errors

_CHUNK_BYTES = 4 << 20
Produce = Callable[[Any], object]
"""Writes a file's content to an open file, from its begin to its end."""


class Folder(ABC):
    """A folder, which need not exist yet; `name` is the one it was given by."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def names(self) -> list[str]:
        """Returns the names of its files, sorted; none if it does not exist."""

    @abstractmethod
    def open(self, name: str) -> Any:
        """Opens a file with pyarrow, to be read at any place.

        Raises:
            FileNotFoundError: there is no regular file of that name.
            OSError: it cannot be read.
        """

    @abstractmethod
    def write(self, name: str, produce: Produce) -> tuple[int, str]:
        """Writes a file, replacing one of that name; returns its size and SHA-256.

        Raises:
            StorageError: the disk or the store refused.
        """

    def place(self, name: str) -> str:
        """Returns the path or URL of a file."""
        return f"{self.name.rstrip('/')}/{name}"

    def digest(self, name: str) -> tuple[int, str] | None:
        """Returns size and SHA-256 of a file, or None if it is not there."""
        sha, size = hashlib.sha256(), 0
        try:
            with self.open(name) as file:
                while data := file.read(_CHUNK_BYTES):
                    sha.update(data)
                    size += len(data)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CorruptFileError(f"{self.place(name)}: cannot be read ({error})") from error
        return size, sha.hexdigest()


def open_folder(place: str | Path) -> Folder:
    """Returns the folder at a path or a URL."""
    return RemoteFolder(str(place)) if is_url(place) else LocalFolder(place)


def write_whole(place: str, produce: Produce) -> None:
    """Writes one file at a path or a URL, whole or not at all.

    Raises:
        StorageError: the disk or the store refused.
    """
    base, mark, parameters = place.partition("?") if is_url(place) else (place, "", "")
    folder, slash, name = base.rpartition("/")
    open_folder((folder + mark + parameters) if slash else ".").write(name, produce)


class LocalFolder(Folder):
    """A directory of a disk; it is made when something is written."""

    def __init__(self, place: str | Path) -> None:
        super().__init__(str(place))
        self._path = Path(os.path.expanduser(place))

    def names(self) -> list[str]:
        with storage.storage_errors(self._path, "list"):
            if not self._path.exists():
                return []
            return sorted(p.name for p in self._path.iterdir() if not p.name.startswith("."))

    def open(self, name: str) -> Any:
        import pyarrow as pa

        path = self._path / name
        if not path.is_file():  # a pipe must not hang us
            raise FileNotFoundError(errno.ENOENT, "no regular file", str(path))
        return pa.OSFile(str(path))

    def write(self, name: str, produce: Produce) -> tuple[int, str]:
        path = self._path / name
        with storage.storage_errors(path, "write"):
            self._path.mkdir(parents=True, exist_ok=True)
            _sweep(path)
            temporary = storage.temporary_name(path)
            try:
                with _locked(temporary) as file:
                    known = DigestingFile(file)
                    produce(known)
                    file.flush()
                    os.fsync(file.fileno())
                    storage.rename(temporary, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
        return known.size, known.sha256


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


class RemoteFolder(Folder):
    """A prefix of an object store."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._store, path = open_store(url)
        self._path = path.rstrip("/")

    def place(self, name: str) -> str:
        base, mark, parameters = self.name.partition("?")
        return f"{base.rstrip('/')}/{name}{mark}{parameters}"

    def names(self) -> list[str]:
        from pyarrow import fs

        with store_errors(self.name, "list"):
            found = self._store.get_file_info(fs.FileSelector(self._path, allow_not_found=True))
        return sorted(info.base_name for info in found if info.is_file)

    def open(self, name: str) -> Any:
        return self._store.open_input_file(f"{self._path}/{name}")

    def write(self, name: str, produce: Produce) -> tuple[int, str]:
        path = f"{self._path}/{name}"
        opened = self._store.open_output_stream
        with store_errors(self.place(name), "write"):
            if self._store.type_name == "local":  # file://
                self._store.create_dir(self._path)
            with opened(path) as stream:
                known = DigestingFile(stream)
                produce(known)
        return known.size, known.sha256


class DigestingFile(io.RawIOBase):
    """Passes bytes on to an open file, and knows how many there were and their SHA-256."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file, self._sha, self.size = file, hashlib.sha256(), 0

    @property
    def sha256(self) -> str:
        """Of all bytes so far, in hex."""
        return self._sha.hexdigest()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._sha.update(view)
        self.size += len(view)
        return len(view)
