"""Writes forecasts as Parquet, CSV or Arrow while they are computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv, ipc
from pyarrow import parquet as pq

from fastlstm.forecast.data.table import rows_at_once

_WRITERS: dict[str, Any] = {
    ".parquet": pq.ParquetWriter, ".csv": csv.CSVWriter, ".arrow": ipc.new_file
}  # fmt: skip
SUFFIXES = tuple(_WRITERS)
_GROUP_ROWS = 1 << 19
"""Rows of a group, which is held in memory; fewer in wide tables."""
DIGITS = 7
"""Significant digits of float32, in which a forecaster computes."""


class CsvForm(NamedTuple):
    """The form of times and numbers in a CSV.

    Attributes:
        times: "us", "s" for times without fractions, "D" for dates.
        is_short: numbers have `DIGITS` significant digits; else all that float64 needs.
    """

    times: Literal["us", "s", "D"] = "us"
    is_short: bool = False


def csv_schema(schema: pa.Schema, form: CsvForm) -> pa.Schema:
    """Returns the schema of a CSV."""
    for number, field in enumerate(schema if form.times != "us" else ()):
        if pa.types.is_timestamp(field.type):
            kind = pa.date32() if form.times == "D" else pa.timestamp("s", field.type.tz)
            schema = schema.set(number, field.with_type(kind))
    return schema


def write_rows(
    file: Any, suffix: str, schema: pa.Schema, tables: Iterable[pa.Table], form: CsvForm
) -> None:
    """Writes tables one after the other into an open file; `suffix` is one of `SUFFIXES`, and
    `form` the form of a CSV."""
    is_csv = suffix == ".csv"
    schema = csv_schema(schema, form) if is_csv else schema
    size, waiting = rows_at_once(len(schema), _GROUP_ROWS), list[pa.Table]()
    with _WRITERS[suffix](file, schema) as writer:
        for table in tables:
            waiting.append((_shortened(table) if is_csv and form.is_short else table).cast(schema))
            if sum(part.num_rows for part in waiting) >= size:
                writer.write_table(pa.concat_tables(waiting))
                waiting = []
        if waiting:
            writer.write_table(pa.concat_tables(waiting))


def _shortened(table: pa.Table) -> pa.Table:
    """Returns a table whose numbers of float64 have `DIGITS` significant digits."""
    for number, field in enumerate(table.schema):
        if pa.types.is_float64(field.type):
            values = _rounded(table.column(number).to_numpy())
            table = table.set_column(number, field, pa.array(values))
    return table


def _rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the numbers of `DIGITS` significant digits nearest to `values`."""
    is_number = np.isfinite(values) & (values != 0)
    size = np.log10(np.abs(values), where=is_number, out=np.zeros_like(values))
    places = DIGITS - 1 - np.floor(size)
    up, down = 10.0 ** places.clip(0, 300), 10.0 ** (-places).clip(0)  # exact powers
    return np.where(is_number, np.rint(values * up / down) * down / up, values)
