"""Manifests: size and SHA-256 of each file of a directory, written last and checked before use."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastlstm.errors import CorruptFileError, FormatError, counted
from fastlstm.system import storage

MANIFEST = "manifest.json"
MANIFEST_FORMAT = "fastlstm-manifest"
MANIFEST_VERSION = 1
_CHUNK_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 in hex of one file."""

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> FileRecord:
        return cls(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True)
class Manifest:
    """The files of a directory.

    Stored as canonical JSON with its own SHA-256, so that any changed byte is detected. Later
    versions keep this envelope, which tells newer manifests from damaged ones.

    Attributes:
        files: records by file name.
        finite: False if a weight is NaN or Inf.
        extra: further JSON values.
    """

    files: dict[str, FileRecord]
    finite: bool = True
    extra: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        body: dict[str, Any] = {
            "format": MANIFEST_FORMAT,
            "format_version": MANIFEST_VERSION,
            "files": {name: {"size": r.size, "sha256": r.sha256} for name, r in self.files.items()},
            "finite": self.finite,
            "extra": self.extra,
        }
        return _seal(body)

    @classmethod
    def from_bytes(cls, data: bytes, origin: Path) -> Manifest:
        """Parses a manifest. Raises CorruptFileError: it is changed or invalid; FormatError: it is
        of a newer fastlstm."""
        body = storage.parse_json(data, origin)
        if not isinstance(body, dict) or body.get("format") != MANIFEST_FORMAT:
            raise CorruptFileError(f"{origin}: is not a manifest of fastlstm")
        body.pop("sha256", None)
        if _seal(body) != data:
            raise CorruptFileError(
                f"{origin}: does not match its own SHA-256; it was changed or damaged"
            )
        version = body.get("format_version")
        if isinstance(version, int) and version > MANIFEST_VERSION:
            raise FormatError(
                f"{origin}: has format version {version}, this fastlstm reads up to"
                f" {MANIFEST_VERSION}; update it: pip install -U fastlstm"
            )
        return cls(_records(body, origin), bool(body["finite"]), body["extra"])


def _seal(body: dict[str, Any]) -> bytes:
    return storage.encode_json(
        {**body, "sha256": hashlib.sha256(storage.encode_json(body)).hexdigest()}
    )


def _records(body: dict[str, Any], origin: Path) -> dict[str, FileRecord]:
    """Returns the records of a manifest; checks the types of all fields."""
    good = set(body) == {"format", "format_version", "files", "finite", "extra"}
    good = good and body["format_version"] == MANIFEST_VERSION and isinstance(body["finite"], bool)
    if not good or not isinstance(body["files"], dict) or not isinstance(body["extra"], dict):
        raise CorruptFileError(f"{origin}: lacks fields or has unknown ones")
    records = {}
    for name, entry in body["files"].items():
        check_name(name, origin)
        is_record = isinstance(entry, dict) and set(entry) == {"size", "sha256"}
        size, digest = (entry["size"], entry["sha256"]) if is_record else (None, None)
        if (
            type(size) is not int
            or size < 0
            or not isinstance(digest, str)
            or not _SHA256.fullmatch(digest)
        ):
            raise CorruptFileError(f"{origin}: the record of '{name}' is not a size and a SHA-256")
        records[name] = FileRecord(size, digest)
    return records


def check_name(name: str, origin: Path) -> None:
    """Raises CorruptFileError unless `name` is a plain file name."""
    if not _NAME.fullmatch(name) or name == MANIFEST:
        raise CorruptFileError(
            f"{origin}: lists {name[:120]!r}, expected plain names of files beside it"
            " (letters, digits, dot, underscore, hyphen)"
        )


def _digest(descriptor: int, size: int) -> str:
    """Returns the SHA-256 of the next `size` bytes of an open file."""
    digest = hashlib.sha256()
    while size and (data := os.read(descriptor, min(size, _CHUNK_BYTES))):
        digest.update(data)
        size -= len(data)
    return digest.hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """Reads a directory's manifest. Raises CorruptFileError, FormatError or StorageError."""
    path = directory / MANIFEST
    return Manifest.from_bytes(storage.read_bytes(path, limit=storage.MAX_JSON_BYTES), path)


def verify_manifest(directory: Path, *, from_disk: bool = False) -> Manifest:
    """Checks size and SHA-256 of every listed file; refuses unlisted ones, except hidden ones.

    With `from_disk` it reads the disk, not the page cache. Raises CorruptFileError: names the file
    and the reason; FormatError: the manifest is of a newer fastlstm; StorageError: a file is not
    readable.
    """
    manifest = read_manifest(directory)
    refuse_unlisted(directory, manifest)
    for name, record in manifest.files.items():
        path = directory / name
        with storage.open_regular(path) as (descriptor, size):
            if from_disk and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            _check_size(path, size, record)
            _check_digest(path, _digest(descriptor, size), record)
    return manifest


def read_file(path: Path, record: FileRecord) -> bytes:
    """Reads a file and returns the checked bytes. Raises CorruptFileError."""
    with storage.open_regular(path) as (descriptor, size):
        _check_size(path, size, record)
        data = storage.read_open(path, descriptor, size)
    _check_digest(path, hashlib.sha256(data).hexdigest(), record)
    return data


def refuse_unlisted(directory: Path, manifest: Manifest) -> None:
    """Raises CorruptFileError if a directory has a file that its manifest does not list."""
    for name in sorted(path.name for path in directory.iterdir()):
        if name not in manifest.files and name != MANIFEST and not name.startswith("."):
            raise CorruptFileError(f"{directory / name}: is not listed in {MANIFEST}; remove it")


def _check_size(path: Path, size: int, record: FileRecord) -> None:
    if size != record.size:
        raise CorruptFileError(
            f"{path}: has {counted(size, 'byte')}, {MANIFEST} says {record.size:,}; it was changed"
            " or damaged"
        )


def _check_digest(path: Path, digest: str, record: FileRecord) -> None:
    if digest != record.sha256:
        raise CorruptFileError(
            f"{path}: SHA-256 starts with {digest[:12]}, {MANIFEST} says {record.sha256[:12]};"
            " it was changed or damaged"
        )


def write_directory(directory: Path, files: Mapping[str, bytes], manifest: Manifest) -> None:
    """Creates a directory of fsynced files, the manifest last. Raises OSError."""
    if directory.exists():
        storage.remove_tree(directory)
    storage.make_dir(directory)
    for name, data in files.items():
        storage.write_new(directory / name, data)
    storage.write_new(directory / MANIFEST, manifest.to_bytes())
    storage.fsync_dir(directory)


def metrics_mark(path: Path) -> dict[str, Any]:
    """Syncs metrics.jsonl; returns its size and SHA-256. Raises StorageError."""
    with storage.storage_errors(path, "fsync"):
        record = FileRecord.of(b"")
        if path.exists():
            storage.fsync_file(path)
            with storage.open_regular(path) as (descriptor, size):
                record = FileRecord(size, _digest(descriptor, size))
    return {"size": record.size, "sha256": record.sha256}


def verify_metrics_mark(path: Path, mark: object) -> None:
    """Raises CorruptFileError unless metrics.jsonl begins with the content of a `metrics_mark`."""
    size, digest = (
        (mark.get("size"), mark.get("sha256")) if isinstance(mark, dict) else (None, None)
    )
    if type(size) is not int or size < 0 or not isinstance(digest, str):
        raise CorruptFileError(f"{path}: the mark of its checkpoint is not a size and a SHA-256")
    actual = FileRecord.of(b"").sha256
    if size:
        with storage.open_regular(path) as (descriptor, num_bytes):
            if num_bytes < size:
                raise CorruptFileError(
                    f"{path}: has {counted(num_bytes, 'byte')}, its checkpoint recorded {size:,};"
                    " it was cut or damaged"
                )
            actual = _digest(descriptor, size)
    if actual != digest:
        raise CorruptFileError(
            f"{path}: its first {counted(size, 'byte')} differ from its checkpoint's record; it"
            " was changed or damaged"
        )


def truncate_metrics(path: Path, mark: Mapping[str, Any]) -> None:
    """Cuts off the lines after a `metrics_mark`: the resumed run writes them again. Raises
    CorruptFileError: the part to keep is damaged, nothing is cut; StorageError: cutting failed."""
    verify_metrics_mark(path, mark)
    if path.exists():
        with storage.storage_errors(path, "cut"):
            storage.truncate_file(path, mark["size"])
