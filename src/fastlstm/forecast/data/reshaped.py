"""Tables as they come, reshaped to a row per series and time.

::

    Date;Time;y          country,1/1/2024,1/2/2024       ds,berlin,paris
    01/01/2024;18:00;3   spain,5,6                       2024-01-01,5,7

Times in several columns are joined by spaces. A wide table has a column per time, or a column per
series: each of its rows becomes several, with the columns unique_id, ds and y.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastlstm.errors import DataError
from fastlstm.forecast.config import ReadOptions
from fastlstm.forecast.data.csv_look import LOOK_HINT, are_dates, is_date, numbered
from fastlstm.forecast.data.names import is_text
from fastlstm.forecast.data.problems import CurableError, looks_like, settings
from fastlstm.forecast.data.records import (
    Records,
    numbers_of,
    require_distinct,
    with_nulls,
)
from fastlstm.forecast.data.roles import (
    RoleRequest,
    are_month_names,
    are_weeks,
    counters_of,
    find_time,
    is_number,
    listed,
    named_columns,
    steps_of_day,
)
from fastlstm.forecast.data.time_reader import TimeReader
from fastlstm.forecast.data.time_text import PERIODS, month_numbers, parts_of

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
HEAD_ROWS = 1 << 17
_SERIES, _TIME, _TARGET = "unique_id", "ds", "y"


def reshaped(
    records: Records, request: RoleRequest, options: ReadOptions
) -> tuple[Records, RoleRequest]:
    """Returns a table with one column of times and one of targets, and the roles of its columns.
    Raises DataError: a wide table without such columns, or one that looks wide without `wide`."""
    wide = options.wide
    require_distinct(records.schema.names, records.name)
    for label, mark in ((request.time, " "), (request.series, "/")):
        names = records.schema.names
        if label is None or label in names or (wide and mark == "/"):
            continue
        found = [named_columns(part, names) for part in parts_of(label)]
        columns = [some[0] for some in found if some]
        if 1 < len(columns) == len(found):
            if label == request.time and len(columns) == 2:  # "2015 W2", "2015 Q1"
                mark += PERIODS.get(columns[1].lower()) or _period(records, *columns)
            kept = {*request.future, *request.static, *(request.past or ()), *request.target}
            records = _Joined(records, label, columns, mark, kept, options)
    columns = [name for name in records.schema.names if name not in request.ignore]
    months, steps = _months(records, columns), _steps(records, columns)
    numbers = set(steps)
    others = [name for name in columns if name not in numbers]
    given = {*request.target, *(request.past or ()), *request.future, *request.static}
    is_by_time = bool(months) or are_dates(columns)
    if steps and not is_by_time and request.time is None and (wide or options.look):
        is_by_time = any(is_text(records.schema.field(n).type) for n in others) and (
            find_time(records, [name for name in others if name not in given]) is None
        )
    if not wide and is_by_time and options.look:
        what = f"a column for each {'month' if months else 'time'}"
        raise looks_like(records.name, [(what, {"wide": True})], LOOK_HINT)
    if not wide:
        return records, request
    return (_by_time if is_by_time else _by_series)(records, request, columns)


def _period(records: Records, year: str, part: str) -> str:
    """Returns W or M if columns are years and weeks or names of months, else ""."""
    texts = records.first_texts([year, part])
    if not texts or not all(map(str.isdecimal, texts[year].to_pylist())):
        return ""
    return "M" if are_month_names(texts[part]) else "W" * are_weeks(texts[part])


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


class _Joined(_Reshaped):
    """A table with a column of texts, `label`, made of the columns `parts`; these are left out,
    but for those `kept`. Of dates and numbers of half-hours it is one of times."""

    def __init__(
        self,
        records: Records,
        label: str,
        parts: list[str],
        mark: str,
        kept: Collection[str],
        options: ReadOptions,
    ) -> None:
        others = [(f.name, f.type) for f in records.schema if f.name not in {*parts} - {*kept}]
        texts = records.first_texts(parts) if mark == " " and len(parts) == 2 else {}
        self._num = steps_of_day(texts[parts[1]]) if texts else 0
        kind = pa.timestamp("us") if self._num else pa.string()
        super().__init__(records, [(label, kind), *others])
        self._label, self._parts, self._mark, self._options = label, parts, mark, options

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        asked = {name: kind for name, kind in types.items() if name != self._label}
        if self._label in types:
            own = self._records.schema
            kinds = {n: pa.string() if self.is_parsed else own.field(n).type for n in self._parts}
            asked = kinds | asked
        row = 0
        for batch in self._records.batches(asked):
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            if self._label in types:
                texts = [_text(columns[name]) for name in self._parts]
                if self._mark == " M":
                    texts[1] = month_numbers(texts[1])
                if self._mark == "/":  # so that no two keys have one name
                    texts = [pc.replace_substring_regex(t, r"[/\\]", r"\\\0") for t in texts]
                joined = pc.binary_join_element_wise(*texts, self._mark)
                columns[self._label] = self._starts(texts, row) if self._num else joined
            row += len(batch)
            yield pa.record_batch({name: columns[name] for name in types})

    def _starts(self, texts: list[pa.Array], row: int) -> pa.Array:
        """Returns the local starts of steps, which count from midnight on: a day in spring has 23
        hours, one in autumn 25."""
        (date, name), zone, num = self._parts, self._options.tz, self._num
        numbers = numbers_of(texts[1], self.name, name, row, self.is_parsed)
        is_there = np.asarray(pc.and_(texts[0].is_valid(), numbers.is_valid()))
        steps, most = numbers.fill_null(1).to_numpy() - 1, num * 25 // 24 if zone else num
        if (is_beyond := (steps < 0) | (steps >= most)).any():
            place = int(is_beyond.argmax())
            what = f"row {row + place + 1} has {name!r} {numbers[place]}, expected 1 to {most}"
            cure = ("days of 25 hours", {"tz": "Europe/London" if num == 48 else "Europe/Berlin"})
            more = f"; where clocks are put back, give their zone, such as {settings(cure[1])}"
            raise CurableError(f"{self.name}: {what}{'' if zone else more}", *[cure][: not zone])
        times = (steps * (86_400_000_000 // num)).astype(np.int64)
        if is_there.any():
            reader = TimeReader(date, self.name, replace(self._options, snap=None))
            times[is_there] += reader.read(texts[0].filter(pa.array(is_there)), row)
        found = pa.array(times, mask=~is_there).cast(pa.timestamp("us", zone))
        return pc.local_timestamp(found) if zone else found


def _text(column: pa.Array) -> pa.Array:
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.date32())
    return pc.utf8_trim_whitespace(column.cast(pa.string()))


def _by_time(
    records: Records, request: RoleRequest, columns: list[str]
) -> tuple[Records, RoleRequest]:
    """A row per series or year, a column per time or month; columns of text name the series."""
    months, steps = _months(records, columns), _steps(records, columns)
    times = months[1:] or steps or list(filter(is_date, columns))
    taken = {*times, *months}
    others = [name for name in columns if name not in taken]
    texts = [name for name in others if is_text(records.schema.field(name).type)]
    names = texts or others[: not months]
    if request.series:
        names = [_named(records, part, columns) for part in parts_of(request.series)]
    if months and not names:
        head = next(records.batches({months[0]: records.schema.field(months[0]).type}), None)
        if head is not None and len(pc.unique(head.column(0))) < len(head):  # several stations
            counters = counters_of(records, others, None)
            names = [name for name in others if name not in counters][:1]
    roles = replace(
        request, series=_SERIES if names else None, time=_TIME, target=(_TARGET,), past=(),
        static=(), ignore=(),
    )  # fmt: skip
    labels: list[Any] = times
    if months:
        labels = [f"-{month:02}-01" for month in range(1, 13)]
    elif times == steps:
        labels = [int("".join(filter(str.isdecimal, time))) for time in times]
    year = months[0] if months else None
    return _Long(records, times, pa.array(labels), names=names, year=year), roles


class _Long(_Reshaped):
    """A row for each series and time of a table with several in the columns `wide` of each row.

    These are of the times `labels`, or, with a column `time`, of series. The times may be months
    that follow the column `year`; `names` are the columns that name the series.
    """

    def __init__(
        self,
        records: Records,
        wide: list[str],
        labels: pa.Array,
        time: str | None = None,
        names: Sequence[str] = (),
        year: str | None = None,
    ) -> None:
        kind = labels.type if time is None else records.schema.field(time).type
        series = [] if year and not names else [(_SERIES, pa.string())]
        self._time_name = _TIME if time is None else time
        super().__init__(records, [*series, (self._time_name, kind), (_TARGET, pa.float64())])
        self._wide, self._labels, self._time = wide, labels, time
        self._names, self._year = names, year

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        own = [name for name in (self._time, self._year) if name is not None]
        read = [*self._names, *own, *self._wide]
        asked = {name: self._records.schema.field(name).type for name in read}
        asked |= dict.fromkeys(self._names, pa.string()) if self.is_parsed else {}
        asked |= {name: kind for name, kind in types.items() if name == self._time}
        row = 0
        for batch in self._records.batches(asked):
            rows = np.repeat(np.arange(len(batch), dtype=np.int32), len(self._wide))
            places = np.tile(np.arange(len(self._wide), dtype=np.int32), len(batch))
            if self._time is not None:
                series = pa.DictionaryArray.from_arrays(places, self._labels)
                times = batch.column(self._time).take(pa.array(rows))
            else:
                times = self._labels.take(pa.array(places))
                names = [pc.fill_null(batch.column(n).cast(pa.string()), "") for n in self._names]
                label = pa.array([""] * len(batch))
                if names:
                    label = pc.utf8_trim(pc.binary_join_element_wise(*names, "/"), "/")
                series = pa.DictionaryArray.from_arrays(rows, label)
            if self._year is not None:
                years = batch.column(self._year).cast(pa.string()).take(pa.array(rows))
                times = pc.binary_join_element_wise(years, times, "")
            target = pa.array(self._values(batch, row).ravel(), from_pandas=True)
            columns = {_SERIES: series, self._time_name: times, _TARGET: target}
            row += len(batch)
            yield pa.record_batch({name: columns[name] for name in types})

    def _values(self, batch: pa.RecordBatch, row: int) -> NDArray[np.float64]:
        """Returns the columns `wide` as a matrix, NaN where a value is missing."""
        values = np.empty((len(batch), len(self._wide)))
        for place, name in enumerate(self._wide):
            column = batch.column(name)
            if is_text(column.type):
                column = with_nulls(column, self.null_words)
                column = numbers_of(column, self.name, name, row, self.is_parsed)
            column = column.cast(pa.float64(), safe=False)
            values[:, place] = column.to_numpy(zero_copy_only=False)
        return values


def _steps(records: Records, columns: Sequence[str]) -> list[str]:
    """Returns the columns whose names count; the first may hold names of series: V1, V2 …."""
    steps = numbered(columns)
    return steps[bool(steps) and is_text(records.schema.field(steps[0]).type) :]


def _months(records: Records, columns: Sequence[str]) -> list[str]:
    """Returns the columns of the years and of January to December; none without all of them."""
    plain = {name.strip().lower()[:3]: name for name in columns if name.strip().isalpha()}
    months = [plain.get(name, "") for name in _MONTHS]
    year = next((n for n in columns if n.strip().lower() in ("year", "yr")), "")
    is_year = bool(year) and pa.types.is_integer(records.schema.field(year).type)
    return [year, *months] if all(months) and is_year else []


def _named(records: Records, name: str, columns: list[str]) -> str:
    """Returns the column of this name or number; raises DataError without one."""
    if found := named_columns(name, columns):
        return found[0]
    raise DataError(f"{records.name} has no column '{name}'; its columns: {listed(columns)}")


def _by_series(
    records: Records, request: RoleRequest, columns: list[str]
) -> tuple[Records, RoleRequest]:
    """A row per time and a column per series."""
    given = request.time
    time = _named(records, given, columns) if given else find_time(records, columns)
    others = {*columns} - {time} - counters_of(records, [n for n in columns if n != time], None)
    series = [n for n in columns if n in others and is_number(records.schema.field(n).type)]
    if time is None or len(series) < 2:
        raise DataError(
            f"{records.name} has neither columns named by times, nor a column of times beside"
            f" several of numbers (its columns: {listed(columns)}); leave out `wide=True`"
        )
    roles = replace(request, series=_SERIES, time=time, target=(_TARGET,), past=(), ignore=())
    return _Long(records, series, pa.array(series), time), roles


class Head(_Reshaped):
    """The first rows of a table, to try options on; its files are not kept in the cache."""

    def __init__(self, records: Records) -> None:
        super().__init__(records, list(records.schema))
        self.signature, self.jumps = None, records.jumps

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        num = 0
        for batch in self._records.batches(types):
            yield batch
            num += len(batch)
            if num >= HEAD_ROWS:
                return
