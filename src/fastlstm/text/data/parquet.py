"""Parquet and Arrow files with a column of texts, as most collections of texts are published."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BufferedIOBase
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import ipc

from fastlstm.errors import DataError

_ROWS, _FIRST_ROWS = 1024, 64
_ARROW_FILE, _ARROW_STREAM = b"ARROW1", b"\xff\xff\xff\xff"
_LONG = 32
"""Mean bytes from which a column holds texts, not names."""
_KINDS = (pa.string(), pa.large_string(), pa.string_view())


def text_columns(file: Path) -> list[str]:
    """Returns the names of the columns of texts; none if the file cannot be read."""
    try:
        with file.open("rb") as stream:
            return _named(_opened(stream)[0])
    except (OSError, pa.ArrowException):
        return []


def column_of_texts(file: Path) -> str | None:
    """Returns the column with the longest texts in the first rows; None if all are short, such as
    names, or the file cannot be read."""
    try:
        with file.open("rb") as stream:
            schema, read = _opened(stream)
            rows = next(iter(read(_named(schema)))).slice(0, _FIRST_ROWS)
        lengths = {n: pc.mean(pc.binary_length(rows[n])).as_py() for n in rows.schema.names}
    except (OSError, pa.ArrowException, StopIteration):
        return None
    name = max(lengths, key=lambda name: lengths[name] or 0, default=None)
    return name if name is not None and (lengths[name] or 0) >= _LONG else None


def _opened(
    stream: BufferedIOBase,
) -> tuple[pa.Schema, Callable[[Sequence[str]], Iterable[pa.RecordBatch]]]:
    """Returns the schema of a file, and what reads batches of some columns."""
    magic = stream.read(len(_ARROW_FILE))
    stream.seek(0)
    if magic == _ARROW_FILE:
        file = ipc.open_file(stream)
        batches: Iterable[pa.RecordBatch] = map(file.get_batch, range(file.num_record_batches))
        return file.schema, lambda columns: (batch.select(columns) for batch in batches)
    if magic.startswith(_ARROW_STREAM):  # as Hugging Face's datasets write
        reader = ipc.open_stream(stream)
        return reader.schema, lambda columns: (batch.select(columns) for batch in reader)
    parquet = pq.ParquetFile(stream)
    return parquet.schema_arrow, lambda columns: parquet.iter_batches(_ROWS, columns=columns)


def _named(schema: pa.Schema) -> list[str]:
    kinds = (
        (c.name, c.type.value_type if pa.types.is_dictionary(c.type) else c.type) for c in schema
    )
    return [name for name, kind in kinds if kind in _KINDS]


def texts_of(stream: BufferedIOBase, name: str, column: str) -> Iterator[bytes | None]:
    """Yields the texts of a column, row by row; None where one is missing. Raises DataError: the
    file is damaged, or has no such column of texts."""
    try:
        schema, read = _opened(stream)
        named = _named(schema)
        if column not in named:
            raise DataError(
                f"{name} has no column of texts '{column}'; its columns of texts:"
                f" {', '.join(named[:8]) or 'none'}. Name one with `text_field`"
            )
        for batch in read([column]):
            yield from batch.column(0).cast(pa.large_string()).cast(pa.large_binary()).to_pylist()
    except pa.ArrowException as error:
        raise DataError(
            f"{name}: damaged Parquet or Arrow data ({error}); download it again"
        ) from error
