"""A table read in parts, each some of its files; joined, they are the table that one process reads.

What takes one process its time is to fetch, decompress and parse files. So a part holds the batches
of its files, parsed and checked, and the joined batches go through the code that prepares a table
on one machine: the cache entry and its key are the same, byte for byte::

    part-00003-of-00064.batches    a stream of Arrow for each file, one after the other
"""

from __future__ import annotations

import glob
import os
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import ipc

import fastlstm
from fastlstm.errors import (
    CorruptFileError,
    DataError,
    FastLSTMError,
    Setting,
    counted,
    kind_of_value,
)
from fastlstm.forecast.config import READING, ForecastConfig
from fastlstm.forecast.data.dataset import PrepareOptions, SeriesDataset
from fastlstm.forecast.data.ingest import TableIngest
from fastlstm.forecast.data.preparation import ROLES, Progress, prepare, prepare_options
from fastlstm.forecast.data.problems import Problems
from fastlstm.forecast.data.records import Records, is_text, joined, open_file
from fastlstm.forecast.data.roles import Roles, find_roles
from fastlstm.forecast.data.stored_values import Dtype
from fastlstm.forecast.data.table_files import TableFile, require_files, signature_of
from fastlstm.runs.parts import Part, PartDirectory, StoredPart, ranges
from fastlstm.system.cache import make_key
from fastlstm.system.hardware import machine_id
from fastlstm.system.object_store import is_url
from fastlstm.system.storage import MAX_JSON_BYTES

_SHOWN = 5
"""Changed files that a message names."""


def prepare_part(
    frame: Any,
    config: ForecastConfig,
    part: Part,
    directory: str | Path,
    dtype: Dtype = "auto",
    on_progress: Progress | None = None,
) -> StoredPart | None:
    """Reads and checks one part of the files of a table.

    Args:
        frame: a path, a directory, a pattern, a URL, or several of them.
        config: its options of columns and of reading.
        part: which part.
        directory: of all parts; a path or a URL.
        dtype: of the values that `merge_prepared` will store.
        on_progress: called with bytes done and the total in bytes.

    Returns:
        The part; None if it was there already.

    Raises:
        DataError: the directory has parts of something else, or the files cannot be used.
    """
    files, parts = _files(frame), PartDirectory(directory)
    own = files[slice(*part.share(len(files)))]
    work, now = _work(files, config, dtype, part), [signature_of(file) for file in own]
    if parts.holds(part, work, lambda facts: _are_current(facts, now)):
        return None
    opened = [open_file(file) for file in own]
    facts = {
        "tables": _absolute(frame),
        "files": [signature for file in opened for signature in file.signature or ()],
        "machine": machine_id(),
        "columns": {},
        "schemas": [],
        "streams": [],
    }

    def produce(out: Any) -> None:
        if opened:
            writing = _Writing(out, files, opened, prepare_options(config, dtype), on_progress)
            facts.update(writing.run())

    return parts.write(part, work, facts, ".batches", produce)


def merge_prepared(
    parts: PartDirectory,
    stored: Sequence[StoredPart],
    cache_dir: str | None = None,
    on_progress: Progress | None = None,
) -> SeriesDataset:
    """Puts the table of all parts in the cache, as `prepare` of its files does on one machine.

    Args:
        parts: where they are.
        stored: of `PartDirectory.collect`.
        cache_dir: default `environment.cache_dir()`.
        on_progress: called with bytes done and the total in bytes.

    Raises:
        DataError: the files are others than those of the parts, and as `prepare`.
    """
    work = stored[0].work
    version = work.get("version")
    if version != fastlstm.__version__:
        raise DataError(
            f"{parts.name} has parts of version {version}, this is {fastlstm.__version__};"
            " join them with that version, or compute them again"
        )
    try:
        records = joined(_current_files(parts, stored))
        options = dict(work["options"])
        dtype, config = options.pop("dtype"), ForecastConfig(**options, cache_dir=cache_dir)
    except FastLSTMError:
        raise
    except (
        AttributeError, LookupError, OverflowError, TypeError, ValueError, pa.ArrowException,
        zlib.error,
    ) as error:  # fmt: skip
        raise CorruptFileError(f"{parts.name} does not hold the parts of a table") from error
    return prepare(records, config, on_progress, dtype)


class _Writing:
    """Writes the batches of some files of a table.

    Args:
        out: written to.
        files: of the whole table; the first is opened for its columns, as by one process.
        opened: those to read.
        options: how to read them.
        on_progress: called with bytes done and the total in bytes, or None.
    """

    def __init__(
        self,
        out: Any,
        files: Sequence[TableFile],
        opened: Sequence[Records],
        options: PrepareOptions,
        on_progress: Progress | None,
    ) -> None:
        self._out, self._opened, self._options = out, opened, options
        is_first = opened[0].name == str(files[0])
        self._table = joined(opened if is_first else [open_file(files[0]), *opened])
        if len(files) > 1:
            self._table.name = f"{files[0]} and {len(files) - 1} more"  # as one process calls it
        self._on_progress = on_progress
        self._done_bytes, self._total_bytes = 0, sum(file.total_bytes or 0 for file in opened)

    def run(self) -> dict[str, Any]:
        """Writes them; returns facts with which `_PartFile` reads them back."""
        problems = Problems(self._table.name)
        with problems.fatal():
            roles = find_roles(self._table, self._options.roles, problems)
        problems.raise_all()
        columns: dict[str, str] = {}
        schemas: list[str] = []
        streams = []
        for file in self._opened:
            schema = _text_of(file.schema)
            if schema not in schemas:
                schemas.append(schema)
            streams.append([self._out.tell(), schemas.index(schema), file.is_parsed])
            columns = self._copy(file, roles)
            self._done_bytes += file.total_bytes or 0
        self._table.require_unchanged()
        return {"columns": columns, "schemas": schemas, "streams": streams}

    def _copy(self, file: Records, roles: Roles) -> dict[str, str]:
        """Checks and writes one file; returns the types that its columns were asked for."""
        problems, options = Problems(file.name), self._options
        ingest = TableIngest(
            Path(), _FileOfTable(file, self._table), roles, problems, options.time_format,
            options.codes, None, {},
        )  # fmt: skip
        with problems.fatal(), ExitStack() as stack:
            writer = None
            for batch in stack.enter_context(closing(ingest.batches(self._show))):
                if roles.series is not None:
                    batch = _with_numbered_names(batch, roles.series)
                if writer is None:
                    compressed = ipc.IpcWriteOptions(compression="zstd")
                    made = ipc.new_stream(self._out, batch.schema, options=compressed)
                    writer = stack.enter_context(made)
                writer.write_batch(batch)
        problems.raise_all()
        return _texts(ingest.types())

    def _show(self, done_bytes: int, _: int | None) -> None:
        if self._on_progress is not None:
            self._on_progress(self._done_bytes + done_bytes, self._total_bytes)


class _FileOfTable(Records):
    """One file, read as the whole table is, and called by its own name in messages."""

    def __init__(self, file: Records, table: Records) -> None:
        self._file, self.name, self.total_bytes = file, file.name, file.total_bytes
        self.schema, self.is_parsed = table.schema, table.is_parsed

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        for batch in self._file.batches(types):
            self.done_bytes = self._file.done_bytes
            yield batch


@dataclass(frozen=True)
class _Stream:
    """Where a file's batches are: in which part, from which byte on, and where it has none."""

    parts: PartDirectory
    stored: StoredPart
    first: int
    end: int


class _PartFile(Records):
    """One file whose batches a part holds.

    Where the whole table has to be read in another way than the part was, as one whose first file
    has a column without values, the file itself is read.
    """

    def __init__(
        self, file: TableFile, parts: PartDirectory, stored: StoredPart, number: int
    ) -> None:
        facts, signature = stored.facts, signature_of(file)
        self._file, self._number, self._columns = file, number, dict(facts["columns"])
        self.name, self.signature, self.total_bytes = str(file), [signature], int(signature[1])
        self.is_current = _is_current(facts, number, signature)
        first, schema, self.is_parsed = facts["streams"][number]
        ends = [stream[0] for stream in facts["streams"][1:]] + [stored.record.size]
        if not 0 <= first <= ends[number] <= stored.record.size:
            raise ValueError(f"the batches of {file} are not in its part")
        self._stream = _Stream(parts, stored, first, ends[number])
        packed = _unpacked(b64decode(facts["schemas"][schema]))
        self.schema = ipc.read_schema(pa.py_buffer(packed))

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        if not _texts(types).items() <= self._columns.items():
            yield from open_file(self._file).batches(types)
        elif self._stream.first < self._stream.end:
            yield from self._stored_batches(list(types))
        self.done_bytes = self.total_bytes or 0

    def require_unchanged(self) -> None:
        super().require_unchanged()
        if self._number == 0:  # once for each part
            self._stream.parts.require_unchanged([self._stream.stored])

    def _stored_batches(self, names: list[str]) -> Iterator[pa.RecordBatch]:
        with self._stream.parts.reading(self._stream.stored) as source:
            source.seek(self._stream.first)
            with ipc.open_stream(source) as reader:
                for batch in reader:
                    yield batch.select(names)


def _current_files(parts: PartDirectory, stored: Sequence[StoredPart]) -> list[_PartFile]:
    """Returns the files of a table, read from its parts.

    Raises:
        DataError: files were added or removed, or changed.
    """
    files = _files(stored[0].facts["tables"])
    read = [str(file[0]) for part in stored for file in part.facts["files"]]
    if (names := [_name(file) for file in files]) != read:
        others = sorted(set(names) ^ set(read))
        raise DataError(
            f"{parts.name}: the table has {counted(len(files), 'file')} now, its parts have"
            f" {len(read)} (the first that differs: {others[0] if others else names[0]}); compute"
            " the parts again, into another directory"
        )
    found: list[_PartFile] = []
    changed: dict[str, int] = {}
    for part in stored:
        own = files[slice(*part.part.share(len(files)))]
        for number, file in enumerate(own):
            found.append(_PartFile(file, parts, part, number))
            if not found[-1].is_current:
                changed[str(file)] = part.part.number
    if changed:
        more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        numbers = sorted(set(changed.values()))
        raise DataError(
            f"{parts.name}: {counted(len(changed), 'file')} changed since the parts were computed"
            f" ({', '.join(list(changed)[:_SHOWN])}{more}); start again part {ranges(numbers)} with"
            " the same ",
            Setting("shard", f"{numbers[0]}/{stored[0].part.count}"),
        )
    return found


def _files(frame: Any) -> list[TableFile]:
    files = require_files(frame)
    if files is None:
        raise DataError(
            f"got {kind_of_value(frame)}, expected files: a table in memory cannot be read in parts"
        )
    return files


def _work(
    files: Sequence[TableFile], config: ForecastConfig, dtype: Dtype, part: Part
) -> dict[str, Any]:
    """Returns what all parts share; the names are those of messages. Files may change."""
    values = {name: getattr(config, name) for name in (*ROLES, *READING)} | {"dtype": dtype}
    options = {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}
    return {
        "command": "prepare",
        "table": make_key([_name(file) for file in files]),
        "options": options,
        "version": fastlstm.__version__,
        "number of parts": part.count,
    }


def _are_current(facts: Mapping[str, Any], signatures: Sequence[list[str | int]]) -> bool:
    try:
        is_all = len(facts["files"]) == len(signatures)
        return is_all and all(_is_current(facts, n, known) for n, known in enumerate(signatures))
    except (LookupError, TypeError):
        return False


def _is_current(facts: Mapping[str, Any], number: int, signature: list[str | int]) -> bool:
    """Returns whether a part was made of a file as it is now.

    All machines see its path, size and time of change alike. On the machine that read it, the inode
    and the time of its last change of any kind count as well, as they do for one process.
    """
    read = facts["files"][number]
    if is_url(signature[0]) or facts.get("machine") == machine_id():
        return bool(read == signature)
    return bool(read[:3] == signature[:3])


def _name(file: TableFile) -> str:
    return _absolute(str(file))[0]


def _absolute(frame: Any) -> list[str]:
    """Returns paths and URLs that mean the same in any directory."""
    sources = [frame] if isinstance(frame, str | Path) else frame
    return [str(source) if is_url(source) else _absolute_path(source) for source in sources]


def _absolute_path(source: str | Path) -> str:
    path = os.path.expanduser(source)
    if os.path.isabs(path) or os.path.exists(path):
        return os.path.abspath(path)
    # A pattern; a bracket in the name of the current directory is none.
    return os.path.normpath(os.path.join(glob.escape(os.getcwd()), path))


def _with_numbered_names(batch: pa.RecordBatch, name: str) -> pa.RecordBatch:
    """Returns a batch with a column of texts as Arrow's dictionary, which joining reads faster."""
    column = batch.column(name)
    if not is_text(column.type):
        return batch
    place = batch.schema.get_field_index(name)
    return batch.set_column(place, name, column.dictionary_encode())


def _text_of(schema: pa.Schema) -> str:
    packed = zlib.compress(schema.remove_metadata().serialize().to_pybytes())
    return b64encode(packed).decode("ascii")


def _unpacked(data: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    found = unpacking.decompress(data, MAX_JSON_BYTES)
    if not unpacking.eof:
        raise ValueError("the schema is cut off, or larger than any")
    return found


def _texts(types: Mapping[str, pa.DataType]) -> dict[str, str]:
    return {name: str(kind) for name, kind in types.items()}
