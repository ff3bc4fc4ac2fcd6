"""The run directory: layout, lock, clean-up after kills, published model, checkpoints.

::

    RUN/
    ├── config.json · model.safetensors · tokenizer.json · generation_config.json
    ├── manifest.json        sizes and SHA-256 of these, the published model
    ├── metrics.jsonl · report.html · tensorboard/
    ├── checkpoint-<step>/   a complete state with the same four files: usable in place of RUN
    ├── .publish/            files that move to the top level, see `RunDirectory.publish`
    └── .lock                held by the writing process
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fastlstm.errors import CorruptFileError, FastLSTMError, RunDirectoryError, kind_of_value
from fastlstm.runs.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    check_name,
    metrics_mark,
    read_file,
    read_manifest,
    verify_manifest,
    verify_metrics_mark,
    write_directory,
)
from fastlstm.system import storage

TRAINER_FILE = "trainer.json"
PROFILE_FILE = "profile.json"
FORECASTER = "forecaster"
SEQUENCE = "sequence"
"""`kind` in config.json; language models have none."""
TEXT_RUN = "fastlstm-run"
"""`format` in config.json of a language model."""
METRICS_KEY = "metrics"
JOURNAL = ".publish"
_READ_ATTEMPTS = 4
_CHECKPOINT = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})")
_MARK_BYTES = 40
_WORD = secrets.token_hex(8)
"""Tells this process from one with the same number on another machine."""
_SET_ASIDE = re.compile(r"(checkpoint-(?:0|[1-9][0-9]{0,17}))\.old-[0-9a-f-]+")
_LEFT_OVER = re.compile(r"(checkpoint-[0-9]+(\.old-[0-9a-f-]+)?|\.publish)\.(tmp|del)-[0-9a-f-]+")
_LEFT_OVER_FILE = re.compile(r"\..+\.tmp-[0-9]+-[0-9a-f]{8}")


class RunLock:
    """The lock of a run directory, released at the end of a `with` block."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        _held.add(self)

    def release(self) -> None:
        """Releases the lock, also of forked children; can be repeated."""
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.forget()

    def forget(self) -> None:
        """Closes the descriptor without releasing the parent's lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    for lock in list(_held):
        lock.forget()  # a child that outlives its parent must not keep the run locked


os.register_at_fork(after_in_child=_forget_in_child)


def _lock_now(descriptor: int) -> None:
    """Locks a file; raises BlockingIOError if another process keeps the lock.

    Tries again, because `is_locked` takes the lock for an instant.
    """
    for wait_s in (0.01, 0.05):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(wait_s)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


class RunDirectory:
    """One run on disk; `create` makes the directory."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise RunDirectoryError(f"the run directory is {kind_of_value(path)}, expected a path")
        self.path = Path(path)
        self.model_path = self.path / "model.safetensors"
        self.manifest_path = self.path / MANIFEST
        self.metrics_path = self.path / "metrics.jsonl"
        self.report_path = self.path / "report.html"
        self.tensorboard_dir = self.path / "tensorboard"
        self._lock_path = self.path / ".lock"
        self._mark = b""

    def create(self) -> None:
        """Creates the directory; raises RunDirectoryError if it is a file or not writable."""
        if os.path.exists(self.path) and not os.path.isdir(self.path):
            raise RunDirectoryError(
                f"{self.path} is a file, expected a directory; choose another `out`"
            )
        try:
            missing = [p for p in (self.path, *self.path.parents) if not p.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            for directory in missing:
                storage.fsync_dir(directory.parent)
            os.close(self._open_lock_file())
        except OSError as error:
            raise RunDirectoryError(
                f"{self.path} cannot be written ({error.strerror}); choose another `out`"
            ) from error

    def remove_if_empty(self) -> None:
        """Removes the directory if it holds only the lock, after a refused start."""
        names = {path.name for path in self.path.iterdir()} if os.path.isdir(self.path) else {""}
        if names <= {self._lock_path.name}:
            with contextlib.suppress(OSError):
                self._lock_path.unlink(missing_ok=True)
                self.path.rmdir()

    def lock(self) -> RunLock:
        """Takes the lock and cleans up after killed processes; for a `with` block.

        Raises RunDirectoryError: another process, whose number it names, holds the lock;
        StorageError: the clean-up failed.
        """
        lock = RunLock(self._acquire())
        try:
            self.sweep()
        except BaseException:
            lock.release()
            raise
        return lock

    def _acquire(self) -> int:
        descriptor = -1
        try:
            descriptor = self._open_lock_file()
            _lock_now(descriptor)
        except BlockingIOError:
            words = os.pread(descriptor, _MARK_BYTES, 0).decode("ascii", "replace").split()
            holder = words[0] if words else "unknown"
            os.close(descriptor)
            raise RunDirectoryError(
                f"{self.path} is in use by process {holder}; wait for it or choose another `out`"
            ) from None
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise RunDirectoryError(
                f"{self.path} cannot be locked ({error.strerror}); choose `out` in a writable"
                " place on a local disk"
            ) from error
        mark = f"{os.getpid()} {_WORD}\n".encode()
        with contextlib.suppress(OSError):  # only messages need it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, mark, 0)
            self._mark = mark
        return descriptor

    def require_owned(self) -> None:
        """Raises RunDirectoryError if another process has locked the run since: some shared disks
        let two processes lock."""
        with storage.storage_errors(self._lock_path, "read"):
            if not self._lock_path.exists():
                return  # removed by hand
            now = self._lock_path.read_bytes()[:_MARK_BYTES]
        if self._mark and now != self._mark:
            raise RunDirectoryError(
                f"{self.path} is being written by another process, started after this one; this one"
                " ends here, and writes nothing more"
            )

    def _open_lock_file(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self._lock_path, flags, 0o666)

    def sweep(self) -> None:
        """Cleans up after killed processes; only for the holder of the lock.

        Completes a publication, restores a checkpoint set aside unless its replacement is intact,
        and removes temporary files. Raises StorageError.
        """
        with storage.storage_errors(self.path, "clean up"):
            self.finish_publication()
            for path in sorted(self.path.iterdir()):
                if _SET_ASIDE.fullmatch(path.name):
                    self._settle(path)
                elif _LEFT_OVER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                    storage.remove_tree(path)
                elif _LEFT_OVER_FILE.fullmatch(path.name) and not path.is_dir():
                    storage.remove_file(path)

    def _settle(self, aside: Path) -> None:
        """Keeps a checkpoint set aside, or its replacement if that is intact."""
        successor = self.path / aside.name.split(".")[0]
        if successor.exists():
            if not _damage(partial(verify_manifest, successor)):
                storage.discard(aside)
                return
            storage.discard(successor)
        storage.rename(aside, successor)

    def checkpoints(self) -> list[Path]:
        """Returns the checkpoint directories, largest step first. Raises StorageError."""
        by_name: dict[str, Path] = {}
        with storage.storage_errors(self.path, "read"):
            places = sorted(self.path.iterdir()) if os.path.isdir(self.path) else []
        for path in places:
            aside = _SET_ASIDE.fullmatch(path.name)
            name = aside[1] if aside else path.name
            if not _CHECKPOINT.fullmatch(name) or path.is_symlink() or not path.is_dir():
                continue
            by_name.setdefault(name, path)  # "checkpoint-5" sorts before "checkpoint-5.old-…"
        return sorted(by_name.values(), key=checkpoint_step, reverse=True)

    def intact_checkpoint(self, besides: Path | None = None) -> Path | None:
        """Returns an intact, finite checkpoint, if possible the next older one than `besides`."""
        candidates = [p for p in self.checkpoints() if besides is None or p.name != besides.name]
        if besides is not None and _CHECKPOINT.match(besides.name):
            step = checkpoint_step(besides)
            candidates.sort(
                key=lambda p: (checkpoint_step(p) > step, abs(checkpoint_step(p) - step))
            )
        for path in candidates:
            with contextlib.suppress(FastLSTMError):
                if verify_manifest(path).finite:
                    return path
        return None

    def with_offer(self, error: CorruptFileError, besides: Path | None = None) -> CorruptFileError:
        """Returns the error with the name of an intact checkpoint to use instead."""
        intact = self.intact_checkpoint(besides)
        if intact is None:
            return CorruptFileError(f"{error}. {self.path} has no intact checkpoint to use instead")
        return CorruptFileError(f"{error}. Use {intact} instead, which is intact")

    def publish(self, files: Mapping[str, bytes], extra: Mapping[str, Any] | None = None) -> None:
        """Replaces top-level files at once; other published files stay.

        The files are written to `.publish.tmp-<pid>/`; renaming that to `.publish/` commits them,
        like a write-ahead log. Then they move into place, the manifest last. After a kill or power
        cut at any instant, readers find all old files or all new ones. Raises StorageError: a write
        failed, the old files are intact; RunDirectoryError: another process writes the run now.
        """
        self.require_owned()
        storage.require_space(self.path, sum(map(len, files.values())))
        staged = self.path / f"{JOURNAL}.tmp-{os.getpid()}"
        with storage.storage_errors(self.path, "publish the model"):
            self.finish_publication()
            records = dict[str, FileRecord]()
            with contextlib.suppress(CorruptFileError):  # none yet, or damaged and replaced now
                records |= read_manifest(self.path).files
            for name, data in files.items():
                check_name(name, self.manifest_path)
                records[name] = FileRecord.of(data)
            try:
                write_directory(staged, files, Manifest(records, extra=dict(extra or {})))
                storage.rename(staged, self.path / JOURNAL)  # the commit
            except BaseException:
                with contextlib.suppress(OSError):
                    storage.remove_tree(staged)
                raise
            self.finish_publication()

    def finish_publication(self) -> None:
        """Moves committed files into place; can be repeated at any point. Raises OSError."""
        journal = self.path / JOURNAL
        if journal.is_symlink():
            storage.remove_file(journal)  # not made by a publication
        if not journal.is_dir():
            return
        try:
            names = [name for name in read_manifest(journal).files if (journal / name).exists()]
        except CorruptFileError:
            storage.discard(journal)  # damaged on disk: the top-level manifest decides
            return
        for name in (*names, MANIFEST):
            storage.place(journal / name, self.path / name)
        storage.fsync_dir(self.path)
        storage.discard(journal)

    def has_published(self) -> bool:
        """Returns whether files are published here, intact or damaged."""
        return self.manifest_path.exists() or (self.path / JOURNAL).exists()

    def read_published(
        self, names: Collection[str] | None = None
    ) -> tuple[Manifest, dict[str, bytes]]:
        """Returns the manifest and the files `names` that it lists, by default all, of one
        publication, even while another process publishes.

        Raises CorruptFileError: names the damaged or missing file; FormatError: published by a
        newer fastlstm; StorageError: a file is not readable.
        """
        for _ in range(_READ_ATTEMPTS):
            base = self._base()
            before = _identity(base)
            try:
                return self._read_set(base, names)
            except CorruptFileError:
                if self._base() == base and _identity(base) == before:
                    raise  # nothing was published meanwhile: this is damage
        return self._read_set(self._base(), names)

    def _read_set(
        self, base: Path, names: Collection[str] | None
    ) -> tuple[Manifest, dict[str, bytes]]:
        manifest = read_manifest(base)
        files = {}
        for name, record in manifest.files.items():
            if names is None or name in names:
                path = base / name
                files[name] = read_file(path if path.exists() else self.path / name, record)
        return manifest, files

    def _base(self) -> Path:
        journal = self.path / JOURNAL
        return journal if journal.is_dir() and not journal.is_symlink() else self.path

    def verify(self) -> list[CorruptFileError]:
        """Returns all damage of published files, checkpoints and metrics.jsonl, whose marks are in
        the published manifest and the newest checkpoint."""
        damage = []
        if self.has_published() or self.model_path.exists():
            damage += _damage(self.read_published)
        for path in self.checkpoints():
            damage += _damage(partial(verify_manifest, path))
        return damage + _damage(self._verify_metrics)

    def seal_metrics(self) -> None:
        """Adds a mark of metrics.jsonl to the published manifest, to detect damage."""
        if self.has_published():
            self.publish({}, extra={METRICS_KEY: metrics_mark(self.metrics_path)})

    def unseal_metrics(self) -> None:
        """Removes the mark of `seal_metrics`, for a run that continues."""
        if self.has_published():
            self.publish({})

    def _verify_metrics(self) -> None:
        marks = []
        with contextlib.suppress(CorruptFileError):  # a damaged manifest is reported separately
            marks.append(self.read_published(())[0].extra.get(METRICS_KEY))
        newest = self.intact_checkpoint()
        record = read_manifest(newest).files.get(TRAINER_FILE) if newest else None
        if newest is not None and record is not None:
            path = newest / TRAINER_FILE
            trainer = storage.parse_json(read_file(path, record), path)
            meta = trainer.get("meta") if isinstance(trainer, dict) else None
            marks.append(meta.get(METRICS_KEY) if isinstance(meta, dict) else None)
        for mark in marks:
            if mark is not None:
                verify_metrics_mark(self.metrics_path, mark)


Kind = Literal["text", "forecaster", "sequence"]


def kind_of_run(path: str | os.PathLike[str]) -> Kind | None:
    """Returns the kind in config.json of a run or checkpoint, or None."""
    run = RunDirectory(path)
    for directory in (run.path, *run.checkpoints()):
        try:
            data = storage.read_bytes(directory / "config.json", storage.MAX_JSON_BYTES)
            config = json.loads(data)
        except (FastLSTMError, ValueError, RecursionError):
            continue
        if not isinstance(config, dict):
            return None
        if config.get("kind") in (FORECASTER, SEQUENCE):
            kind: Kind = config["kind"]
            return kind
        return "text" if config.get("format") == TEXT_RUN else None
    return None


def _identity(base: Path) -> tuple[int, int, int] | None:
    try:
        info = (base / MANIFEST).stat()
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns, info.st_size


def _damage(check: Callable[[], object]) -> list[CorruptFileError]:
    try:
        check()
    except CorruptFileError as error:
        return [error]
    return []


def checkpoint_step(path: Path) -> int:
    """Returns the step in a checkpoint directory's name."""
    match = _CHECKPOINT.match(path.name)
    if match is None:
        raise ValueError(f"{path} is not named checkpoint-<step>")
    return int(match[1])


def held_locks() -> set[int]:
    """Returns the inodes of the locked files on this machine."""
    found = set[int]()
    try:
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            words = line.split()
            if words[1] == "FLOCK" and "->" not in words:
                found.add(int(words[5].rpartition(":")[2]))
    except (OSError, ValueError, IndexError):
        return found
    return found


def is_locked(lock: Path, held: Collection[int] | None = None) -> bool | None:
    """Returns whether a process holds a lock; None if unknown, such as for a missing file.

    Reads /proc/locks before it tries the lock, which a starting run could find taken. `held` is a
    recent result of `held_locks`, to look at many runs.
    """
    if held is not None:
        try:
            if os.lstat(lock).st_ino in held:
                return True
        except OSError:
            return None
    try:
        with storage.opened(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as descriptor:
            if os.fstat(descriptor).st_ino in held_locks():
                return True
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # seen from another container
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False
