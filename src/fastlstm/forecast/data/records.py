"""Sources of tables: files and frames, read in batches through Arrow.

CSV (also .tsv, .gz, .zst), Parquet, Arrow IPC and .npy files, directories and lists of them, on a
disk or in an object store;
pandas, polars and Arrow frames (anything with Arrow's C stream interface), NumPy arrays.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, ipc
from pyarrow import parquet as pq

from fastlstm.errors import DataError, Setting, counted, kind_of_value
from fastlstm.forecast.data.names import canonical
from fastlstm.forecast.data.table import require_matrix, row_blocks, rows_at_once
from fastlstm.forecast.data.table_files import (
    SUFFIXES,
    TableFile,
    open_input,
    require_files,
    signature_of,
)
from fastlstm.forecast.data.time_text import are_times
from fastlstm.system.object_store import RemoteFile

NULL_WORDS = tuple(csv.ConvertOptions().null_values)
"""Texts of a CSV that mean "no value" where numbers or times are expected."""

_OTHER_COLUMNS = re.compile(
    r"CSV parse error: (?:Row #(\d+): )?Expected (\d+) columns, got (\d+): ([^\n]*)"
)
_BATCH_ROWS = 1 << 18
_FIRST_TEXTS = 300
"""Values of a column that are looked at to see what it holds."""
_CSV_BLOCK_BYTES = 8 << 20
_DELIMITERS = ",;\t|"
_NO_ROWS = {
    "straddling object": f"a line has more than {_CSV_BLOCK_BYTES >> 20} MiB; is it a CSV?",
    "Empty CSV file or block": "the first line has no column names; is it a CSV?",
    "out of sync with chunker": "a quoted value spans lines, or a quote is not closed; write every"
    " row on one line",
}
"""Explanations of Arrow's messages."""
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")


class Records(ABC):
    """Rows of a table, in order.

    Attributes:
        name: of the table in messages.
        schema: Arrow's schema; columns are read so by default.
        signature: `file_signature` of every file when it was opened; None for frames.
        total_bytes: on disk; None for frames.
        done_bytes: bytes read so far.
        is_parsed: values are text, parsed as the requested types.
    """

    name: str
    schema: pa.Schema
    signature: list[list[str | int]] | None = None
    total_bytes: int | None = None
    done_bytes: int = 0
    is_parsed: bool = False

    @abstractmethod
    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        """Yields the columns named in `types`, in that order.

        Args:
            types: types that a CSV is parsed as; other sources may yield their own.

        Raises:
            DataError: the file is damaged, or a value does not have its column's type.
        """

    def first_texts(self, names: Sequence[str]) -> dict[str, pa.Array]:
        """Returns the first values of some columns of text, without missing ones."""
        if not names:
            return {}
        kinds = {name: self.schema.field(name).type for name in names}
        batch = next((batch for batch in self.batches(kinds) if len(batch)), None)
        columns = [] if batch is None else batch.slice(0, _FIRST_TEXTS).columns
        texts = (without_null_words(column.cast(pa.string())) for column in columns)
        return {name: column.drop_null() for name, column in zip(names, texts, strict=False)}

    def require_unchanged(self) -> None:
        """Raises DataError if a file changed since it was opened."""
        for before in self.signature or ():
            path = str(before[0])
            try:
                is_same = signature_of(path) == before
            except (OSError, DataError):
                is_same = False
            if not is_same:
                raise DataError(
                    f"{path} changed while it was being read; retry when nothing writes to it, or"
                    " use a copy"
                )


class FrameRecords(Records):
    """A frame in memory: Arrow, pandas, polars, or a NumPy array."""

    def __init__(self, frame: Any) -> None:
        self.name = f"the {type(frame).__module__.split('.')[0]} {type(frame).__name__}"
        try:
            self._table = _arrow_table(frame)
        except DataError:
            raise
        except (pa.ArrowException, ValueError, TypeError) as error:
            reason = " ".join(map(str, error.args))
            raise DataError(f"{self.name} cannot be read as a table ({reason})") from error
        self.schema = self._table.schema

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        size = rows_at_once(len(types), _BATCH_ROWS)
        yield from self._table.select(list(types)).to_batches(max_chunksize=size)


class FileRecords(Records):
    """One file; `file` is where it is."""

    def __init__(self, file: TableFile) -> None:
        signature = signature_of(file)
        self.file, self.name, self.signature = file, str(file), [signature]
        self.total_bytes = int(signature[1])
        self.schema = self._read_schema()

    @abstractmethod
    def _read_schema(self) -> pa.Schema:
        """Returns the schema, reading as little as possible."""

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turns errors of Arrow and the system into DataError."""
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise damaged(self.name, error) from error


class ParquetRecords(FileRecords):
    """A Parquet file, one row group after the other."""

    def _read_schema(self) -> pa.Schema:
        with self._reading(), open_input(self.file, is_mapped=True) as source:
            return pq.read_schema(source)

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        # Texts are read as dictionaries: repeated ones are not expanded.
        texts = [name for name in types if is_text(self.schema.field(name).type)]
        options: Any = {"read_dictionary": texts, "pre_buffer": isinstance(self.file, RemoteFile)}
        with (
            self._reading(),
            open_input(self.file, is_mapped=True) as source,
            pq.ParquetFile(source, **options) as file,
        ):
            num_rows, done = max(1, file.metadata.num_rows), 0
            size = rows_at_once(len(types), _BATCH_ROWS)
            for batch in file.iter_batches(size, columns=list(types)):
                done += batch.num_rows
                self.done_bytes = (self.total_bytes or 0) * done // num_rows
                yield batch.select(list(types))


class ArrowRecords(FileRecords):
    """An Arrow IPC file (also called Feather)."""

    def _read_schema(self) -> pa.Schema:
        with self._open() as (_, file):
            return file.schema

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        with self._open() as (source, file):
            for number in range(file.num_record_batches):
                whole = file.get_batch(number).select(list(types))
                self.done_bytes = source.tell()
                for begin, end in row_blocks(0, whole.num_rows, len(types), _BATCH_ROWS):
                    yield whole.slice(begin, end - begin)

    @contextmanager
    def _open(self) -> Iterator[tuple[Any, Any]]:
        with self._reading(), open_input(self.file, is_mapped=True) as source:
            yield source, ipc.open_file(source)


class CsvRecords(FileRecords):
    """A CSV file, plain or compressed; the first line names the columns."""

    is_parsed = True

    def _read_schema(self) -> pa.Schema:
        self._compression = {".gz": "gzip", ".zst": "zstd"}.get(self.file.suffix)
        with self._reading(), self._uncompressed() as stream:
            line = stream.read(1 << 16).split(b"\n", 1)[0].decode("utf-8", "replace")
        if not line.strip():
            raise DataError(f"{self.name} is empty; expected a line of column names, then rows")
        self._delimiter = _delimiter_of(line)
        self._has_one_column = self._delimiter not in line
        try:
            with self._open() as reader:
                _ = reader.schema.names  # decodes them
                return reader.schema
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.name}: the column names are not UTF-8 ({error.reason} at byte"
                f" {error.start}); save the file as UTF-8"
            ) from error
        except (pa.ArrowException, OSError) as error:
            raise self._malformed(error) or damaged(self.name, error) from error

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        row = 0
        try:
            with self._open(types) as reader:
                for batch in reader:
                    row += batch.num_rows
                    self.done_bytes = 0 if self._compression else self._stream.tell()
                    yield _without_empty_texts(batch)
        except (pa.ArrowException, OSError) as error:
            raise self._malformed(error) or self._bad_value(types, row, error) from error

    def _open(self, types: Mapping[str, pa.DataType] | None = None) -> Any:
        source = self._uncompressed()
        # NA can be a name; see `without_null_words`
        convert = csv.ConvertOptions(strings_can_be_null=False)
        if types is not None:
            convert.column_types, convert.include_columns = dict(types), list(types)
        return csv.open_csv(
            source,
            csv.ReadOptions(block_size=_CSV_BLOCK_BYTES),
            csv.ParseOptions(
                delimiter=self._delimiter,
                ignore_empty_lines=not self._has_one_column,  # or an empty line is a value
            ),
            convert,
        )

    def _uncompressed(self) -> Any:
        self._stream = open_input(self.file)
        if not self._compression:
            return self._stream
        return pa.CompressedInputStream(self._stream, self._compression)

    def _malformed(self, error: Exception) -> DataError | None:
        """Returns the error for malformed lines, or None if `error` is about something else.

        Parses Arrow's message: threads of Arrow would call a handler in Python even while the
        process ends.
        """
        match = _OTHER_COLUMNS.search(str(error))
        if match is None:
            reason = next((text for words, text in _NO_ROWS.items() if words in str(error)), None)
            return None if reason is None else DataError(f"{self.name}: {reason}")
        number = "a line" if match[1] is None else f"line {match[1]}"
        return DataError(
            f"{self.name}: {number} has {counted(int(match[3]), 'column')}, expected {match[2]}:"
            f" {match[4][:80]!r}"
        )

    def _bad_value(self, types: Mapping[str, pa.DataType], row: int, error: Exception) -> DataError:
        """Finds the value that could not be converted, by reading from `row` on as text."""
        numbers = [name for name, kind in types.items() if pa.types.is_floating(kind)]
        try:
            with self._open(dict.fromkeys(numbers, pa.string())) as reader:
                done = 0
                for batch in reader:
                    if done + batch.num_rows > row:
                        for name in numbers:
                            texts = without_null_words(batch.column(name))
                            numbers_of(texts, self.name, name, done)
                    done += batch.num_rows
        except DataError as bad_value:
            return bad_value
        except (pa.ArrowException, OSError):
            pass
        return damaged(self.name, error)


class NumpyRecords(FileRecords):
    """A .npy file of shape (rows,) or (rows, columns); pickles are refused."""

    def _read_schema(self) -> pa.Schema:
        try:
            if isinstance(self.file, RemoteFile):
                with self.file.open() as source:
                    array = np.load(BytesIO(source.read()), allow_pickle=False)
            else:
                array = np.load(self.file, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError, TypeError, OverflowError) as error:
            raise damaged(self.name, error) from error
        if not isinstance(array, np.ndarray) or array.ndim == 0:
            raise DataError(f"{self.name} has no rows, expected an array (rows, columns)")
        self._array = array[:, None] if array.ndim == 1 else array
        return _arrow_table(np.asarray(self._array[:1])).schema

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        for begin, end in row_blocks(0, len(self._array), len(types), _BATCH_ROWS):
            part = _arrow_table(self._array[begin:end])
            self.done_bytes = (self.total_bytes or 0) * begin // len(self._array)
            yield from part.select(list(types)).combine_chunks().to_batches()


class JoinedRecords(Records):
    """Several files with the same columns, concatenated."""

    def __init__(self, parts: Sequence[Records]) -> None:
        self._parts = parts
        self.name = f"{parts[0].name} and {len(parts) - 1} more"
        self.signature = [file for part in parts for file in part.signature or ()]
        self.total_bytes = sum(part.total_bytes or 0 for part in parts)
        self.is_parsed = all(part.is_parsed for part in parts)
        for part in parts:
            require_distinct(part.schema.names, part.name)
            missing = set(parts[0].schema.names) ^ set(part.schema.names)
            if missing:
                raise DataError(
                    f"{part.name} and {parts[0].name} differ in the columns"
                    f" {', '.join(sorted(missing))}; files of one table need the same columns"
                )
        kinds = {
            name: _joined_type([part.schema.field(name).type for part in parts])
            for name in parts[0].schema.names
        }
        self.schema = pa.schema(kinds)

    def require_unchanged(self) -> None:
        for part in self._parts:
            part.require_unchanged()

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        done = 0
        for part in self._parts:
            for batch in part.batches(types):
                self.done_bytes = done + part.done_bytes
                yield batch
            done += part.total_bytes or 0


def _joined_type(kinds: Sequence[pa.DataType]) -> pa.DataType:
    """Returns a column's type over several files: the first non-null one, or float if any is."""
    present = [kind for kind in kinds if not pa.types.is_null(kind)] or list(kinds)
    floating = [kind for kind in present if pa.types.is_floating(kind)]
    return floating[0] if floating and pa.types.is_integer(present[0]) else present[0]


_KINDS: dict[str, type[FileRecords]] = {
    **dict.fromkeys((".csv", ".tsv", ".txt"), CsvRecords),
    **dict.fromkeys((".csv.gz", ".tsv.gz", ".csv.zst", ".tsv.zst"), CsvRecords),
    **dict.fromkeys((".parquet", ".pq"), ParquetRecords),
    **dict.fromkeys((".arrow", ".feather", ".ipc"), ArrowRecords),
    ".npy": NumpyRecords,
}


def open_records(source: Any) -> Records:
    """Opens a source of rows; reads only its columns.

    Args:
        source: a path, a directory, a glob, a URL, several of them, or a frame (see the module);
            records are returned as they are.

    Raises:
        DataError: there is no such file, or no table in it.
    """
    if isinstance(source, Records):
        return source
    files = require_files(source)
    return FrameRecords(source) if files is None else joined([open_file(path) for path in files])


def joined(files: Sequence[Records]) -> Records:
    """Returns the rows of one file or more, in order. Raises DataError for different columns."""
    return files[0] if len(files) == 1 else JoinedRecords(files)


def require_distinct(names: Sequence[str], origin: str) -> None:
    """Raises DataError for two columns of one name."""
    double = [name for name, count in Counter(names).items() if count > 1]
    if double:
        raise DataError(f"{origin} has two columns called '{min(double)}'; rename one")


def damaged(name: str, error: Exception) -> DataError:
    """Returns the error for a file that Arrow or the system cannot read."""
    reason = str(error).splitlines()[0].rstrip(".")
    return DataError(f"{name} cannot be read ({reason}); is it complete?")


def csv_delimiter(names: Sequence[str]) -> str:
    """Returns the delimiter with which `CsvRecords` reads back a header of these names.

    Raises:
        DataError: there is none.
    """
    for delimiter in _DELIMITERS:
        if _delimiter_of(delimiter.join(names)) == delimiter:
            return delimiter
    raise DataError(
        f"the column names have more of the characters {' '.join(_DELIMITERS[:2])} than a CSV can"
        " have; rename the columns"
    )


def _delimiter_of(line: str) -> str:
    return max(_DELIMITERS, key=line.count)


def is_text(kind: pa.DataType) -> bool:
    """Returns whether a column of this type holds text."""
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def without_null_words(column: pa.Array) -> pa.Array:
    """Returns texts of a CSV with those that mean "no value" (NA, null …) as null."""
    return pc.if_else(pc.is_in(column, pa.array(NULL_WORDS)), pa.scalar(None, column.type), column)


def _without_empty_texts(batch: pa.RecordBatch) -> pa.RecordBatch:
    for place, (name, column) in enumerate(zip(batch.schema.names, batch.columns, strict=True)):
        if is_text(column.type):
            column = pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column)
            batch = batch.set_column(place, name, column)
    return batch


def numbers_of(texts: pa.Array, origin: str, column: str, first_row: int) -> pa.Array:
    """Returns texts from row `first_row` on as float64; raises DataError for another text."""

    def read(part: pa.Array) -> pa.Array:
        return pc.utf8_trim_whitespace(part).cast(pa.float64())

    try:
        return read(texts)
    except pa.ArrowInvalid as error:
        row, text = first_refused(texts, read)
        how = " with a decimal point, not a comma" if _DECIMAL_COMMA.fullmatch(text) else ""
        raise DataError(
            f"{origin}: column '{column}' has the text {text[:40]!r} in row {first_row + row + 1},"
            f" expected numbers{how}; correct it, or, unless it is a target, read the column as"
            " names with ", Setting("categorical", [column]),
            ", or leave it out with ", Setting("ignore", [column]),
        ) from error  # fmt: skip


def first_refused(column: Any, read: Callable[[Any], object]) -> tuple[int, Any]:
    """Returns row and value of the first entry for which `read` raises ArrowInvalid."""
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            read(column.slice(low, middle - low))
            low = middle
        except pa.ArrowInvalid:
            high = middle
    return low, column[low].as_py()


def open_file(file: TableFile) -> Records:
    """Opens one file of a table; see `open_records`."""
    if isinstance(file, Path) and not file.is_file():
        raise DataError(f"{file} is a pipe or a device; save the table to a file: it is read twice")
    for suffix, kind in _KINDS.items():
        if file.name.lower().endswith(suffix):
            try:
                return kind(file)
            except OSError as error:
                raise DataError(f"cannot read {file}: {error.strerror}") from error
            except UnicodeEncodeError as error:
                raise DataError(f"{file}: the name is not UTF-8; rename the file") from error
    raise DataError(f"{file} is not a table; expected a name ending in {', '.join(SUFFIXES)}")


def _arrow_table(frame: Any) -> pa.Table:
    if isinstance(frame, pa.Table):
        return frame
    if isinstance(frame, np.ndarray):
        columns = require_matrix(frame)
        names = [str(number) for number in range(columns.shape[1])]
        return pa.table([pa.array(columns[:, j]) for j in range(columns.shape[1])], names=names)
    if type(frame).__module__.startswith("pandas"):
        return _from_pandas(frame)
    if hasattr(frame, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(frame).read_all()
    if hasattr(frame, "toarray"):
        raise DataError("got a sparse array, sparse input is not supported; give X.toarray()")
    raise DataError(
        f"got {kind_of_value(frame)}, expected a path, a pandas, polars or Arrow frame, or a NumPy"
        " array"
    )


def _from_pandas(frame: Any) -> pa.Table:
    """Keeps an index with names, or of times (as "ds"); drops one that counts rows.

    Periods become their start times; columns that mix numbers and texts become texts.
    """
    if frame.ndim == 1:
        frame = frame.to_frame("y" if frame.name is None else frame.name)
    names = list(frame.index.names)
    if names == [None] and _holds_times(frame.index):
        frame = frame.rename_axis("ds").reset_index()
    elif names != [None]:
        frame = frame.reset_index()
    frame = frame.set_axis([str(name) for name in frame.columns], axis=1)
    for position, kind in enumerate(frame.dtypes):
        if str(kind).startswith("period"):
            frame.isetitem(position, frame.iloc[:, position].dt.to_timestamp())
    try:
        return pa.Table.from_pandas(frame, preserve_index=False)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        for position, kind in enumerate(frame.dtypes):
            if str(kind) == "object":
                column = frame.iloc[:, position]
                frame.isetitem(position, _of_one_type(column.tolist(), column.name))
        return pa.Table.from_pandas(frame, preserve_index=False)


def _holds_times(index: Any) -> bool:
    kind = str(index.dtype)
    if kind.startswith(("datetime", "period")):
        return True
    texts = index.tolist() if kind in ("object", "str", "string") else [None]
    return all(isinstance(text, str) for text in texts) and are_times(pa.array(texts, pa.string()))


def _of_one_type(values: list[Any], name: str) -> list[Any]:
    """Returns the values of an object column unchanged if Arrow accepts them, else as texts."""
    try:
        pa.array(values, from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        kinds = (str, bool, int, float, Decimal, np.number, np.bool_)
        for row, value in enumerate(values):
            if value is not None and not isinstance(value, kinds):
                raise DataError(
                    f"column '{name}' has {kind_of_value(value)} in row {row + 1}, expected"
                    " numbers, texts or times"
                ) from None
        plain = [v.item() if isinstance(v, np.generic) else v for v in values]
        return [None if v is None or v != v else canonical(v) for v in plain]
    return values
