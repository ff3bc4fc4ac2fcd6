"""Parquet and Arrow files with a column of texts, as most collections of texts are published."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fastlstm.errors import DataError
from fastlstm.system.object_store import arrow_batches

_ROWS, _FIRST_ROWS = 1024, 64
_LONG = 32
"""Mean bytes from which a column holds texts, not names."""
_KINDS = (pa.string(), pa.large_string(), pa.string_view())


def text_columns(file: Path) -> list[str]:
    """Returns the names of the columns of texts; none if the file cannot be read."""
    try:
        return _named(_opened(pa.memory_map(str(file)))[0])
    except (OSError, pa.ArrowException):
        return []


def column_of_texts(file: Path) -> str | None:
    """Returns the column with the longest texts in the first rows; None if all are short, such as
    names, or the file cannot be read."""
    try:
        columns = text_columns(file)
        rows = next(iter(_opened(pa.memory_map(str(file)), columns)[1])).slice(0, _FIRST_ROWS)
        lengths = {n: pc.mean(pc.binary_length(rows[n])).as_py() for n in columns}
    except (OSError, pa.ArrowException, StopIteration):
        return None
    name = max(lengths, key=lambda name: lengths[name] or 0, default=None)
    return name if name is not None and (lengths[name] or 0) >= _LONG else None


def _opened(stream: Any, columns: Sequence[str] = ()) -> tuple[pa.Schema, Iterable[Any]]:
    """Returns the schema of a file and its batches, which hold `columns` or more."""
    is_parquet = stream.read(4) == b"PAR1"
    stream.seek(0)
    if not is_parquet:
        schema, batches = arrow_batches(stream)  # a bad offset would read beyond the memory
        return schema, (batch for batch in batches if batch.validate(full=True) is None)
    parquet = pq.ParquetFile(stream)
    return parquet.schema_arrow, parquet.iter_batches(_ROWS, columns=list(columns))


def _named(schema: pa.Schema) -> list[str]:
    kinds = (
        (c.name, c.type.value_type if pa.types.is_dictionary(c.type) else c.type) for c in schema
    )
    return [name for name, kind in kinds if kind in _KINDS]


def texts_of(stream: BufferedIOBase, name: str, column: str) -> Iterator[bytes | None]:
    """Yields the texts of a column, row by row; None where one is missing. Raises DataError: the
    file is damaged, or has no such column of texts."""
    try:
        schema, batches = _opened(stream, [column])
        named = _named(schema)
        if column not in named:
            raise DataError(
                f"{name} has no column of texts '{column}'; its columns of texts:"
                f" {', '.join(named[:8]) or 'none'}. Name one with `text_field`"
            )
        for batch in batches:
            yield from batch[column].cast(pa.large_string()).cast(pa.large_binary()).to_pylist()
    except pa.ArrowException as error:
        raise DataError(f"{name}: damaged data ({error}); download it again") from error
