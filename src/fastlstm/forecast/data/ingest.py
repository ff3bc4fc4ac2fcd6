"""First pass over a table: writes its rows in the order they come and gathers statistics.

Numbers go to values.f32, times and series numbers to files beside it. Only one batch and the names
of series and categories are kept in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastlstm.errors import DataError, nearest_hint
from fastlstm.forecast.config import ReadOptions
from fastlstm.forecast.data.column_stats import ColumnStats, SeriesRanges
from fastlstm.forecast.data.names import Names, is_text, without_nan
from fastlstm.forecast.data.problems import Problems
from fastlstm.forecast.data.records import Records, damaged, numbers_of, with_nulls
from fastlstm.forecast.data.roles import Roles, listed, named_columns
from fastlstm.forecast.data.table import row_blocks
from fastlstm.forecast.data.time_reader import NUMBER_FORMATS, TimeReader
from fastlstm.forecast.data.timeline import Timeline
from fastlstm.system.prefetch import Prefetcher
from fastlstm.system.storage import append

SKIPPED = np.iinfo(np.int64).max
"""In place of the time of an empty row at an hour that clocks skip."""


def require_columns(options: ReadOptions, names: Sequence[str], origin: str) -> None:
    """Raises DataError if a code such as "humidity=-1" is for a column that is not in `names`."""
    for code in (*options.missing_value, *options.keep_value):
        column = code.rpartition("=")[0] if isinstance(code, str) else ""
        if column and not named_columns(column, names):
            raise DataError(
                f"{origin} has no column '{column}' (given as {code!r})"
                f"{nearest_hint(column, names)}; its columns: {listed(names)}"
            )


def codes_of(column: str, codes: Sequence[float | str], names: Sequence[str]) -> tuple[float, ...]:
    """Returns the codes that hold for a column of a table with the columns `names`."""
    pairs = [(c if isinstance(c, str) else f"={c}").rpartition("=") for c in codes]
    return tuple(
        float(code) for name, _, code in pairs if name == "" or column in named_columns(name, names)
    )


class TableIngest:
    """The rows of a table in files of `work`, in the order they come, and their statistics.

    `problems` collects errors of columns, whose values are then stored as missing. `like` is the
    timeline of a table that this one must match. `origins` are subtracted from the values, by
    column: one number, or one of each series.

    Attributes:
        values: file of (N, C) float32.
        times: file of (N,) int64: microseconds or whole numbers; None without a time column.
        codes: file of (N,) int32: the series number of each row; empty if `is_grouped`.
        num_rows: N; `num_skipped` of them are empty, at hours that clocks skip.
        is_grouped: the rows of every series are adjacent.
        columns: statistics by column; `static_columns` by static column, of one number per series.
        ranges: of every series, by column; empty without a column of series.
        statics: one number per series, by static column.
        series: names of the series by number; `counts` has their rows.
        categories: names by number, by categorical column.
        is_wall: times are local times of the zone, else UTC.
        repairs: notes on times that were changed; `notes` has the other findings.
        num_taken: values that are missing because they are codes, by column.
        value_of: columns that may have a code as a value, for codes that were asked about.
    """

    def __init__(
        self,
        work: Path,
        records: Records,
        roles: Roles,
        problems: Problems,
        options: ReadOptions,
        like: Timeline | None,
        origins: Mapping[str, float | NDArray[np.float64]],
    ) -> None:
        self.roles, self._records, self._problems = roles, records, problems
        self._name, self._is_parsed = records.name, records.is_parsed
        self.options, self._like = options, like
        names, own = records.schema.names, (*roles.values, *roles.static)
        self._missing = {name: codes_of(name, options.missing_value, names) for name in own}
        self.num_taken = dict.fromkeys(own, 0)
        self.value_of: dict[float, list[str]] = {}
        self.values, self.codes = work / "values.f32", work / "codes.i32"
        self.times = None if roles.time is None else work / "times.i64"
        self.num_rows, self.num_skipped, self.is_grouped, self._last_code = 0, 0, True, -1
        self.columns, self.static_columns = (
            {
                n: ColumnStats(codes_of(n, options.keep_value, names), origins.get(n, 0.0))
                for n in some
            }
            for some in (roles.values, roles.static)
        )
        numbers = () if roles.series is None else roles.values
        self.ranges = {n: SeriesRanges() for n in numbers if n not in roles.categorical}
        for name, stats in (self.columns | self.static_columns).items():
            stats.is_category = name in roles.categorical
        self.statics: dict[str, list[float]] = {name: [] for name in roles.static}
        self.series: list[Any] = [""]
        self.counts = np.zeros(0, dtype=np.int64)
        self.categories: dict[str, list[Any]] = {}
        self.time_zone: str | None = None
        self.has_clock, self.is_wall = True, False
        self.notes: list[str] = []
        self.repairs: list[str] = []
        self._series = self._names(roles.series)
        self._categories = {name: self._names(name) for name in roles.categorical}
        time, name = roles.time, records.name
        self._reader = None if time is None else TimeReader(time, name, options)
        self._files: dict[Path, FileIO] = {}

    def _names(self, column: str | None) -> Names:
        schema = self._records.schema
        return Names(schema.field(column).type if column and self._is_parsed else None)

    def run(self, on_progress: Callable[[int, int | None], None] | None) -> None:
        """Writes all rows; `on_progress` is called with bytes done and the total in bytes. Raises
        DataError: a row without series or time, or a damaged file."""
        with ExitStack() as files:
            for path in filter(None, (self.values, self.times, self.codes)):
                self._files[path] = files.enter_context(path.open("wb", buffering=0))
            batches = _batches(self._records, self._types())
            with closing(Prefetcher(batches, depth=2)) as prefetcher, suppress(StopIteration):
                while True:
                    batch, done_bytes = prefetcher.next()
                    if batch.num_rows:
                        self._add(batch)
                    if on_progress is not None:
                        on_progress(done_bytes, self._records.total_bytes)
        self._finish()

    def _append(self, path: Path, values: NDArray[Any]) -> None:
        if (file := self._files.get(path)) is not None:
            append(file, np.ascontiguousarray(values).data.cast("B"))

    def _types(self) -> dict[str, pa.DataType]:
        """Returns the columns to read, and the types that a CSV's are parsed as."""
        roles, types = self.roles, {}
        kinds = {field.name: field.type for field in self._records.schema}
        for name in (*roles.values, *roles.static):
            kind = kinds[name]
            if name in roles.categorical:
                types[name] = kind if pa.types.is_dictionary(kind) else pa.string()
            else:
                is_kept = is_text(kind) or pa.types.is_boolean(kind)
                types[name] = kind if is_kept else pa.float64()
        if roles.time is not None:
            is_number = self.options.time_format in (None, *NUMBER_FORMATS)
            types[roles.time] = kinds[roles.time] if is_number else pa.string()
        if roles.series is not None:  # 007 is not 7
            types[roles.series] = pa.string() if self._is_parsed else kinds[roles.series]
        return types

    def _add(self, batch: pa.RecordBatch) -> None:
        num, batch = batch.num_rows, without_views(batch)
        codes = self._codes(batch)
        rows = np.empty((num, len(self.roles.values)), dtype=np.float32)
        for position, name in enumerate(self.roles.values):
            values, stats = self._numbers(name, batch.column(name)), self.columns[name]
            stored = stats.stored(values, codes)
            rows[:, position] = stored
            if name in self.ranges:
                self.ranges[name].add(values, codes, len(self.counts))
            infinite = stats.add(values, stored)
            if infinite is not None:
                self._problems.add(self._infinite(name, infinite), name)
        self._add_statics(batch, codes)
        self._append(self.values, rows)
        if self.times is not None and self._reader is not None:
            column = self._without_null_words(batch.column(self._reader.name))
            self._refuse_nulls(column, self._reader.name, "time")
            is_empty = np.asarray(np.isnan(rows).all(1))
            times = self._reader.read(column, self.num_rows, codes, is_empty)
            self._append(self.times, times)
        self.num_rows += num

    def _infinite(self, name: str, row: int) -> DataError:
        return DataError(
            f"{self._name}: column '{name}' is infinite, or beyond float32, in row"
            f" {self.num_rows + row + 1}; leave missing values empty"
        )

    def _finish(self) -> None:
        for name, values in self.statics.items():
            numbers, stats = np.asarray(values, dtype=np.float64), self.static_columns[name]
            stats.add(numbers, stats.stored(numbers))
        if self.times is not None and self._reader is not None:
            if self.num_rows > 0:
                self.is_wall = self._reader.finish(self.times, self._like)
            if 0 < len(skipped := self._reader.skipped) < self.num_rows:
                np.memmap(self.times, dtype=np.int64, mode="r+")[skipped] = SKIPPED
                self.num_skipped = len(skipped)
            self.time_zone, self.has_clock = self._reader.time_zone, self._reader.has_clock
            self.notes += self._reader.notes()
            self.repairs += self._reader.repairs()
        named = dict(self._categories)
        if self.roles.series is not None:
            self.series = self._series.plain()
            named = {self.roles.series: self._series} | named
        self.categories = {name: names.plain() for name, names in self._categories.items()}
        for column, names in named.items():
            self.notes += names.notes(column)
            plain = map(str, names.plain() if self._is_parsed else ())
            if words := ", ".join(repr(name) for name in plain if name in self._records.null_words):
                self.notes.append(f"column '{column}': {words} is read as a name, not as missing")
        self._series, self._categories = Names(), {}  # of millions of names, once is enough

    def _codes(self, batch: pa.RecordBatch) -> NDArray[np.int32]:
        if self.roles.series is None:
            self.counts = np.array([self.num_rows + batch.num_rows])
            return np.zeros(batch.num_rows, dtype=np.int32)
        column = without_nan(batch.column(self.roles.series))
        self._refuse_nulls(column, self.roles.series, "series")
        codes = self._numbered(self._series, self.roles.series, column).astype(np.int32)
        is_grouped = int(codes[0]) >= self._last_code and bool((np.diff(codes) >= 0).all())
        if self.is_grouped and not is_grouped:
            self.is_grouped = False  # so far the codes follow from the counts
            for code, count in enumerate(self.counts.tolist()):
                for begin, end in row_blocks(0, count, 1):
                    self._append(self.codes, np.full(end - begin, code, dtype=np.int32))
        if not self.is_grouped:
            self._append(self.codes, codes)
        counts = np.bincount(codes, minlength=len(self._series))
        counts[: len(self.counts)] += self.counts
        self.counts = counts
        self._last_code = int(codes[-1])
        return codes

    def _numbered(self, names: Names, name: str, column: pa.Array) -> NDArray[np.int64]:
        try:
            return names.number(column)
        except (pa.ArrowException, ArithmeticError, ValueError) as error:  # ns without pandas
            raise DataError(
                f"{self._name}: column '{name}' is {column.type!s:.80}, which cannot be read as"
                f" names ({str(error).splitlines()[0]:.80}); convert them to text"
            ) from error

    def _numbers(self, name: str, column: pa.Array) -> NDArray[np.floating]:
        """Returns a column as float64, or float32 if it has that type."""
        if name in self.roles.categorical:
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
        codes = [v for code in self._missing[name] for v in (code, float(np.float32(code)))]
        if codes and (is_missing := np.isin(values, codes)).any():
            values = np.where(is_missing, np.nan, values)
            self.num_taken[name] += int(is_missing.sum())
        return values

    def _floats(self, name: str, column: pa.Array) -> NDArray[np.floating]:
        if isinstance(column, pa.DictionaryArray):
            column = column.dictionary_decode()
        kinds, kind = pa.types, column.type
        if is_text(kind):
            column = self._without_null_words(column)
            column = numbers_of(column, self._name, name, self.num_rows, self._is_parsed)
        elif kinds.is_boolean(kind) or kinds.is_decimal(kind) or kinds.is_null(kind):
            column = column.cast(pa.float64())
        elif not (kinds.is_floating(kind) or kinds.is_integer(kind)):
            raise DataError(f"{self._name}: column '{name}' is {kind}, expected numbers")
        values: NDArray[np.floating] = column.to_numpy(zero_copy_only=False)
        return values.astype(np.float32 if kinds.is_float32(kind) else np.float64, copy=False)

    def _without_null_words(self, column: pa.Array) -> pa.Array:
        is_csv_text = self._is_parsed and is_text(column.type)
        return with_nulls(column, self._records.null_words) if is_csv_text else column

    def _add_statics(self, batch: pa.RecordBatch, codes: NDArray[np.int32]) -> None:
        for name, statics in self.statics.items():
            values = self._numbers(name, batch.column(name))
            statics += [float("nan")] * (len(self.counts) - len(statics))
            for row in np.flatnonzero(np.diff(codes, prepend=-1)).tolist():
                if np.isnan(statics[codes[row]]):
                    statics[codes[row]] = float(values[row])
            if len(infinite := np.flatnonzero(np.isinf(values))):
                self._problems.add(self._infinite(name, int(infinite[0])), name)
            expected = np.asarray(statics, dtype=np.float64)[codes]
            differs = (values != expected) & ~(np.isnan(values) & np.isnan(expected))
            if differs.any():
                row = int(differs.argmax())
                series = "" if self.roles.series is None else self._series[codes[row]]
                error = DataError(
                    f"{self._name}: static column '{name}' changes within series '{series}', in"
                    f" row {self.num_rows + row + 1}; expected one value per series"
                )
                self._problems.add(error, name)

    def _refuse_nulls(self, column: pa.Array, name: str, what: str) -> None:
        if column.null_count:
            row = int(column.is_null().to_numpy(zero_copy_only=False).argmax())
            where = f"{self._name}: row {self.num_rows + row + 1} has no {what} ('{name}')"
            raise DataError(f"{where}; remove such rows, as subtotals are, from the file")


def without_views(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Returns a batch with string views (of polars) as plain strings, which can be compared."""
    columns = batch.columns
    for place, column in enumerate(columns):
        is_encoded = pa.types.is_dictionary(column.type)
        texts = column.dictionary if is_encoded else column
        if pa.types.is_string_view(texts.type):
            texts = texts.cast(pa.large_string())
            if is_encoded:
                texts = pa.DictionaryArray.from_arrays(column.indices, texts)
            columns[place] = texts
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _batches(
    records: Records, types: Mapping[str, pa.DataType]
) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yields a table's batches, each with the bytes read so far."""
    for batch in records.batches(types):
        try:
            batch.validate(full=True)  # a bad offset would read beyond the memory
        except pa.ArrowException as error:
            raise damaged(records.name, error) from error
        yield batch, records.done_bytes
