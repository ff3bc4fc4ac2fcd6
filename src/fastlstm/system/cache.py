"""The cache of prepared data; entries appear atomically.

::

    <cache>/text/entries/<key>/   ids.bin  tokenizer.json  meta.json  sums.json
    <cache>/text/memo/<key>.json  results by a file's stat, or by text and vocabulary
    <cache>/text/work-<random>/   an encoding in progress, locked by its process
    <cache>/series/…              the same for tables (`fastlstm.forecast.data.dataset`)
    <cache>/measured/memo/…       measured speeds (`fastlstm.system.measurements`)

An entry is written to a work directory, fsynced and renamed. The next preparation removes work
directories without a lock: their processes have ended. Directories and files are private (0700,
0600), whatever the umask. Files that belong to another user, or that another user may write, are
not used. An entry holds SHA-256 hashes of its files, which are compared when a process first opens
the entry. 1 GB takes about a second of one core, and all cores hash.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fastlstm.errors import ConfigError, CorruptFileError, FastLSTMError
from fastlstm.system import hardware, storage

if TYPE_CHECKING:
    from numpy.typing import NDArray

FoundT = TypeVar("FoundT")
FORMAT_VERSION = 1
"""Part of every key: a new version does not find old entries."""
_SUMS = "sums.json"
_CHUNK_BYTES = 16 << 20
_intact = set[tuple[Any, ...]]()
"""Files with compared hashes, by path, inode, size and times."""


def file_signature(path: Path) -> list[str | int]:
    """Returns path, size, times and inode, which identify a file's content without reading it."""
    info = path.stat()
    times = info.st_mtime_ns, info.st_ctime_ns
    return [os.path.abspath(path), info.st_size, *times, info.st_ino]


def make_key(*parts: Any) -> str:
    """Returns the SHA-256 of JSON values and this format's version."""
    text = json.dumps([FORMAT_VERSION, *parts], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


class Cache:
    """Prepared data of one kind, shared by any number of processes."""

    def __init__(self, directory: Path, kind: str) -> None:
        self._root = directory / kind
        self._entries = self._root / "entries"
        self._memos = self._root / "memo"
        try:
            for path in (self._root, self._entries, self._memos):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                _make_private(path)  # it may exist with other permissions
                if not storage.is_own(path):
                    raise ConfigError(
                        f"the cache directory {path} belongs to another user or may be written by"
                        " others, who could change the training data; name another with"
                        " `cache_dir` or FASTLSTM_CACHE"
                    )
            if not os.access(self._root, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise ConfigError(
                f"the cache directory {directory} cannot be written ({error.strerror}); name"
                " another with `cache_dir` or FASTLSTM_CACHE"
            ) from error

    def path(self, key: str) -> Path:
        """Returns the path of the entry `key`, which may not exist."""
        return self._entries / key

    def place(self, key: str, work: Path, find: Callable[[], FoundT | None]) -> FoundT:
        """Turns a work directory into the entry `key` and returns it, opened by `find`.

        An entry that another process made meanwhile is kept unless it is damaged.
        """
        target = self.path(key)
        with storage.storage_errors(target, "write"):
            storage.write_json(work / _SUMS, _sums(work))
            for path in (work, *work.iterdir()):
                _make_private(path)
            for _ in range(8):
                try:
                    os.rename(work, target)
                    storage.fsync_dir(self._entries)
                    break
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                if find() is not None:
                    break
                with suppress(FileNotFoundError):
                    os.rename(target, self._root / f"work-{secrets.token_hex(8)}")
        entry = find()
        if entry is None:
            raise CorruptFileError(f"{target} cannot be read back after it was written")
        return entry

    def recall(self, key: str) -> Any:
        """Returns what `remember` stored under `key`; None if it is missing or damaged."""
        stored = storage.read_own_json(self._memos / f"{key}.json")
        is_whole = isinstance(stored, list) and len(stored) == 2
        return stored[0] if is_whole and stored[1] == make_key(key, stored[0]) else None

    def remember(self, key: str, value: Any) -> None:
        """Stores a small JSON value with its hash; if that fails, it is computed again."""
        path = self._memos / f"{key}.json"
        with suppress(OSError, FastLSTMError):
            storage.write_json(path, [value, make_key(key, value)])
            _make_private(path)

    @contextmanager
    def work_directory(self) -> Iterator[Path]:
        """Yields a new directory on the cache's disk, locked until the block ends, then removed."""
        path = self._root / f"work-{secrets.token_hex(8)}"
        lock_file, flags = self._root / ".lock", os.O_RDWR | os.O_CREAT
        with (
            storage.storage_errors(self._root, "make a work directory"),
            storage.opened(lock_file, flags, 0o600) as guard,
        ):
            fcntl.flock(guard, fcntl.LOCK_EX)
            for left in self._root.glob("work-*"):
                storage.remove_unlocked(left)
            path.mkdir(mode=0o700)
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield path
        finally:
            with suppress(FileNotFoundError):
                storage.remove_tree(path)
            os.close(lock)


def is_intact(entry: Path) -> bool:
    """Returns whether an entry is this user's and has the content that `Cache.place` hashed. Raises
    OSError or FastLSTMError: a file is missing or cannot be read."""
    paths = sorted(entry.iterdir())
    if not all(map(storage.is_own, (entry, *paths))):
        return False
    state = tuple(value for path in paths for value in file_signature(path))
    if state not in _intact:
        if storage.read_json(entry / _SUMS) != _sums(entry):
            return False
        _intact.add(state)
    return True


def _sums(directory: Path) -> dict[str, str]:
    """Returns a hash of each file: SHA-256 of its chunks' hashes, which all cores compute."""
    paths = [path for path in sorted(directory.iterdir()) if path.name != _SUMS]
    sums = dict[str, str]()

    def digest(descriptor: int, start: int) -> bytes:
        return hashlib.sha256(os.pread(descriptor, _CHUNK_BYTES, start)).digest()

    with ThreadPoolExecutor(hardware.cores()) as pool:
        for path in paths:
            with storage.opened(path, os.O_RDONLY) as file:
                starts = range(0, os.fstat(file).st_size, _CHUNK_BYTES)
                digests = pool.map(partial(digest, file), starts)
                sums[path.name] = hashlib.sha256(b"".join(digests)).hexdigest()
    return sums


def _make_private(path: Path) -> None:
    """Removes other users' permissions on a path of our own."""
    info = path.stat()
    if info.st_mode & 0o077 and info.st_uid == os.geteuid():
        path.chmod(info.st_mode & 0o700)


def release_pages(array: NDArray[Any]) -> None:
    """Unmaps the pages of a mapped array, which keeps resident memory flat while it is read.

    Costs microseconds; the next access maps the pages again from the page cache.
    """
    base: Any = array
    while base is not None and not isinstance(base, mmap.mmap):
        base = getattr(base, "base", None)
    if base is not None and hasattr(base, "madvise"):
        base.madvise(mmap.MADV_DONTNEED)
