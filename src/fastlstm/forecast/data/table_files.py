"""The files of a table: paths, directories, globs, and URLs of object stores."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from fastlstm.errors import DataError
from fastlstm.system.cache import file_signature
from fastlstm.system.object_store import RemoteFile, is_url, remote_files

SUFFIXES = (
    *(".csv", ".tsv", ".txt", ".dat", ".csv.gz", ".tsv.gz", ".csv.zst", ".tsv.zst"),
    *(".parquet", ".pq", ".arrow", ".feather", ".ipc", ".npy"),
)


@dataclass(frozen=True)
class MemoryFile:
    """A CSV in memory, called `title` in messages, of at most `max_columns`."""

    title: str
    data: bytes
    max_columns: int
    name, suffix = "table.csv", ".csv"

    def __str__(self) -> str:
        return self.title


TableFile = Path | RemoteFile | MemoryFile


def require_files(source: Any) -> list[TableFile] | None:
    """Returns the files that `source` names, None for a frame; raises DataError without any."""
    if isinstance(source, MemoryFile):
        return [source]
    if isinstance(source, str | Path):
        return _files(source)
    if isinstance(source, Sequence) and source and all(isinstance(p, str | Path) for p in source):
        return [path for item in source for path in _files(item)]
    return None


def signature_of(file: Path | RemoteFile | str) -> list[str | int]:
    """Returns what identifies a file's content without reading it.

    Of a path: size, times and inode; of a URL: what the store knows of it.
    """
    if is_url(file):
        [file] = remote_files(str(file), SUFFIXES)
    return file.signature() if isinstance(file, RemoteFile) else file_signature(Path(file))


def open_input(file: TableFile, is_mapped: bool = False) -> Any:
    """Opens a file with pyarrow, to be read at any place; a local one may be mapped."""
    if isinstance(file, RemoteFile):
        return file.open()
    if isinstance(file, MemoryFile):
        return pa.BufferReader(file.data)
    return pa.memory_map(str(file)) if is_mapped else pa.OSFile(str(file))


def _files(source: str | Path) -> list[TableFile]:
    if is_url(source):
        return _tables(remote_files(str(source), SUFFIXES))
    path = Path(os.path.expanduser(source))
    if source == "":  # its path would be the current directory
        raise DataError("there is no file ''")
    if os.path.isdir(path):  # Path.is_dir would raise without permission
        paths: Iterable[Path] = path.rglob("*")
        reason = f"{path} has no table; expected files ending in {', '.join(SUFFIXES)}"
    elif os.path.exists(path):
        return [path]
    else:
        paths = map(Path, glob.glob(str(path), recursive=True))
        reason = f"there is no file {path}"
    files = sorted(p for p in paths if p.is_file() and p.name.lower().endswith(SUFFIXES))
    if not files:
        raise DataError(reason)
    return _tables(files)


def _tables(files: Sequence[TableFile]) -> list[TableFile]:
    tables = [file for file in files if not file.name.lower().endswith((".txt", ".dat"))]
    return tables or list(files)  # a .txt or .dat beside tables describes them
