"""Tables as they come, reshaped to a row per series and time.

::

    Date;Time;y          country,1/1/2024,1/2/2024       ds,berlin,paris
    01/01/2024;18:00;3   spain,5,6                       2024-01-01,5,7

Times in several columns are joined by spaces. A wide table has a column per time, or a column per
series: each of its rows becomes several, with the columns unique_id, ds and y.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastlstm.errors import DataError
from fastlstm.forecast.data.csv_look import are_dates, is_date, numbered
from fastlstm.forecast.data.records import Records, is_text, numbers_of, with_nulls
from fastlstm.forecast.data.roles import RoleRequest, find_time, is_number, listed
from fastlstm.forecast.data.time_text import columns_of_time

_SERIES, _TIME, _TARGET = "unique_id", "ds", "y"


def reshaped(records: Records, request: RoleRequest, wide: bool) -> tuple[Records, RoleRequest]:
    """Returns a table with one column of times and one of targets, and the roles of its columns.

    Args:
        records: the table.
        request: roles of its columns; its time may be several columns with commas between them.
        wide: the table has a column per time or per series.

    Raises:
        DataError: a wide table without such columns.
    """
    names = records.schema.names
    if request.time is not None and request.time not in names:
        parts = columns_of_time(request.time)
        if len(parts) > 1 and set(parts) <= set(names):
            records = _JoinedTimes(records, request.time, parts)
    if not wide:
        return records, request
    columns = [name for name in records.schema.names if name not in request.ignore]
    steps = numbered(columns)
    others = [name for name in columns if name not in steps]
    if are_dates(columns) or (steps and (request.time or find_time(records, others)) is None):
        return _by_time(records, request, columns)
    return _by_series(records, request, columns)


class _Reshaped(Records):
    """Another table's rows in another form."""

    def __init__(self, records: Records, schema: Sequence[tuple[str, pa.DataType]]) -> None:
        self._records, self.schema = records, pa.schema(schema)
        self.name, self.signature = records.name, records.signature
        self.total_bytes, self.null_words = records.total_bytes, records.null_words
        self.is_parsed = records.is_parsed

    @property
    def done_bytes(self) -> int:  # type: ignore[override]
        return self._records.done_bytes

    def _select(self, columns: Mapping[str, Any], names: Sequence[str]) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([columns[name] for name in names], names=list(names))


class _JoinedTimes(_Reshaped):
    """A table with a column of times, `label`, made of the columns `parts`."""

    def __init__(self, records: Records, label: str, parts: list[str]) -> None:
        others = [(f.name, f.type) for f in records.schema if f.name not in parts]
        super().__init__(records, [(label, pa.string()), *others])
        self._label, self._parts = label, parts

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        asked = {name: kind for name, kind in types.items() if name != self._label}
        if self._label in types:
            own = self._records.schema
            kinds = {n: pa.string() if self.is_parsed else own.field(n).type for n in self._parts}
            asked |= kinds
        for batch in self._records.batches(asked):
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            if self._label in types:
                texts = [_text(columns[name]) for name in self._parts]
                columns[self._label] = pc.binary_join_element_wise(*texts, " ")
            yield self._select(columns, list(types))


def _text(column: pa.Array) -> pa.Array:
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.date32())
    return pc.utf8_trim_whitespace(column.cast(pa.string()))


def _by_time(
    records: Records, request: RoleRequest, columns: list[str]
) -> tuple[Records, RoleRequest]:
    """A row per series and a column per time; the series are named by the columns of text."""
    steps = numbered(columns)
    times = steps or list(filter(is_date, columns))
    schema, others = records.schema, [name for name in columns if name not in times]
    texts = [name for name in others if is_text(schema.field(name).type)]
    names = columns_of_time(request.series) if request.series else texts or others[:1]
    if missing := [name for name in names if name not in schema.names]:
        raise DataError(
            f"{records.name} has no column '{missing[0]}'; its columns: {listed(names)}"
        )
    roles = replace(
        request, series=_SERIES, time=_TIME, target=(_TARGET,), past=(), static=(), ignore=()
    )
    return _TimeColumns(records, names, times, bool(steps)), roles


class _TimeColumns(_Reshaped):
    """A row for each series and time of a table with a column for each of the `times`."""

    def __init__(
        self, records: Records, names: list[str], times: list[str], are_steps: bool
    ) -> None:
        kind = pa.int64() if are_steps else pa.string()
        super().__init__(records, [(_SERIES, pa.string()), (_TIME, kind), (_TARGET, pa.float64())])
        self._names, self._times = names, times
        own = [int("".join(filter(str.isdecimal, t))) for t in times] if are_steps else times
        self._labels = pa.array(own, kind)

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        schema = self._records.schema
        asked = {n: pa.string() if self.is_parsed else schema.field(n).type for n in self._names}
        asked |= {n: schema.field(n).type for n in self._times}
        row, num = 0, len(self._times)
        for batch in self._records.batches(asked):
            names = [pc.fill_null(batch.column(n).cast(pa.string()), "") for n in self._names]
            label = pc.utf8_trim(pc.binary_join_element_wise(*names, "/"), "/")
            which = np.repeat(np.arange(len(batch), dtype=np.int32), num)
            numbers = _numbers(self._records, batch, self._times, row)
            columns = {
                _SERIES: pa.DictionaryArray.from_arrays(which, label),
                _TIME: self._labels.take(pa.array(np.tile(np.arange(num), len(batch)))),
                _TARGET: pa.array(numbers.ravel(), from_pandas=True),
            }
            row += len(batch)
            yield self._select(columns, list(types))


def _by_series(
    records: Records, request: RoleRequest, columns: list[str]
) -> tuple[Records, RoleRequest]:
    """A row per time and a column per series."""
    time = request.time or find_time(records, columns)
    series = [n for n in columns if n != time and is_number(records.schema.field(n).type)]
    if time is None or len(series) < 2:
        raise DataError(
            f"{records.name} has neither columns named by times, nor a column of times beside"
            f" several of numbers (its columns: {listed(columns)}); leave out `wide=True`"
        )
    roles = replace(request, series=_SERIES, time=time, target=(_TARGET,), past=(), ignore=())
    return _SeriesColumns(records, time, series), roles


class _SeriesColumns(_Reshaped):
    """A row for each series and time of a table with a column for each of the `series`."""

    def __init__(self, records: Records, time: str, series: list[str]) -> None:
        kind = records.schema.field(time).type
        super().__init__(records, [(_SERIES, pa.string()), (time, kind), (_TARGET, pa.float64())])
        self._time, self._series = time, series

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        schema, num, row = self._records.schema, len(self._series), 0
        asked = {self._time: types.get(self._time, schema.field(self._time).type)}
        asked |= {name: schema.field(name).type for name in self._series}
        for batch in self._records.batches(asked):
            rows = np.repeat(np.arange(len(batch)), num)
            which = np.tile(np.arange(num, dtype=np.int32), len(batch))
            numbers = _numbers(self._records, batch, self._series, row)
            columns = {
                _SERIES: pa.DictionaryArray.from_arrays(which, pa.array(self._series)),
                self._time: batch.column(self._time).take(pa.array(rows)),
                _TARGET: pa.array(numbers.ravel(), from_pandas=True),
            }
            row += len(batch)
            yield self._select(columns, list(types))


def _numbers(records: Records, batch: pa.RecordBatch, names: Sequence[str], row: int) -> Any:
    """Returns columns as a matrix of float64, NaN where a value is missing."""
    matrix = np.empty((len(batch), len(names)))
    for place, name in enumerate(names):
        column = batch.column(name)
        if is_text(column.type):
            column = numbers_of(with_nulls(column, records.null_words), records.name, name, row)
        matrix[:, place] = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    return matrix
