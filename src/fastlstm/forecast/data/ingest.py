"""First pass over a table: writes its rows in the order they come and gathers statistics.

Numbers go to values.f32, times and series numbers to files beside it. Only one batch and the names
of series and categories are kept in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastlstm.errors import DataError
from fastlstm.forecast.data.column_stats import ColumnStats
from fastlstm.forecast.data.names import Names, without_nan
from fastlstm.forecast.data.problems import Problems
from fastlstm.forecast.data.records import (
    NULL_WORDS,
    Records,
    damaged,
    is_text,
    numbers_of,
    without_null_words,
)
from fastlstm.forecast.data.roles import Roles
from fastlstm.forecast.data.time_reader import EPOCH_UNITS, TimeReader
from fastlstm.forecast.data.timeline import Timeline
from fastlstm.system.prefetch import Prefetcher
from fastlstm.system.storage import append

_ROWS = 1 << 20


@dataclass(frozen=True)
class Codes:
    """Sentinel values.

    Attributes:
        missing: numbers that mean "no value".
        kept: numbers that look like sentinels but are values.
    """

    missing: tuple[float, ...] = ()
    kept: tuple[float, ...] = ()


@dataclass(frozen=True)
class IngestResult:
    """Result of the first pass.

    Attributes:
        num_rows: N.
        values: file of (N, C) float32.
        times: file of (N,) int64: microseconds or whole numbers; None without a time column.
        codes: file of (N,) int32: each row's series number; empty if `is_grouped`.
        series: names of the series in order of first appearance.
        counts: rows of each series, shape ``(S,)``.
        is_grouped: the rows of every series are adjacent.
        columns: statistics by column.
        static_columns: statistics by static column, over one number per series.
        statics: one number per series, by static column; categories as their number.
        categories: names by number, by categorical column.
        time_zone: of the times, or None.
        has_clock: times are dates and times; else whole numbers.
        is_wall: times are local times of the zone, else UTC.
        notes: findings about times and names.
    """

    num_rows: int
    values: Path
    times: Path | None
    codes: Path
    series: list[Any]
    counts: NDArray[np.int64]
    is_grouped: bool
    columns: dict[str, ColumnStats]
    static_columns: dict[str, ColumnStats]
    statics: dict[str, list[float]]
    categories: dict[str, list[Any]]
    time_zone: str | None
    has_clock: bool
    is_wall: bool
    notes: list[str]


class TableIngest:
    """The files of a table, and the statistics of what was written to them.

    Args:
        work: directory of the files.
        records: source of the batches.
        roles: of its columns.
        problems: collects errors of columns, whose values are then stored as missing.
        time_format: see `TimeReader`.
        codes: sentinel values.
        like: timeline of a table that this one must match, or None.
        origins: subtracted from the values, by column; default 0.
    """

    def __init__(
        self,
        work: Path,
        records: Records,
        roles: Roles,
        problems: Problems,
        time_format: str | None,
        codes: Codes,
        like: Timeline | None,
        origins: Mapping[str, float],
    ) -> None:
        self._work, self._roles, self._records = work, roles, records
        self._name, self._is_parsed = records.name, records.is_parsed
        self._problems, self._time_format, self._like = problems, time_format, like
        self._missing = sorted({float(m) for v in codes.missing for m in (v, np.float32(v))})
        self._columns = {
            name: ColumnStats(
                codes.kept, origins.get(name, 0.0), is_category=name in roles.categorical
            )
            for name in (*roles.values, *roles.static)
        }
        self._series = self._names(roles.series)
        self._counts: list[int] = []
        self._statics: dict[str, list[float]] = {name: [] for name in roles.static}
        self._categories = {name: self._names(name) for name in roles.categorical}
        self._rows, self._last_code, self._is_grouped = 0, -1, True
        self._times = (
            None if roles.time is None else TimeReader(roles.time, self._name, time_format)
        )
        self._files: dict[str, FileIO] = {}

    def _names(self, column: str | None) -> Names:
        return Names(
            self._records.schema.field(column).type if column and self._is_parsed else None
        )

    def run(self, on_progress: Callable[[int, int | None], None] | None) -> IngestResult:
        """Writes all rows; a thread reads the next batch meanwhile.

        Args:
            on_progress: called with bytes done and the total in bytes, or None.

        Raises:
            DataError: a row without series or time, or a damaged file.
        """
        batches = _Batches(self._records, self._types())
        with ExitStack() as files, Prefetcher(batches, depth=2) as prefetcher:
            for name in ("values.f32", "times.i64", "codes.i32"):
                file = (self._work / name).open("wb", buffering=0)
                self._files[name] = files.enter_context(file)
            while True:
                try:
                    batch, done_bytes = prefetcher.next()
                except StopIteration:
                    break
                self._add(batch)
                if on_progress is not None:
                    on_progress(done_bytes, self._records.total_bytes)
        return self._result()

    def _append(self, name: str, values: NDArray[Any]) -> None:
        append(self._files[name], np.ascontiguousarray(values).data.cast("B"))

    def _types(self) -> dict[str, pa.DataType]:
        """Returns the columns to read, and the types that a CSV's are parsed as."""
        roles, types = self._roles, {}
        kinds = {field.name: field.type for field in self._records.schema}
        for name in (*roles.values, *roles.static):
            kind = kinds[name]
            if name in roles.categorical:
                types[name] = kind if pa.types.is_dictionary(kind) else pa.string()
            else:
                is_kept = is_text(kind) or pa.types.is_boolean(kind)
                types[name] = kind if is_kept else pa.float64()
        if roles.time is not None:
            is_number = self._time_format in (None, *EPOCH_UNITS)
            types[roles.time] = kinds[roles.time] if is_number else pa.string()
        if roles.series is not None:  # 007 is not 7
            types[roles.series] = pa.string() if self._is_parsed else kinds[roles.series]
        return types

    def _add(self, batch: pa.RecordBatch) -> None:
        num = batch.num_rows
        if num == 0:
            return
        batch = without_views(batch)
        codes = self._codes(batch)
        rows = np.empty((num, len(self._roles.values)), dtype=np.float32)
        for position, name in enumerate(self._roles.values):
            values, column = self._numbers(name, batch.column(name)), self._columns[name]
            stored = column.stored(values)
            rows[:, position] = stored
            infinite = column.add(values, stored)
            if infinite is not None:
                self._problems.add(self._infinite(name, infinite), name)
        self._add_statics(batch, codes)
        self._append("values.f32", rows)
        if self._times is not None and self._roles.time is not None:
            column = self._without_null_words(batch.column(self._roles.time))
            self._refuse_nulls(column, self._roles.time, "time")
            self._append("times.i64", self._times.read(column, self._rows))
        self._rows += num

    def _infinite(self, name: str, row: int) -> DataError:
        return DataError(
            f"{self._name}: column '{name}' is infinite, or beyond float32, in row"
            f" {self._rows + row + 1}; leave missing values empty"
        )

    def _result(self) -> IngestResult:
        for name, known in self._statics.items():
            values = np.asarray(known, dtype=np.float64)
            self._columns[name].add(values, self._columns[name].stored(values))
        path, times = self._work / "times.i64", self._times
        is_wall = times is not None and self._rows > 0 and times.finish(path, self._like)
        return IngestResult(
            num_rows=self._rows,
            values=self._work / "values.f32",
            times=None if times is None else path,
            codes=self._work / "codes.i32",
            series=self._series.plain() if self._roles.series is not None else [""],
            counts=np.array(self._counts, dtype=np.int64),
            is_grouped=self._is_grouped,
            columns={name: self._columns[name] for name in self._roles.values},
            static_columns={name: self._columns[name] for name in self._roles.static},
            statics=self._statics,
            categories={name: names.plain() for name, names in self._categories.items()},
            time_zone=None if times is None else times.time_zone,
            has_clock=times is None or times.has_clock,
            is_wall=is_wall,
            notes=self._notes(),
        )

    def _notes(self) -> list[str]:
        notes = [] if self._times is None else self._times.notes()
        named = {} if self._roles.series is None else {self._roles.series: self._series}
        for column, names in (named | self._categories).items():
            notes += names.notes(column)
            plain = map(str, names.plain() if self._is_parsed else ())
            if words := ", ".join(repr(name) for name in plain if name in NULL_WORDS):
                notes.append(f"column '{column}': {words} is read as a name, not as missing")
        return notes

    def _codes(self, batch: pa.RecordBatch) -> NDArray[np.int32]:
        if self._roles.series is None:
            self._counts = [self._rows + batch.num_rows]
            return np.zeros(batch.num_rows, dtype=np.int32)
        column = without_nan(batch.column(self._roles.series))
        self._refuse_nulls(column, self._roles.series, "series")
        codes = self._numbered(self._series, self._roles.series, column).astype(np.int32)
        is_grouped = int(codes[0]) >= self._last_code and bool((np.diff(codes) >= 0).all())
        if self._is_grouped and not is_grouped:
            self._write_codes()
            self._is_grouped = False
        if not self._is_grouped:
            self._append("codes.i32", codes)
        self._counts += [0] * (len(self._series) - len(self._counts))
        counts = np.bincount(codes)
        for code in np.flatnonzero(counts).tolist():
            self._counts[code] += int(counts[code])
        self._last_code = int(codes[-1])
        return codes

    def _write_codes(self) -> None:
        """Writes the codes of all rows so far, which were grouped by series."""
        for code, count in enumerate(self._counts):
            for first in range(0, count, _ROWS):
                part = np.full(min(_ROWS, count - first), code, dtype=np.int32)
                self._append("codes.i32", part)

    def _numbered(self, names: Names, name: str, column: pa.Array) -> NDArray[np.int64]:
        try:
            return names.number(column)
        except (pa.ArrowException, ArithmeticError) as error:
            raise DataError(
                f"{self._name}: column '{name}' is {column.type!s:.80}, which cannot be read as"
                f" names ({str(error).splitlines()[0]:.80}); convert them to text"
            ) from error

    def _numbers(self, name: str, column: pa.Array) -> NDArray[np.floating]:
        """Returns a column as float64, or float32 if it has that type."""
        if name in self._roles.categorical:
            column = without_nan(column)
            numbers = self._numbered(self._categories[name], name, column).astype(np.float64)
            if column.null_count:
                numbers[column.is_null().to_numpy(zero_copy_only=False)] = np.nan
            return numbers
        try:
            values = self._floats(name, column)
        except DataError as error:
            self._problems.add(error, name)
            return np.full(len(column), np.nan)
        if self._missing and (is_missing := np.isin(values, self._missing)).any():
            values = np.where(is_missing, np.nan, values)
        return values

    def _floats(self, name: str, column: pa.Array) -> NDArray[np.floating]:
        if isinstance(column, pa.DictionaryArray):
            column = column.dictionary_decode()
        kinds, kind = pa.types, column.type
        if is_text(kind):
            column = self._without_null_words(column)
            column = numbers_of(column, self._name, name, self._rows)
        elif kinds.is_boolean(kind) or kinds.is_decimal(kind) or kinds.is_null(kind):
            column = column.cast(pa.float64())
        elif not (kinds.is_floating(kind) or kinds.is_integer(kind)):
            raise DataError(f"{self._name}: column '{name}' is {kind}, expected numbers")
        values: NDArray[np.floating] = column.to_numpy(zero_copy_only=False)
        return values.astype(np.float32 if kinds.is_float32(kind) else np.float64, copy=False)

    def _without_null_words(self, column: pa.Array) -> pa.Array:
        is_csv_text = self._is_parsed and is_text(column.type)
        return without_null_words(column) if is_csv_text else column

    def _add_statics(self, batch: pa.RecordBatch, codes: NDArray[np.int32]) -> None:
        for name, known in self._statics.items():
            values = self._numbers(name, batch.column(name))
            first = np.flatnonzero(np.diff(codes, prepend=-1))
            known += [float("nan")] * (len(self._counts) - len(known))
            for row in first.tolist():
                if np.isnan(known[codes[row]]):
                    known[codes[row]] = float(values[row])
            if len(infinite := np.flatnonzero(np.isinf(values))):
                self._problems.add(self._infinite(name, int(infinite[0])), name)
            expected = np.asarray(known, dtype=np.float64)[codes]
            differs = (values != expected) & ~(np.isnan(values) & np.isnan(expected))
            if differs.any():
                row = int(np.flatnonzero(differs)[0])
                series = "" if self._roles.series is None else self._series[codes[row]]
                error = DataError(
                    f"{self._name}: static column '{name}' changes within series '{series}', in"
                    f" row {self._rows + row + 1}; expected one value per series"
                )
                self._problems.add(error, name)

    def _refuse_nulls(self, column: pa.Array, name: str, what: str) -> None:
        if column.null_count:
            row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise DataError(f"{self._name}: row {self._rows + row + 1} has no {what} ('{name}')")


def without_views(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Returns a batch with string views (of polars) as plain strings, which can be compared."""
    for place, field_ in enumerate(batch.schema):
        column, kind = batch.column(place), field_.type
        if pa.types.is_dictionary(kind) and pa.types.is_string_view(kind.value_type):
            names = column.dictionary.cast(pa.large_string())
            column = pa.DictionaryArray.from_arrays(column.indices, names)
        elif pa.types.is_string_view(kind):
            column = column.cast(pa.large_string())
        else:
            continue
        batch = batch.set_column(place, field_.name, column)
    return batch


class _Batches:
    """A table's batches, each with the bytes read so far."""

    def __init__(self, records: Records, types: dict[str, pa.DataType]) -> None:
        self._records, self._batches = records, records.batches(types)

    def __next__(self) -> tuple[pa.RecordBatch, int]:
        batch = next(self._batches)
        try:
            batch.validate(full=True)  # a bad offset would read beyond the memory
        except pa.ArrowException as error:
            raise damaged(self._records.name, error) from error
        return batch, self._records.done_bytes

    def state_dict(self) -> dict[str, int]:
        return {}
