"""First pass over a table: rows are written as they come, and what they are is noted.

Numbers go to values.f32 row by row, times and the numbers of series beside them; nothing is kept
in memory but a batch and the names of series and categories.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastlstm.data.loader import Prefetcher
from fastlstm.errors import DataError
from fastlstm.series.clock import EPOCH_UNITS, TimeReader
from fastlstm.series.records import Records, first_text, is_text, text_in_numbers
from fastlstm.series.roles import Roles
from fastlstm.series.timeline import Timeline

SENTINELS = (-9999.0, -999.0, -99999.0, -999.9, -9999.9, 9999.0, 99999.0, 999999.0)
"""Numbers that stand for "no value" in many files; reported where they are the extreme."""

_ROWS = 1 << 20


@dataclass
class ColumnFacts:
    """What was seen of one column.

    Attributes:
        missing: rows without a value.
        low: the smallest value.
        high: the largest one.
        is_short: every value is a whole number that int16 holds.
        sentinels: how often a sentinel was the extreme of its batch, by value.
        is_category: values are numbers of names.
    """

    missing: int = 0
    low: float = float("inf")
    high: float = float("-inf")
    is_short: bool = True
    sentinels: dict[float, int] = field(default_factory=dict)
    is_category: bool = False

    def add(self, values: NDArray[np.float32]) -> int | None:
        """Takes a batch in; returns the first row that holds an infinity, or None."""
        if np.isfinite(values).all():
            finite = values
        else:
            infinite = np.flatnonzero(np.isinf(values))
            if len(infinite):
                return int(infinite[0])
            finite = values[~np.isnan(values)]
            self.missing += len(values) - len(finite)
        if len(finite):
            low, high = float(finite.min()), float(finite.max())
            self.low, self.high = min(self.low, low), max(self.high, high)
            for extreme in {low, high}:
                found = next((s for s in SENTINELS if np.float32(s) == extreme), None)
                if found is not None:
                    count = int(np.count_nonzero(finite == extreme))
                    self.sentinels[found] = self.sentinels.get(found, 0) + count
            if self.is_short:
                fits = low > -32768 and high < 32768
                self.is_short = fits and bool((finite == np.rint(finite)).all())
        return None


@dataclass(frozen=True)
class Intaken:
    """What the first pass found.

    Attributes:
        num_rows: N.
        values: file of (N, C) float32.
        times: file of (N,) int64, microseconds, or whole numbers; None without a time column.
        codes: file of (N,) int32, the number of each row's series; empty where they are grouped.
        series: names of the series, in the order they came.
        counts: rows of each series, shape ``(S,)``.
        is_grouped: the rows of every series stand together.
        facts: per column.
        statics: per static column one number per series; categories as their number.
        categories: names by categorical column, in the order of their numbers.
        time_zone: of the times, or None.
        has_clock: times are times; else whole numbers.
        is_wall: times are as the clocks of the zone show them, else UTC.
        notes: what people should hear of the times.
    """

    num_rows: int
    values: Path
    times: Path | None
    codes: Path
    series: list[Any]
    counts: NDArray[np.int64]
    is_grouped: bool
    facts: dict[str, ColumnFacts]
    statics: dict[str, list[float]]
    categories: dict[str, list[Any]]
    time_zone: str | None
    has_clock: bool
    is_wall: bool
    notes: list[str]


class Intake:
    """Takes batches in; a context manager, because files are open.

    Args:
        work: directory for the files.
        records: where the batches come from, for its schema and name.
        roles: of its columns.
        time_format: see `TimeReader`.
        missing_value: a number that stands for "no value".
        like: a table whose times these must agree with, or None.
    """

    def __init__(
        self,
        work: Path,
        records: Records,
        roles: Roles,
        time_format: str | None = None,
        missing_value: float | None = None,
        like: Timeline | None = None,
    ) -> None:
        self._work, self._roles, self._name = work, roles, records.name
        self._schema, self._time_format = records.schema, time_format
        self._is_parsed = records.is_parsed
        self._missing_value = missing_value
        self._facts = {
            name: ColumnFacts(is_category=name in roles.categorical) for name in roles.values
        }
        self._series: dict[Any, int] = {}
        self._counts: list[int] = []
        self._statics: dict[str, list[float]] = {name: [] for name in roles.static}
        self._categories: dict[str, dict[Any, int]] = {name: {} for name in roles.categorical}
        self._rows, self._last_code, self._is_grouped = 0, -1, True
        self._times = (
            None if roles.time is None else TimeReader(roles.time, self._name, time_format)
        )
        self._like = like
        self._files = {
            name: (work / name).open("wb") for name in ("values.f32", "times.i64", "codes.i32")
        }

    @property
    def types(self) -> dict[str, pa.DataType]:
        """The columns to read, and the types a CSV's are parsed as."""
        roles, found = self._roles, {}
        for name in (*roles.values, *roles.static):
            kind = self._schema.field(name).type
            if name in roles.categorical:
                found[name] = pa.string() if not pa.types.is_dictionary(kind) else kind
            else:
                is_kept = is_text(kind) or pa.types.is_boolean(kind)
                found[name] = kind if is_kept else pa.float32()
        for special in (roles.time, roles.series):
            if special is not None:
                found[special] = self._schema.field(special).type
        if roles.time is not None and self._time_format not in (None, *EPOCH_UNITS):
            found[roles.time] = pa.string()
        if roles.series is not None and self._is_parsed:
            found[roles.series] = pa.string()  # 007 is not 7
        return found

    def add(self, batch: pa.RecordBatch) -> None:
        """Writes a batch.

        Raises:
            DataError: text or an infinity among numbers, a row without series or time.
        """
        num = batch.num_rows
        if num == 0:
            return
        batch = without_views(batch)
        codes = self._codes(batch)
        rows = np.empty((num, len(self._roles.values)), dtype=np.float32)
        for position, name in enumerate(self._roles.values):
            column = self._numbers(name, batch.column(name))
            rows[:, position] = column
            bad = self._facts[name].add(column)
            if bad is not None:
                raise DataError(
                    f"{self._name}: column '{name}' is infinite in row {self._rows + bad + 1};"
                    " write an empty value where there is none"
                )
        self._add_statics(batch, codes)
        rows.tofile(self._files["values.f32"])
        if self._times is not None and self._roles.time is not None:
            column = batch.column(self._roles.time)
            self._refuse_nulls(column, self._roles.time, "time")
            self._times.read(column, self._rows).tofile(self._files["times.i64"])
        self._rows += num

    def finish(self) -> Intaken:
        """Returns what was found; the files are closed."""
        self.close()
        path, times = self._work / "times.i64", self._times
        is_wall = times is not None and self._rows > 0 and times.finish(path, self._like)
        return Intaken(
            num_rows=self._rows,
            values=self._work / "values.f32",
            times=None if times is None else path,
            codes=self._work / "codes.i32",
            series=_plain(self._series),
            counts=np.array(self._counts, dtype=np.int64),
            is_grouped=self._is_grouped,
            facts=self._facts,
            statics=self._statics,
            categories={name: _plain(found) for name, found in self._categories.items()},
            time_zone=None if times is None else times.time_zone,
            has_clock=times is None or times.has_clock,
            is_wall=is_wall,
            notes=[] if times is None else times.notes(),
        )

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Intake:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # columns ------------------------------------------------------------------------------------

    def _codes(self, batch: pa.RecordBatch) -> NDArray[np.int32]:
        if self._roles.series is None:
            if not self._counts:
                self._series[""] = 0
                self._counts.append(0)
            self._counts[0] += batch.num_rows
            return np.zeros(batch.num_rows, dtype=np.int32)
        column = batch.column(self._roles.series)
        self._refuse_nulls(column, self._roles.series, "series")
        codes = _numbered(column, self._series).astype(np.int32)
        is_grouped = int(codes[0]) >= self._last_code and bool((np.diff(codes) >= 0).all())
        if self._is_grouped and not is_grouped:
            self._write_codes()
            self._is_grouped = False
        if not self._is_grouped:
            codes.tofile(self._files["codes.i32"])
        self._counts += [0] * (len(self._series) - len(self._counts))
        counts = np.bincount(codes)
        for code in np.flatnonzero(counts).tolist():
            self._counts[code] += int(counts[code])
        self._last_code = int(codes[-1])
        return codes

    def _write_codes(self) -> None:
        """Writes the codes of the rows so far, which needed none: their series stood together."""
        for code, count in enumerate(self._counts):
            for first in range(0, count, _ROWS):
                part = np.full(min(_ROWS, count - first), code, dtype=np.int32)
                part.tofile(self._files["codes.i32"])

    def _numbers(self, name: str, column: pa.Array) -> NDArray[np.float32]:
        if name in self._roles.categorical:
            codes = _numbered(column, self._categories[name]).astype(np.float32)
            if column.null_count:
                codes[column.is_null().to_numpy(zero_copy_only=False)] = np.nan
            return codes
        if isinstance(column, pa.DictionaryArray):
            column = column.dictionary_decode()
        kind = column.type
        if is_text(kind):
            text = first_text(column)
            if text is not None:
                raise text_in_numbers(self._name, name, self._rows + text[0], text[1])
            column = pc.utf8_trim_whitespace(column).cast(pa.float32())
        elif pa.types.is_boolean(kind) or pa.types.is_decimal(kind):
            column = column.cast(pa.float64())
        elif not (
            pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind)
        ):
            raise DataError(f"{self._name}: column '{name}' is {kind}, expected numbers")
        if pa.types.is_null(kind):
            return np.full(len(column), np.nan, dtype=np.float32)
        with np.errstate(over="ignore"):  # what float32 cannot hold is found as infinite
            values: NDArray[np.float32] = column.to_numpy(zero_copy_only=False).astype(
                np.float32, copy=False
            )
        if self._missing_value is not None:
            is_missing = values == np.float32(self._missing_value)
            if is_missing.any():
                values = np.where(is_missing, np.float32(np.nan), values)
        return values

    def _add_statics(self, batch: pa.RecordBatch, codes: NDArray[np.int32]) -> None:
        for name, known in self._statics.items():
            values = self._numbers(name, batch.column(name))
            first = np.flatnonzero(np.diff(codes, prepend=-1))
            known += [float("nan")] * (len(self._series) - len(known))
            for row in first.tolist():
                if np.isnan(known[codes[row]]):
                    known[codes[row]] = float(values[row])
            expected = np.asarray(known, dtype=np.float32)[codes]
            differs = (values != expected) & ~(np.isnan(values) & np.isnan(expected))
            if differs.any():
                row = int(np.flatnonzero(differs)[0])
                series = list(self._series)[codes[row]]
                raise DataError(
                    f"{self._name}: static column '{name}' changes within series '{series}', in"
                    f" row {self._rows + row + 1}; one value per series was expected"
                )

    def _refuse_nulls(self, column: pa.Array, name: str, what: str) -> None:
        if column.null_count:
            row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise DataError(f"{self._name}: row {self._rows + row + 1} has no {what} ('{name}')")


def _plain(names: dict[Any, int]) -> list[Any]:
    """Returns names as JSON has them."""
    return [n if isinstance(n, str | int | float | bool) else str(n) for n in names]


def _numbered(column: pa.Array, known: dict[Any, int]) -> NDArray[np.int64]:
    """Returns the number of every value, in the order values come; new ones are added to `known`.

    A null's number means nothing.
    """
    if not isinstance(column, pa.DictionaryArray):
        column = column.dictionary_encode()
    indices = column.indices.fill_null(0) if column.null_count else column.indices
    places = indices.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    if len(column.dictionary) == 0:  # nothing but nulls
        return np.zeros(len(places), dtype=np.int64)
    starts = places[np.flatnonzero(np.diff(places, prepend=-1))]
    used, first = np.unique(starts, return_index=True)
    used = used[np.argsort(first)]
    numbers = np.zeros(len(column.dictionary), dtype=np.int64)
    names = column.dictionary.take(pa.array(used)).to_pylist()
    numbers[used] = [known.setdefault(name, len(known)) for name in names]
    return np.asarray(numbers[places])


def without_views(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Returns a batch whose texts are plain: views, as polars has them, cannot be compared."""
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
    """A table's batches, each with the bytes read so far; they are read once, from the start."""

    def __init__(self, records: Records, types: dict[str, pa.DataType]) -> None:
        self._records, self._batches = records, records.batches(types)

    def __next__(self) -> tuple[pa.RecordBatch, int]:
        return next(self._batches), self._records.done_bytes

    def state_dict(self) -> dict[str, int]:
        return {}


def take_in(
    records: Records, intake: Intake, on_progress: Callable[[int, int | None], None] | None
) -> Intaken:
    """Reads all batches, the next one while one is written; `on_progress` hears bytes done, in all.

    Arrow and the disk both work without holding Python's lock.
    """
    with intake, Prefetcher(_Batches(records, intake.types), depth=2) as ahead:
        while True:
            try:
                batch, done_bytes = ahead.next()
            except StopIteration:
                return intake.finish()
            intake.add(batch)
            if on_progress is not None:
                on_progress(done_bytes, records.total_bytes)
