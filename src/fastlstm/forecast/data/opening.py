"""Opens what a user gives as a table: paths, directories, globs, URLs, frames, arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastlstm.errors import DataError
from fastlstm.forecast.data.csv_look import require_expected
from fastlstm.forecast.data.csv_records import CsvRecords
from fastlstm.forecast.data.records import (
    ArrowRecords,
    FileRecords,
    FrameRecords,
    JoinedRecords,
    NumpyRecords,
    ParquetRecords,
    Records,
)
from fastlstm.forecast.data.table_files import SUFFIXES, TableFile, require_files
from fastlstm.forecast.read_options import ReadOptions

_KINDS: dict[str, type[FileRecords]] = {
    **dict.fromkeys((".parquet", ".pq"), ParquetRecords),
    **dict.fromkeys((".arrow", ".feather", ".ipc"), ArrowRecords),
    ".npy": NumpyRecords,
}

_MAX_LOOKS = 8


def open_records(
    source: Any, form: ReadOptions | None = None, others: Sequence[str] | None = None
) -> Records:
    """Opens a source of rows; reads only its columns.

    Args:
        source: a path, a directory, a glob, a URL, several of them, or a frame; records are
            returned as they are.
        form: how CSV files are read.
        others: columns that a look at a CSV without readable columns leaves out; None: no look.

    Raises:
        DataError: there is no such file, or no table in it.
    """
    if isinstance(source, Records):
        return source
    files = require_files(source)
    if files is None:
        return FrameRecords(source)
    parts = [open_file(path, form, others) for path in files]
    return parts[0] if len(parts) == 1 else JoinedRecords(parts)


def look_at(records: Records, others: Sequence[str]) -> list[str]:
    """Raises DataError if CSV files, of many a few, look like another format than theirs; returns
    notes on the look."""
    files = records.parts if isinstance(records, JoinedRecords) else [records]
    few = files[:: -(-len(files) // _MAX_LOOKS)]
    looked = [part for part in few if isinstance(part, CsvRecords) and part.form.look]
    return [note for part in looked for note in require_expected(part.file, part.form, others)]


def open_file(
    file: TableFile, form: ReadOptions | None = None, others: Sequence[str] | None = None
) -> Records:
    """Opens one file of a table; see `open_records`."""
    if isinstance(file, Path) and not file.is_file():
        raise DataError(f"{file} is a pipe or a device; save the table to a file: it is read twice")
    suffix = next((end for end in SUFFIXES if file.name.lower().endswith(end)), None)
    if suffix is None:
        raise DataError(f"{file} is not a table; expected a name ending in {', '.join(SUFFIXES)}")
    form, kind = form or ReadOptions(), _KINDS.get(suffix)
    try:
        return CsvRecords(file, form) if kind is None else kind(file)
    except DataError:
        if kind is None and form.look and others is not None:
            require_expected(file, form, others)
        raise
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeEncodeError as error:
        raise DataError(f"{file}: the name is not UTF-8; rename the file") from error
