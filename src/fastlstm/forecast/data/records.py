"""What the user named as a table: files or frames, read batch by batch through Arrow.

CSV (also .tsv, .gz, .zst), Parquet, Arrow IPC and .npy files, directories and lists of them;
pandas, polars and Arrow frames (whatever speaks Arrow's C stream interface), NumPy arrays.
"""

from __future__ import annotations

import glob
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, ipc
from pyarrow import parquet as pq

from fastlstm.errors import DataError, Setting, counted, kind_of_value
from fastlstm.forecast.data.names import canonical
from fastlstm.forecast.data.table import rows_at_once
from fastlstm.forecast.data.time_text import are_times

CSV_SUFFIXES = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".csv.zst", ".tsv.zst")
PARQUET_SUFFIXES = (".parquet", ".pq")
ARROW_SUFFIXES = (".arrow", ".feather", ".ipc")
SUFFIXES = (*CSV_SUFFIXES, *PARQUET_SUFFIXES, *ARROW_SUFFIXES, ".npy")

NULL_WORDS = tuple(csv.ConvertOptions().null_values)
"""Texts of a CSV that stand for no value where numbers or times are expected."""

_OTHER_COLUMNS = re.compile(
    r"CSV parse error: (?:Row #(\d+): )?Expected (\d+) columns, got (\d+): ([^\n]*)"
)
_BATCH_ROWS = 1 << 18
_CSV_BLOCK_BYTES = 8 << 20
_DELIMITERS = ",;\t|"
_NO_ROWS = {
    "straddling object": f"a line has more than {_CSV_BLOCK_BYTES >> 20} MiB; is it a CSV?",
    "Empty CSV file or block": "its first line holds no column names; is it a CSV?",
    "out of sync with chunker": "a value in quotes goes over the end of a line, or its quotes are"
    " never closed; write every row on one line",
}
"""What is wrong by what Arrow says of it."""
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")


class Records(ABC):
    """Rows of a table, in order.

    Attributes:
        name: what messages call it.
        schema: Arrow's, of the columns as they are read unless told otherwise.
        total_bytes: on disk; None for frames.
        done_bytes: of them read so far.
        is_parsed: values are text that is read as the types asked for.
    """

    name: str
    schema: pa.Schema
    total_bytes: int | None = None
    done_bytes: int = 0
    is_parsed: bool = False

    @abstractmethod
    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        """Yields the columns named in `types`, in that order.

        Args:
            types: a column may be read as this type; a CSV is parsed so, others may differ.

        Raises:
            DataError: the file is damaged, or a value is not of its column's type.
        """

    def signature(self) -> list[list[str | int]] | None:
        """Returns what `stat` said of every file when it was opened; None for frames, which are
        read every time."""
        return None

    def changed_file(self) -> str | None:
        """Returns the name of a file that was written to since it was opened, or None."""
        return None


class FrameRecords(Records):
    """A frame in memory: Arrow, pandas, polars, or a NumPy array."""

    def __init__(self, frame: Any) -> None:
        self.name = f"the {type(frame).__module__.split('.')[0]} {type(frame).__name__}"
        try:
            table = _arrow_table(frame)
        except (pa.ArrowException, ValueError, TypeError) as error:
            if isinstance(error, DataError):
                raise
            reason = " ".join(str(part) for part in error.args)
            raise DataError(f"{self.name} cannot be read as a table ({reason})") from error
        self._table, self.schema = table, table.schema

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        size = rows_at_once(len(types), _BATCH_ROWS)
        yield from self._table.select(list(types)).to_batches(max_chunksize=size)


class FileRecords(Records):
    """One file.

    Attributes:
        path: where it is.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        self._signature = self._stat()
        self.total_bytes = path.stat().st_size
        self.schema = self._read_schema()

    def signature(self) -> list[list[str | int]] | None:
        return self._signature

    def changed_file(self) -> str | None:
        try:
            return None if self._stat() == self._signature else self.name
        except OSError:
            return self.name

    def _stat(self) -> list[list[str | int]]:
        info = self.path.stat()
        times = [info.st_mtime_ns, info.st_ctime_ns]
        return [[os.path.abspath(self.path), info.st_size, *times, info.st_ino]]

    @abstractmethod
    def _read_schema(self) -> pa.Schema:
        """Returns the schema, having read as little as possible."""

    def _damaged(self, error: Exception) -> DataError:
        reason = str(error).splitlines()[0].rstrip(".")
        return DataError(f"{self.name} cannot be read ({reason}); is it whole?")


class ParquetRecords(FileRecords):
    """A Parquet file, row group after row group."""

    def _read_schema(self) -> pa.Schema:
        try:
            return pq.read_schema(self.path)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from error

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        try:
            # A text that repeats is stored as numbers and names; it need not be spelt out per row.
            texts = [name for name in types if is_text(self.schema.field(name).type)]
            with pq.ParquetFile(self.path, memory_map=True, read_dictionary=texts) as file:
                num_rows, done = max(1, file.metadata.num_rows), 0
                size = rows_at_once(len(types), _BATCH_ROWS)
                for batch in file.iter_batches(size, columns=list(types)):
                    done += batch.num_rows
                    self.done_bytes = (self.total_bytes or 0) * done // num_rows
                    yield batch.select(list(types))
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from error


class ArrowRecords(FileRecords):
    """An Arrow IPC file (also called Feather)."""

    def _read_schema(self) -> pa.Schema:
        try:
            with pa.memory_map(str(self.path)) as source, ipc.open_file(source) as file:
                return file.schema
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from error

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        try:
            with pa.memory_map(str(self.path)) as source, ipc.open_file(source) as file:
                for number in range(file.num_record_batches):
                    whole = file.get_batch(number).select(list(types))
                    self.done_bytes = source.tell()
                    size = rows_at_once(len(types), _BATCH_ROWS)
                    for first in range(0, whole.num_rows, size):
                        yield whole.slice(first, size)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from error


class CsvRecords(FileRecords):
    """A CSV file, plain or compressed; the first line names the columns."""

    is_parsed = True

    def _read_schema(self) -> pa.Schema:
        self._delimiter = self._sniff()
        try:
            with self._open() as reader:
                _ = reader.schema.names  # decoded only now
                return reader.schema
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.name}: the column names are not UTF-8 ({error.reason} at byte"
                f" {error.start}); save the file as UTF-8"
            ) from error
        except (pa.ArrowException, OSError) as error:
            raise self._refused(error) or self._damaged(error) from error

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        row = 0
        try:
            with self._open(types) as reader:
                for batch in reader:
                    row += batch.num_rows
                    self.done_bytes = 0 if self._compression else self._stream.tell()
                    yield _without_empty_texts(batch)
        except (pa.ArrowException, OSError) as error:
            raise self._refused(error) or self._bad_value(types, row, error) from error

    @property
    def _compression(self) -> str | None:
        return {".gz": "gzip", ".zst": "zstd"}.get(self.path.suffix)

    def _open(self, types: Mapping[str, pa.DataType] | None = None) -> Any:
        compression = self._compression
        self._stream = pa.OSFile(str(self.path))
        source = (
            pa.CompressedInputStream(self._stream, compression) if compression else self._stream
        )
        convert = csv.ConvertOptions(
            column_types=None if types is None else dict(types),
            include_columns=None if types is None else list(types),
            strings_can_be_null=False,  # NA may be a name; see `without_null_words`
        )
        return csv.open_csv(
            source,
            csv.ReadOptions(block_size=_CSV_BLOCK_BYTES),
            csv.ParseOptions(
                delimiter=self._delimiter,
                ignore_empty_lines=not self._has_one_column,  # there an empty line is a value
            ),
            convert,
        )

    def _refused(self, error: Exception) -> DataError | None:
        """Returns the error for lines that are no rows of a CSV, if that is what it was.

        Arrow's own words are read: a handler in Python would be called, and let go of, by threads
        of Arrow that may still run when the process ends.
        """
        found = _OTHER_COLUMNS.search(str(error))
        if found is None:
            said = next((text for words, text in _NO_ROWS.items() if words in str(error)), None)
            return None if said is None else DataError(f"{self.name}: {said}")
        number = "a line" if found[1] is None else f"line {found[1]}"
        return DataError(
            f"{self.name}: {number} has {counted(int(found[3]), 'column')}, expected {found[2]}:"
            f" {found[4][:80]!r}"
        )

    def _sniff(self) -> str:
        """Returns the delimiter that the first line has most of."""
        compression = self._compression
        try:
            with pa.input_stream(str(self.path), compression=compression) as stream:
                line = stream.read(1 << 16).split(b"\n", 1)[0].decode("utf-8", "replace")
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from error
        if not line.strip():
            raise DataError(f"{self.name} is empty; expected a line of column names, then rows")
        found = max(_DELIMITERS, key=line.count)
        self._has_one_column = found not in line
        return found

    def _bad_value(self, types: Mapping[str, pa.DataType], row: int, error: Exception) -> DataError:
        """Finds the value that could not be converted: reads on from `row` as text."""
        numbers = [name for name, kind in types.items() if pa.types.is_floating(kind)]
        try:
            with self._open(dict.fromkeys(numbers, pa.string())) as reader:
                done = 0
                for batch in reader:
                    if done + batch.num_rows > row:
                        for name in numbers:
                            found = first_text(without_null_words(batch.column(name)))
                            if found is not None:
                                return text_in_numbers(self.name, name, done + found[0], found[1])
                    done += batch.num_rows
        except (pa.ArrowException, OSError):
            pass
        return self._damaged(error)


class NumpyRecords(FileRecords):
    """A .npy file of shape (rows,) or (rows, columns); nothing in it is executed."""

    def _read_schema(self) -> pa.Schema:
        try:
            array = np.load(self.path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError, TypeError, OverflowError) as error:
            raise self._damaged(error) from error
        if not isinstance(array, np.ndarray) or array.ndim == 0:
            raise DataError(f"{self.name} holds no rows, expected an array (rows, columns)")
        self._array = array[:, None] if array.ndim == 1 else array
        return _arrow_table(np.asarray(self._array[:1])).schema

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        size = rows_at_once(len(types), _BATCH_ROWS)
        for first in range(0, len(self._array), size):
            part = _arrow_table(self._array[first : first + size])
            self.done_bytes = (self.total_bytes or 0) * first // len(self._array)
            yield from part.select(list(types)).combine_chunks().to_batches()


class JoinedRecords(Records):
    """Several files with the same columns, one after the other."""

    def __init__(self, parts: Sequence[Records]) -> None:
        self._parts = parts
        self.name = f"{parts[0].name} and {len(parts) - 1} more"
        sizes = [part.total_bytes or 0 for part in parts]
        self.total_bytes = sum(sizes)
        self.is_parsed = all(part.is_parsed for part in parts)
        for part in parts[1:]:
            missing = set(parts[0].schema.names) ^ set(part.schema.names)
            if missing:
                raise DataError(
                    f"{part.name} and {parts[0].name} differ in the columns"
                    f" {', '.join(sorted(missing))}; files of one table have the same columns"
                )
        self.schema = pa.schema(
            [pa.field(name, _joined_type([part.schema.field(name).type for part in parts]))
             for name in parts[0].schema.names]
        )  # fmt: skip

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        done = 0
        for part in self._parts:
            for batch in part.batches(types):
                self.done_bytes = done + part.done_bytes
                yield batch
            done += part.total_bytes or 0

    def signature(self) -> list[list[str | int]] | None:
        found = [part.signature() for part in self._parts]
        return None if None in found else [line for lines in found if lines for line in lines]

    def changed_file(self) -> str | None:
        return next(filter(None, (part.changed_file() for part in self._parts)), None)


def _joined_type(kinds: Sequence[pa.DataType]) -> pa.DataType:
    """Returns the type of a column in several files: the first that is not empty; a number with a
    fraction where a later file has one."""
    known = [kind for kind in kinds if not pa.types.is_null(kind)] or list(kinds)
    floating = [kind for kind in known if pa.types.is_floating(kind)]
    return floating[0] if floating and pa.types.is_integer(known[0]) else known[0]


def open_records(source: Any) -> Records:
    """Finds the rows that `source` names; reads no more than the columns.

    Args:
        source: a path, a directory, a glob, several of them, or a frame (module docstring).

    Raises:
        DataError: nothing is there, or nothing in it is a table.
    """
    files = require_files(source)
    if files is None:
        return FrameRecords(source)
    parts = [_open_file(path) for path in files]
    return parts[0] if len(parts) == 1 else JoinedRecords(parts)


def require_files(source: Any) -> list[Path] | None:
    """Returns the files that `source` names, or None of a frame.

    Raises:
        DataError: nothing is there.
    """
    if isinstance(source, str | Path):
        return _files(source)
    if isinstance(source, Sequence) and source and all(isinstance(p, str | Path) for p in source):
        return [path for item in source for path in _files(item)]
    return None


def is_text(kind: pa.DataType) -> bool:
    """Returns whether a column of this type holds text."""
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(is_kind(kind) for is_kind in kinds)


def without_null_words(column: pa.Array) -> pa.Array:
    """Returns texts of a CSV in which those that stand for no value (NA, null …) are null."""
    return pc.if_else(pc.is_in(column, pa.array(NULL_WORDS)), pa.scalar(None, column.type), column)


def _without_empty_texts(batch: pa.RecordBatch) -> pa.RecordBatch:
    for place, name in enumerate(batch.schema.names):
        column = batch.column(place)
        if is_text(column.type):
            column = pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column)
            batch = batch.set_column(place, name, column)
    return batch


def first_text(column: Any) -> tuple[int, str] | None:
    """Returns row and value of the first text in a column that is no number; None without one."""
    try:
        numbers_of(column)
    except pa.ArrowInvalid:
        return first_refused(column, numbers_of)
    return None


def numbers_of(column: Any) -> Any:
    """Returns texts as float64; raises ArrowInvalid where one is no number."""
    return pc.utf8_trim_whitespace(column).cast(pa.float64())


def first_refused(column: Any, read: Callable[[Any], object]) -> tuple[int, Any]:
    """Returns row and value of the first entry that `read` raises ArrowInvalid of; there is one."""
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            read(column.slice(low, middle - low))
            low = middle
        except pa.ArrowInvalid:
            high = middle
    return low, column[low].as_py()


def text_in_numbers(name: str, column: str, row: int, value: str) -> DataError:
    """Returns the error for a text where a number was expected; `row` counts from 0."""
    how = " with a decimal point, not a comma" if _DECIMAL_COMMA.fullmatch(value) else ""
    return DataError(
        f"{name}: column '{column}' has the text {value[:40]!r} in row {row + 1}, expected"
        f" numbers{how}; correct it; a column that is no target may also be read as names with ",
        Setting("categorical", [column]),
        ", or left out with ",
        Setting("ignore", [column]),
    )


def _files(source: str | Path) -> list[Path]:
    path = Path(os.path.expanduser(source))
    if source == "":  # its path would be the current directory
        raise DataError("there is no file ''")
    if os.path.isdir(path):
        among: Iterable[Path] = path.rglob("*")
        reason = f"{path} holds no table; expected files ending in {', '.join(SUFFIXES)}"
    elif os.path.exists(path):
        return [path]
    else:
        among = map(Path, glob.glob(str(path), recursive=True))
        reason = f"there is no file {path}"
    found = sorted(p for p in among if p.is_file() and p.name.lower().endswith(SUFFIXES))
    if not found:
        raise DataError(reason)
    tables = [p for p in found if not p.name.lower().endswith(".txt")]
    return tables or found  # a .txt beside tables is a note about them


def _open_file(path: Path) -> Records:
    if not path.is_file():
        raise DataError(f"{path} is a pipe or a device; a table is read twice, write it to a file")
    kinds: dict[tuple[str, ...], type[FileRecords]] = {
        CSV_SUFFIXES: CsvRecords,
        PARQUET_SUFFIXES: ParquetRecords,
        ARROW_SUFFIXES: ArrowRecords,
        (".npy",): NumpyRecords,
    }
    for suffixes, kind in kinds.items():
        if path.name.lower().endswith(suffixes):
            try:
                return kind(path)
            except OSError as error:
                raise DataError(f"cannot read {path}: {error.strerror}") from error
    raise DataError(f"{path} is no table; expected a name ending in {', '.join(SUFFIXES)}")


def _arrow_table(frame: Any) -> pa.Table:
    if isinstance(frame, pa.Table):
        return frame
    if isinstance(frame, np.ndarray):
        columns = frame[:, None] if frame.ndim == 1 else frame
        if columns.ndim != 2 or columns.dtype.kind not in "fiub":
            raise DataError(
                f"an array of shape {frame.shape} and dtype {frame.dtype} came, expected numbers"
                " of shape (rows, columns)"
            )
        names = [str(number) for number in range(columns.shape[1])]
        return pa.table([pa.array(columns[:, j]) for j in range(columns.shape[1])], names=names)
    if type(frame).__module__.startswith("pandas"):
        return _from_pandas(frame)
    if hasattr(frame, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(frame).read_all()
    if hasattr(frame, "toarray"):
        raise DataError("a sparse array came, sparse input is not supported; give X.toarray()")
    raise DataError(
        f"{kind_of_value(frame)} came, expected a path, a pandas, polars or Arrow frame, or a"
        " NumPy array"
    )


def _from_pandas(frame: Any) -> pa.Table:
    """Takes an index along that has names, or holds times (called "ds"); drops one that counts.

    Periods become the times that they begin at; numbers and texts in one column become texts.
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
    """Returns values of a column of objects as they are where Arrow takes them, else as texts."""
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
