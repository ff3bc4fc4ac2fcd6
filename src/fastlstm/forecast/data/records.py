"""The files of a table, and the rows of files and frames, read in batches through Arrow.

Parquet, Arrow IPC and .npy files, on a disk or in an object store; pandas, polars and Arrow frames
(anything with Arrow's C stream interface), NumPy arrays. `csv_records` has CSV.
"""

from __future__ import annotations

import glob
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv
from pyarrow import parquet as pq

from fastlstm.errors import DataError, kind_of_value
from fastlstm.forecast.data.names import canonical, is_text
from fastlstm.forecast.data.problems import CurableError, Finding
from fastlstm.forecast.data.table import require_matrix, row_blocks, rows_at_once
from fastlstm.forecast.data.time_text import are_times
from fastlstm.system.cache import file_signature
from fastlstm.system.object_store import RemoteFile, arrow_batches, is_url, remote_files, visible

NULL_WORDS = tuple(csv.ConvertOptions().null_values)
"""Texts of a CSV that mean "no value" where numbers or times are expected."""

_BATCH_ROWS = 1 << 18
_NAME = pa.dictionary(pa.int32(), pa.string())
_FIRST_TEXTS = 300
"""Values of a column that are looked at to see what it holds."""
NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
"""A number as Arrow reads it, but for infinities."""
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_GROUPED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")
_LONGEST_WORD = 12
MAX_COLUMNS = 1 << 16
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
        base = str(path) if path.parts else ""  # paths below "." do not begin with it
        paths = map(Path, visible([str(p) for p in path.rglob("*")], base, str(path)))
        reason = f"{path} has no table; expected files ending in {', '.join(SUFFIXES)}"
    elif os.path.exists(path):
        return [path]
    else:
        paths = map(Path, glob.glob(str(path), recursive=True))
        reason = f"there is no file {path}"
    files = [p for p in paths if p.is_file() and p.name.lower().endswith(SUFFIXES)]
    if not files:
        raise DataError(reason)
    return _tables(files)


def _tables(files: Sequence[TableFile]) -> list[TableFile]:
    tables = [file for file in files if not file.name.lower().endswith((".txt", ".dat"))]
    return sorted(  # part.2 before part.10
        tables or files,  # a .txt or .dat beside tables describes them
        key=lambda file: [(p.isdecimal() and int(p), p) for p in re.split(r"(\d+)", str(file))],
    )


def _partition(file: TableFile) -> dict[str, str | None]:
    """Returns what directories such as "store=7" say of all rows of a file (Hive's form)."""
    path = "" if isinstance(file, MemoryFile) else str(getattr(file, "path", file))
    null, found = "__HIVE_DEFAULT_PARTITION__", re.findall(r"(?<![^/])([^/=]+)=([^/]*)/", path)
    return {unquote(k): None if v == null else unquote(v) for k, v in found}


class Records(ABC):
    """Rows of a table, in order.

    Attributes:
        schema: Arrow's schema; columns are read so by default.
        signature: `file_signature` of every file when it was opened; None for what is in memory.
        total_bytes: of the files; None for frames.
        is_parsed: values are text, parsed as the requested types.
        null_words: texts that mean "no value" where `is_parsed`.
        jumps: of a pandas frame, what its index says of rows that do not follow each other, or "".
    """

    name: str
    schema: pa.Schema
    signature: list[list[str | int]] | None = None
    total_bytes: int | None = None
    done_bytes: int = 0
    is_parsed: bool = False
    null_words: tuple[str, ...] = NULL_WORDS
    jumps: str = ""

    @abstractmethod
    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        """Yields the columns named in `types`, in that order. A CSV is parsed as these types; other
        sources may yield their own. Raises DataError: the file is damaged, or a value does not have
        its column's type."""

    def first_texts(self, names: Sequence[str], count: int = _FIRST_TEXTS) -> dict[str, pa.Array]:
        """Returns the first values of some columns as texts, without missing ones. Raises
        DataError: bytes that are no UTF-8."""
        if not names:
            return {}
        kinds = {name: self.schema.field(name).type for name in names}
        batch = next((batch for batch in self.batches(kinds) if len(batch)), None)
        columns = [] if batch is None else batch.slice(0, count).columns
        texts = dict[str, pa.Array]()
        for name, column in zip(names, columns, strict=False):
            try:
                text = column.cast(pa.string())
            except pa.ArrowInvalid:
                raise DataError(
                    f"{self.name}: column '{name}' is not UTF-8; give the `encoding` of the CSV,"
                    f" such as cp1252, or leave the column out with `ignore={name!r}`"
                ) from None
            texts[name] = with_nulls(text, self.null_words).drop_null()
        return texts

    def require_unchanged(self) -> None:
        """Raises DataError if a file changed since it was opened."""
        for before in self.signature or ():
            path = str(before[0])
            with suppress(OSError, DataError):
                if signature_of(path) == before:
                    continue
            raise DataError(
                f"{path} changed while it was being read; retry when nothing writes to it, or use a"
                " copy"
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
        self.schema, self.jumps = self._table.schema, _jumps(frame)

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        size = rows_at_once(len(types), _BATCH_ROWS)
        yield from self._table.select(list(types)).to_batches(max_chunksize=size)


class FileRecords(Records):
    """One file; `file` is where it is, `partition` the columns that its directories add."""

    def __init__(self, file: TableFile) -> None:
        self.file, self.name = file, str(file)
        if isinstance(file, MemoryFile):
            self.total_bytes = len(file.data)
        else:
            self.signature = [signature_of(file)]
            self.total_bytes = int(self.signature[0][1])
        own, keys = self._read_schema(), _partition(file)
        self.partition = {name: keys[name] for name in keys if name not in own.names}
        self.schema = pa.schema([*own, *((name, _NAME) for name in self.partition)])

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
    """An Arrow IPC file (also called Feather), or a stream, as Hugging Face's datasets write."""

    def _read_schema(self) -> pa.Schema:
        with self._reading(), open_input(self.file, is_mapped=True) as source:
            return arrow_batches(source)[0]

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        with self._reading(), open_input(self.file, is_mapped=True) as source:
            for batch in arrow_batches(source)[1]:
                whole = batch.select(list(types))
                self.done_bytes = source.tell()
                for begin, end in row_blocks(0, whole.num_rows, len(types), _BATCH_ROWS):
                    yield whole.slice(begin, end - begin)


class NumpyRecords(FileRecords):
    """A .npy file of shape (rows,) or (rows, columns); pickles are refused."""

    def _read_schema(self) -> pa.Schema:
        try:
            if isinstance(self.file, RemoteFile):
                with self.file.open() as source:
                    array = np.load(BytesIO(source.read()), allow_pickle=False)
            else:
                array = np.load(str(self.file), mmap_mode="r", allow_pickle=False)
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
    """Files with the same columns, concatenated; directories ("store=7") add columns of texts."""

    def __init__(self, parts: Sequence[FileRecords]) -> None:
        self.parts = parts
        self.name = parts[0].name + (f" and {len(parts) - 1} more" if len(parts) > 1 else "")
        self.signature = [file for part in parts for file in part.signature or ()]
        self.total_bytes = sum(part.total_bytes or 0 for part in parts)
        self.is_parsed = all(part.is_parsed for part in parts)
        self.null_words = parts[0].null_words
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

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        done = 0
        for part in self.parts:
            own = {name: kind for name, kind in types.items() if name not in part.partition}
            own = own or {self.schema.names[0]: self.schema.types[0]}  # it has the rows' number
            for batch in part.batches(own):
                self.done_bytes = done + part.done_bytes
                for name, value in part.partition.items():
                    names = pa.array([value], _NAME).take(pa.repeat(0, len(batch)))
                    batch = batch.append_column(name, names)
                yield batch.select(list(types))
            done += part.total_bytes or 0


def _joined_type(kinds: Sequence[pa.DataType]) -> pa.DataType:
    """Returns a column's type over several files: the first non-null one, or float if any is."""
    present = [kind for kind in kinds if not pa.types.is_null(kind)] or list(kinds)
    floating = [kind for kind in present if pa.types.is_floating(kind)]
    return floating[0] if floating and pa.types.is_integer(present[0]) else present[0]


def require_few(names: Collection[str], origin: str, limit: int = MAX_COLUMNS) -> None:
    """Raises DataError for more columns than a table may have."""
    if len(names) > limit:
        raise DataError(
            f"{origin} has {len(names):,} columns, the limit is {limit:,};"
            " expected a row per time and a column per quantity: is the table transposed?"
        )


def require_distinct(names: Sequence[str], origin: str) -> None:
    """Raises DataError for two columns of one name."""
    double = [name for name, count in Counter(names).items() if count > 1]
    if double:
        raise DataError(f"{origin} has two columns called '{min(double)}'; rename one")


def damaged(name: str, error: Exception) -> DataError:
    """Returns the error for a file that Arrow or the system cannot read."""
    reason = str(error).splitlines()[0].rstrip(".")
    return DataError(f"{name} cannot be read ({reason}); is it complete?")


def with_nulls(column: pa.Array, words: Sequence[str]) -> pa.Array:
    """Returns texts of a CSV with the `words` that mean "no value" (NA, null …) as null."""
    if pa.types.is_string_view(column.type):
        column = column.cast(pa.large_string())
    is_word = pc.is_in(pc.utf8_trim_whitespace(column), pa.array(words, column.type))
    return pc.if_else(is_word, pa.scalar(None, column.type), column)


def numbers_of(
    texts: pa.Array, origin: str, column: str, first_row: int, is_csv: bool = False
) -> pa.Array:
    """Returns texts from row `first_row` on as float64; raises DataError for another text."""

    def read(part: pa.Array) -> pa.Array:
        return pc.utf8_trim_whitespace(part).cast(pa.float64())

    try:
        return read(texts)
    except pa.ArrowInvalid as error:
        row, text = first_refused(texts, read)
        how = " with a decimal point, not a comma" if _DECIMAL_COMMA.fullmatch(text) else ""
        what = f"column '{column}' has the text {text[:40]!r} in row {first_row + row + 1}"
        found, cure = list[Finding](), ""
        if is_csv and _GROUPED.fullmatch(text):
            found, cure = [(what, {"thousands": ","})], "give `thousands=','` if it is a number, "
        elif is_csv and text.strip() == column:
            found = [("a header that rows repeat", {"skip_headers": True})]
            cure = "give `skip_headers=True`, "
        elif is_csv and not any(map(str.isdecimal, text)) and len(text) <= _LONGEST_WORD:
            found = [(what, {"na": (text.strip(),)})]
            cure = f"give `na={text.strip()!r}` if it means no value, "
        raise CurableError(
            f"{origin}: {what}, expected numbers{how}; {cure}correct it, or, unless it is a target,"
            f" read the column as names with `categorical={column!r}`, or leave it out with"
            f" `ignore={column!r}`",
            *found,
        ) from error


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


def _arrow_table(frame: Any) -> pa.Table:
    if isinstance(frame, pa.Table):
        return frame
    if isinstance(frame, np.ndarray):
        return pa.table({str(j): column for j, column in enumerate(require_matrix(frame).T)})
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


def _jumps(frame: Any) -> str:
    """Returns where an index without a name, of whole numbers, does not go on by the usual step."""
    if not type(frame).__module__.startswith("pandas"):
        return ""
    index = frame.index
    if index.names != [None] or index.dtype.kind not in "iu" or len(index) < 3:
        return ""
    numbers = index.to_numpy()
    steps = np.diff(numbers)
    places = np.flatnonzero(steps != np.median(steps))
    if len(places) == 0:
        return ""
    first = int(places[0])
    more = f", the first of {len(places):,} jumps" if len(places) > 1 else ""
    return f"the index goes from {numbers[first]} to {numbers[first + 1]} in row {first + 2}{more}"


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
