"""Atomic file writes, checked reads and strict JSON.

Every change to a run on disk goes through this module, so that tests can simulate a power cut
between any two system calls. Data is written and fsynced under another name, renamed, and the
directory fsynced. For sets of files see `fastlstm.runs.manifest`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, Never, TextIO

from fastlstm.errors import CorruptFileError, StorageError, counted

MAX_JSON_BYTES = 16 << 20
MAX_JSON_DEPTH = 64
_CONTAINERS = (dict, list)
_CHUNK_BYTES = 4 << 20
_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EFBIG: "the file is larger than the disk or this shell allows; see 'ulimit -f'",
    errno.EACCES: "this place is not writable; choose another or change its permissions",
    errno.EPERM: "this place is not writable; choose another or change its permissions",
    errno.EROFS: "this place is mounted read-only; choose another",
    errno.ELOOP: "it is a symbolic link, expected a regular file; remove it",
    errno.ENXIO: "it is a pipe, expected a regular file; remove it",
    errno.EISDIR: "it is a directory, expected a regular file; remove it",
    errno.ENOENT: "there is no such directory; make it, or choose another place",
    errno.ENOTDIR: "a part of the path is a file; choose another place",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EIO: "the disk reports an error; copy the run elsewhere",
}


def storage_error(path: Path, doing: str, error: OSError) -> StorageError:
    """Returns the StorageError for a failed call, with its reason and its cure."""
    advice = _ADVICE.get(error.errno or 0, "see the system's message")
    reason = error.strerror or error
    return StorageError(
        f"{path}: cannot {doing} ({reason}): {advice}. What was stored before is intact."
    )


@contextlib.contextmanager
def storage_errors(path: Path, doing: str) -> Iterator[None]:
    """Turns an OSError inside the block into a StorageError that names `path`."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, doing, error) from error


def write_file(path: Path, data: bytes) -> None:
    """Writes a file atomically: after a crash it has the old or the new content. Raises
    StorageError: the write failed; an old file is intact."""
    temporary = temporary_name(path)
    with _removed_on_error(temporary), storage_errors(path, "write"):
        write_new(temporary, data)
        rename(temporary, path)


@contextlib.contextmanager
def _removed_on_error(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            remove_tree(path) if path.is_dir() else os.unlink(path)
        raise


def temporary_name(path: Path) -> Path:
    """Returns a hidden name in the same directory; `RunDirectory.sweep` removes left-overs."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")


def is_utf8(path: str | os.PathLike[str]) -> bool:
    """Returns whether a name is UTF-8, as libraries in C++ need it."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def is_own(path: Path) -> bool:
    """Returns whether a file or directory belongs to this user and only this user may write it.

    False for a link. Raises OSError, also if it is missing.
    """
    info = path.lstat()
    is_link = stat.S_ISLNK(info.st_mode)
    return info.st_uid == os.geteuid() and not is_link and not info.st_mode & 0o022


@contextlib.contextmanager
def opened(path: Path, flags: int, mode: int = 0o666) -> Iterator[int]:
    """Yields the descriptor of an open file or directory. Raises OSError."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_new(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Writes and fsyncs a new file. Raises OSError, also if it exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with opened(path, flags, mode) as descriptor:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest[:_CHUNK_BYTES]) :]
        os.fsync(descriptor)


def open_lines(path: Path) -> TextIO:
    """Opens a text file to append lines; raises StorageError for links, pipes and directories."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not hang us
    with storage_errors(path, "add lines"):
        return open(
            path,
            "a",
            encoding="utf-8",
            opener=lambda name, mode: os.open(name, mode | flags, 0o666),
        )


def append(file: FileIO, data: memoryview) -> None:
    """Appends to an unbuffered file; raises StorageError with the size so far."""
    rest = data
    try:
        while rest:
            rest = rest[file.write(rest) or 0 :]
    except OSError as error:
        doing = f"write beyond {counted(file.tell(), 'byte')}"
        raise storage_error(Path(str(file.name)), doing, error) from error


def allocate(path: Path, num_bytes: int) -> None:
    """Creates or replaces a file of `num_bytes` to be mapped, with its disk space reserved.

    Without reserved space, writing to a mapped page on a full disk would kill the process. Raises
    StorageError: reserving failed; no file is left.
    """
    doing = f"reserve {counted(num_bytes, 'byte')}"
    with storage_errors(path, doing), open(path, "wb") as file, _removed_on_error(path):
        if hasattr(os, "posix_fallocate") and num_bytes:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        file.truncate(num_bytes)


def fsync_dir(directory: Path) -> None:
    """Makes changes of names in a directory durable. Raises OSError."""
    with opened(directory, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network and FUSE file systems cannot fsync a directory.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise


def rename(source: Path, target: Path) -> None:
    """Renames within one directory, replacing a file, durably. Raises OSError."""
    os.replace(source, target)
    fsync_dir(target.parent)


def make_dir(path: Path) -> None:
    """Creates one directory. Raises OSError."""
    os.mkdir(path)


def remove_file(path: Path) -> None:
    """Removes one file. Raises OSError."""
    os.unlink(path)


def fsync_file(path: Path) -> None:
    """Makes all writes to a file durable. Raises OSError."""
    with opened(path, os.O_RDONLY) as descriptor:
        os.fsync(descriptor)
    fsync_dir(path.parent)


def truncate_file(path: Path, size: int) -> None:
    """Cuts a file to `size` bytes, durably. Raises OSError."""
    with opened(path, os.O_WRONLY | os.O_NOFOLLOW) as descriptor:
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)


def remove_tree(path: Path) -> None:
    """Removes a directory and its content; of a link, only the link. Raises OSError."""
    if path.is_symlink():
        os.unlink(path)
        return
    with os.scandir(path) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                remove_tree(Path(entry.path))
            else:
                os.unlink(entry.path)
    os.rmdir(path)


def remove_unlocked(path: Path) -> None:
    """Removes a file or directory unless a process has locked it, or it is gone."""
    with contextlib.suppress(OSError), opened(path, os.O_RDONLY | os.O_NONBLOCK) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_tree(path) if path.is_dir() else os.unlink(path)


@contextlib.contextmanager
def staged(path: Path, create: Callable[[Path], object]) -> Iterator[Path]:
    """Yields a new file or directory beside `path`, made by `create`, which is renamed to `path`
    after the block.

    An error removes it. Leftovers of killed processes for the same `path` are removed first; a
    living process has locked its own. Raises OSError.
    """
    pattern = re.compile(rf"\.{re.escape(path.name)}\.tmp-[0-9]+-[0-9a-f]{{8}}")
    for left in list(path.parent.iterdir()):
        if pattern.fullmatch(left.name):
            remove_unlocked(left)
    temporary, lock = temporary_name(path), -1
    try:
        with _removed_on_error(temporary):
            while lock < 0:
                create(temporary)
                lock = _locked(temporary)
            yield temporary
            rename(temporary, path)
    finally:
        if lock >= 0:
            os.close(lock)


def _locked(path: Path) -> int:
    """Returns a descriptor that locks a new path, -1 if another process swept it before."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    with contextlib.suppress(OSError):  # some network disks have no locks, nor sweeps
        fcntl.flock(lock, fcntl.LOCK_EX)
    if path.exists():
        return lock
    os.close(lock)
    return -1


def discard(path: Path) -> None:
    """Renames a directory, then removes it, so that nobody sees a part of it. Raises OSError."""
    trash = path.with_name(f"{path.name}.del-{os.getpid()}-{secrets.token_hex(4)}")
    rename(path, trash)
    remove_tree(trash)


def place(source: Path, target: Path) -> None:
    """Links or copies an fsynced file to `target` atomically. Raises OSError."""
    if target.exists() and os.path.samestat(os.lstat(source), os.lstat(target)):
        return  # rename() between links to one file does nothing: the temporary would stay
    temporary = temporary_name(target)
    try:
        os.link(source, temporary, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS, errno.EXDEV):
            raise
        write_new(temporary, read_bytes(source))
    os.replace(temporary, target)


def free_bytes(directory: Path) -> int:
    """Returns the bytes that may still be written to the disk of a directory. Raises StorageError:
    the disk does not say."""
    with storage_errors(directory, "ask for the free space"):
        info = os.statvfs(directory)
    return info.f_bavail * info.f_frsize


def require_space(directory: Path, num_bytes: int) -> None:
    """Raises StorageError unless the disk has space for `num_bytes` and a margin."""
    free = free_bytes(directory)
    needed = num_bytes + num_bytes // 20 + (1 << 20)
    if free < needed:
        raise StorageError(
            f"{directory}: needs {needed / 1e6:.1f} MB for this save, the disk has"
            f" {free / 1e6:.1f} MB free; free some space. What was stored before is intact."
        )


def finite(value: Any) -> Any:
    """Returns a JSON value with NaN and infinity replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value


def encode_json(value: Any) -> bytes:
    """Returns canonical JSON: sorted keys, ASCII, no NaN or Inf."""
    return (json.dumps(value, sort_keys=True, indent=2, allow_nan=False) + "\n").encode("ascii")


def parse_json(data: bytes, origin: Path, limit: int = MAX_JSON_BYTES) -> Any:
    """Parses strict JSON: UTF-8, no NaN or Inf, no duplicate keys, bounded size and depth. Raises
    CorruptFileError: names `origin` and the reason."""
    if len(data) > limit:
        raise CorruptFileError(f"{origin}: has {len(data)} bytes, expected at most {limit} of JSON")
    too_deep = CorruptFileError(f"{origin}: JSON nested deeper than {MAX_JSON_DEPTH} levels")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
    except RecursionError:
        raise too_deep from None
    except ValueError as error:  # also JSONDecodeError and UnicodeDecodeError
        raise CorruptFileError(f"{origin}: not valid JSON ({error})") from None
    if is_deeper(value, MAX_JSON_DEPTH):
        raise too_deep
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object, for `json.loads`; raises ValueError for a duplicate key."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key '{key[:50]}' appears twice")
        result[key] = value
    return result


def _refuse_constant(text: str) -> Never:
    raise ValueError(f"{text} is not JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:50]} is beyond the range of a float")
    return value


def is_deeper(value: Any, depth: int) -> bool:
    """Returns whether JSON is nested deeper than `depth` levels."""
    level = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(depth):
        if not level:
            return False
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, _CONTAINERS)
        ]
    return bool(level)


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON value atomically. Raises StorageError."""
    write_file(path, encode_json(value))


def read_json(path: Path) -> Any:
    """Reads strict JSON. Raises CorruptFileError (missing or invalid) or StorageError."""
    return parse_json(read_bytes(path, limit=MAX_JSON_BYTES), path)


def read_own_json(path: Path) -> Any:
    """Returns the JSON of a file; None if it is missing, damaged or writable by other users."""
    try:
        return read_json(path) if is_own(path) else None
    except (OSError, CorruptFileError, StorageError):
        return None


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[tuple[int, int]]:
    """Yields (descriptor, size) of a regular file; links, pipes and devices are refused."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe must not hang us
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise CorruptFileError(f"{path}: is missing") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CorruptFileError(f"{path}: is a symbolic link, expected a regular file") from None
        if error.errno in (errno.EACCES, errno.EPERM):
            raise storage_error(path, "read", error) from error
        raise CorruptFileError(f"{path}: cannot be opened ({error.strerror})") from error
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise CorruptFileError(f"{path}: is not a regular file")
        yield descriptor, info.st_size
    except OSError as error:
        raise CorruptFileError(f"{path}: cannot be read ({error.strerror})") from error
    finally:
        os.close(descriptor)


def read_bytes(path: Path, limit: int | None = None) -> bytes:
    """Reads a regular file of at most `limit` bytes. Raises CorruptFileError or StorageError."""
    with open_regular(path) as (descriptor, size):
        return read_open(path, descriptor, size, limit)


def read_open(path: Path, descriptor: int, size: int, limit: int | None = None) -> bytes:
    """Reads an open file of `size` bytes; by default at most the machine's memory."""
    allowed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if limit is None else limit
    if size > allowed:  # checked before allocation: a sparse file can claim exabytes
        raise CorruptFileError(f"{path}: has {counted(size, 'byte')}, expected at most {allowed:,}")
    with open(descriptor, "rb", buffering=0, closefd=False) as file:
        data = file.readall()
    if len(data) != size:
        raise CorruptFileError(
            f"{path}: changed while it was read ({size:,}, then {counted(len(data), 'byte')})"
        )
    return data
