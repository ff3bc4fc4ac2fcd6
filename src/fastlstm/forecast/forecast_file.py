"""Writes forecasts as Parquet, CSV or Arrow while they are computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
from pyarrow import csv, ipc
from pyarrow import parquet as pq

from fastlstm.forecast.data.table import rows_at_once

_WRITERS: dict[str, Any] = {
    ".parquet": pq.ParquetWriter, ".csv": csv.CSVWriter, ".arrow": ipc.new_file
}  # fmt: skip
SUFFIXES = tuple(_WRITERS)
_GROUP_ROWS = 1 << 19
"""Rows of a group, which is held in memory; fewer in wide tables."""


def csv_schema(schema: pa.Schema, whole_seconds: bool) -> pa.Schema:
    """Returns the schema of a CSV: with `whole_seconds` its times have no fractions."""
    for number, field in enumerate(schema if whole_seconds else ()):
        if pa.types.is_timestamp(field.type):
            schema = schema.set(number, field.with_type(pa.timestamp("s", field.type.tz)))
    return schema


def write_rows(
    file: Any, suffix: str, schema: pa.Schema, tables: Iterable[pa.Table], whole_seconds: bool
) -> None:
    """Writes tables one after the other into an open file; `suffix` is one of `SUFFIXES`.

    With `whole_seconds` the times of a CSV have no fractions.
    """
    schema = csv_schema(schema, whole_seconds) if suffix == ".csv" else schema
    size, waiting = rows_at_once(len(schema), _GROUP_ROWS), list[pa.Table]()
    with _WRITERS[suffix](file, schema) as writer:
        for table in tables:
            waiting.append(table.cast(schema))
            if sum(part.num_rows for part in waiting) >= size:
                writer.write_table(pa.concat_tables(waiting))
                waiting = []
        if waiting:
            writer.write_table(pa.concat_tables(waiting))
