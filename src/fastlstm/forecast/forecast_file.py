"""Forecasts as a file, written while they are computed: Parquet, CSV or Arrow.

The bytes are the same however the rows come: they are written in groups of a fixed size, so that
the merged parts of a table make the file that one process would have written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
from pyarrow import csv, ipc
from pyarrow import parquet as pq

from fastlstm.forecast.data.table import rows_at_once

SUFFIXES = (".parquet", ".csv", ".arrow")
_GROUP_ROWS = 1 << 20
"""Rows of a group, fewer in wide tables; a group is held in memory."""


def write_rows(
    file: Any, suffix: str, schema: pa.Schema, tables: Iterable[pa.Table], whole_seconds: bool
) -> int:
    """Writes tables one behind the other into an open file.

    Args:
        file: open for writing.
        suffix: one of `SUFFIXES`.
        schema: of all tables.
        tables: in order.
        whole_seconds: times of a CSV are written without fractions.

    Returns:
        The number of rows.
    """
    if suffix == ".csv" and whole_seconds:
        schema = _in_seconds(schema)
    num_rows = 0
    with _writer(file, suffix, schema) as writer:
        for group in _groups(tables, rows_at_once(len(schema), _GROUP_ROWS)):
            num_rows += group.num_rows
            if suffix == ".parquet":
                writer.write_table(group, row_group_size=group.num_rows)
            else:
                writer.write_table(group.cast(schema))
    return num_rows


def _writer(file: Any, suffix: str, schema: pa.Schema) -> Any:
    if suffix == ".parquet":
        return pq.ParquetWriter(file, schema)
    if suffix == ".csv":
        return csv.CSVWriter(file, schema)
    return ipc.new_file(file, schema)


def _groups(tables: Iterable[pa.Table], size: int) -> Iterator[pa.Table]:
    """Yields the rows of tables again, `size` at a time, each group copied into one piece."""
    waiting: list[pa.Table] = []
    count = 0
    for table in tables:
        rest = table
        while count + rest.num_rows >= size:
            end = size - count
            yield _copied([*waiting, rest.slice(0, end)])
            waiting, count, rest = [], 0, rest.slice(end)
        waiting.append(rest)
        count += rest.num_rows
    if count:
        yield _copied(waiting)


def _copied(tables: list[pa.Table]) -> pa.Table:
    # A single piece would not be copied, and Arrow writes what is behind a slice as its padding.
    return pa.concat_tables([tables[0].slice(0, 0), *tables]).combine_chunks()


def _in_seconds(schema: pa.Schema) -> pa.Schema:
    """Returns a schema with times in whole seconds."""
    for number, field in enumerate(schema):
        if pa.types.is_timestamp(field.type):
            schema = schema.set(number, field.with_type(pa.timestamp("s", field.type.tz)))
    return schema
