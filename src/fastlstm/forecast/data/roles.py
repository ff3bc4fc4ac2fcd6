"""The role of each column: time, series, target, past, future, static, categorical."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastlstm.errors import DataError, nearest_hint
from fastlstm.forecast.config import ReadOptions
from fastlstm.forecast.data.csv_look import are_categories, usual_kind
from fastlstm.forecast.data.names import is_text
from fastlstm.forecast.data.problems import CurableError, Problems, looks_like, merged, settings
from fastlstm.forecast.data.records import NUMBER, Records, numbers_of, require_few, with_nulls
from fastlstm.forecast.data.time_reader import TimeReader, refuse_unread_time
from fastlstm.forecast.data.time_text import (
    PERIODS,
    YEAR_NAMES,
    are_mostly_times,
    are_times,
    finding_of_format,
    formats_of,
    month_numbers,
    parts_of,
)
from fastlstm.forecast.data.timeline import Timeline

TIME_NAMES = ("ds", "date", "datetime", "timestamp", "time")
SERIES_NAMES = ("unique_id", "series_id", "item_id")
_TARGET = re.compile("val|sale|unit|count|cnt|qty|quant|demand|load|close|case|revenue", re.I)
_PLACE = re.compile("^(lat|lon|elev|alt|id$|index|year|month|day|code|num)|(_id|_nbr|_num)$", re.I)
"""Columns that are probably forecast, and others that are not."""
CODE = re.compile("(^|_)(id|nbr|no|nr|num|code|key)$", re.I)
TARGET_NAMES = ("y", "target")
COUNTERS = ("", "Unnamed: 0", "__index_level_0__", "__null_dask_index__")
"""Row counters that tools write; ignored unless named."""
_COUNTER = re.compile(
    r"unnamed.*|(.*[_ ])?id|index|idx|#|no\.?|nr\.?|s\.? ?no\.?"
    r"|(row|record|rec|line|obs|seq)[_ .]?(no|nr|num|number|names?)?\.?",
    re.I,
)
"""Names of columns that are ignored if they count rows."""
_FEWEST_COUNTED, _COUNTED = 3, 0.95
"""Rows from which a column may count them, and the share of steps of one: loggers skip records."""
RESERVED = ("cutoff", "forecast", "segment")
"""Columns that forecasts and backtests add to their tables."""
_FEWEST_IN_RUN = 10
"""Rows of each number from which a column of runs names series."""
LISTS = ("target", "past", "future", "static", "categorical", "ignore")
"""Roles of any number of columns."""
_PARTS = (
    YEAR_NAMES,
    ("month", "mon", "mo", "monat", "mois", "mes", "mese", "mês", "maand"),
    ("day", "dy", "tag", "jour", "día", "dia", "giorno", "dag"),
    ("hour", "hr", "stunde", "heure", "hora", "ora", "uur"),
)
"""Names of columns that are parts of a time."""
_TIMES = {name for names in _PARTS for name in names} | {*PERIODS}
_OF_DAY = re.compile("period|hour|slot|interval", re.I)
"""Names of numbers that count steps within a day."""
_START = re.compile("start|begin|from|von|anfang|d[ée]but|inicio|inizio", re.I)
"""Names of clock times that have an end beside them."""
_NUMBER = rf"^\s*{NUMBER}\s*$"
_KEY_ROWS, _KEY_COLUMNS, _KEY_CHOICES = 1 << 17, 4, 6
_MAX_LISTED = 40
_MAX_PARTS = 8
"""Columns of whole numbers that are looked at for years and weeks."""


@dataclass(frozen=True)
class RoleRequest:
    """Roles given by the user, as in `ForecastConfig`; `find_roles` chooses the others.

    A table of future covariates has no target: `has_target` is False.
    """

    target: tuple[str, ...] = ()
    time: str | None = None
    series: str | None = None
    past: tuple[str, ...] | None = None
    future: tuple[str, ...] = ()
    static: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    has_target: bool = True


@dataclass(frozen=True)
class Roles:
    """The columns of a table by role, as in `RoleRequest`.

    Attributes:
        time: None if rows are counted.
        series: None for a single series.
        notes: choices made for the user, a line each.
        dropped: columns that are not numbers and have no role, other than row counters.
    """

    target: tuple[str, ...]
    time: str | None
    series: str | None
    past: tuple[str, ...]
    future: tuple[str, ...]
    static: tuple[str, ...]
    categorical: tuple[str, ...]
    notes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    @property
    def values(self) -> tuple[str, ...]:
        """The columns that a table stores row by row: target, past, future."""
        return (*self.target, *self.past, *self.future)


def find_roles(
    records: Records, request: RoleRequest, problems: Problems, like: Timeline | None = None
) -> Roles:
    """Chooses the role of every column; `problems` collects errors of missing columns.

    Reads the first rows if no column is called or typed a time, or one may count rows.

    Raises:
        DataError: two roles for one column, no target, a missing column of target, time or series,
            too many columns, or texts that look like times in an unknown format.
    """
    schema, origin, names = records.schema, records.name, records.schema.names
    require_few(names, origin)
    request = _existing(names, request, origin, problems)
    assigned = {name for role in LISTS for name in _columns(request, role)}
    free = [name for name in names if name not in assigned and name != request.time]
    series = request.series or _first(SERIES_NAMES, free)
    time = request.time or _time_like(records, [name for name in free if name != series], like)
    counters = counters_of(records, [name for name in free if name not in (series, time)], series)
    usable_numbers = {f.name for f in schema if is_number(f.type)} - counters
    taken = {time, series, *assigned.difference(request.target)}
    target, notes = request.target, []
    if not target and request.has_target:
        named = _first(TARGET_NAMES, [name for name in names if name not in taken])
        others = [name for name in names if name in usable_numbers and name not in taken]
        target = (named,) if named else tuple(others if series is None or not others[1:] else ())
        if not target:
            _refuse_numbers(records, [name for name in names if name not in taken], problems)
            problems.raise_all()
            raise _no_target(names, others, origin, sorted(filter(None, counters & {*names}))[:1])
        if not named:
            notes.append(f"target: all numbers, {listed(target)}")
    taken |= set(target)
    others = [name for name in names if name not in taken]
    past = request.past
    if past is None:
        covariates = usable_numbers.intersection(others)
        covariates |= set(request.categorical) - {*target, *request.future, *request.static}
        past = tuple(name for name in names if name in covariates)
        if past:
            notes.append(f"past covariates: {listed(past)}")
    if time is None and series is None and request.has_target:
        read = {*target, *past} - counters
        _refuse_runs(records, [name for name in free if name in read])
    taken |= set(past)
    if ignored := [name for name in others if name not in taken and name not in request.ignore]:
        if request.has_target and (request.past is None or not request.target):
            _refuse_numbers(records, ignored, problems)
        if unused := [name for name in ignored if name in usable_numbers]:
            notes.append(f"ignored columns (not among the past covariates given): {listed(unused)}")
        if counting := [repr(name) for name in ignored if name in counters]:
            notes.append(f"ignored columns (row counters): {', '.join(counting)}")
    roles = Roles(
        target, time, series, past, request.future, request.static, request.categorical,
        tuple(notes), tuple(n for n in ignored if n not in counters and n not in usable_numbers),
    )  # fmt: skip
    _check_roles(roles, origin)
    return roles


def counters_of(records: Records, names: Sequence[str], series: str | None) -> set[str]:
    """Returns `COUNTERS` and the columns of such names that count rows by one, in all or of each
    series."""
    kinds = {name: records.schema.field(name).type for name in names if _COUNTER.fullmatch(name)}
    types = {n: k for n, k in kinds.items() if pa.types.is_integer(k) or pa.types.is_floating(k)}
    own = [] if series is None else [series]
    if not types:
        return {*COUNTERS}
    batch = next(records.batches(types | {n: records.schema.field(n).type for n in own}), None)
    if batch is None or len(batch) < _FEWEST_COUNTED:
        return {*COUNTERS}
    orders = [slice(None), *(np.argsort(_codes(batch.column(n)), kind="stable") for n in own)]
    values = {n: batch.column(n).to_numpy(zero_copy_only=False).astype(float) for n in types}
    steps = {n: [np.diff(values[n][order]) for order in orders] for n in types}
    signs = (-1, 1)
    counting = (
        name
        for name in types
        if any(np.mean(step == sign) > _COUNTED for step in steps[name] for sign in signs)
    )
    return {*COUNTERS, *counting}


def _refuse_runs(records: Records, names: Sequence[str]) -> None:
    """Refuses whole numbers that name series: each in equally many rows, one after the other."""
    kinds = {name: records.schema.field(name).type for name in names if name.lower() not in _TIMES}
    kinds = {name: kind for name, kind in kinds.items() if pa.types.is_integer(kind)}
    batches = (batch.columns for batch in records.batches(kinds)) if kinds else iter(())
    for name, codes in zip(kinds, map(_codes, next(batches, ())), strict=False):
        begins = np.flatnonzero(np.diff(codes, prepend=-2))
        *lengths, last = np.diff(begins, append=len(codes)).tolist() or [0]
        is_even = len({*lengths}) == 1 and lengths[0] >= max(last, _FEWEST_IN_RUN)
        is_even = is_even and len(begins) == len(np.unique(codes))
        if is_even and (lengths[1:] or last == lengths[0]):  # the first rows may end within a run
            what = f"{lengths[0]} rows for each number of {name!r}"
            raise CurableError(
                f"{records.name}: there are {what}, one after another, and no times: if these"
                f" are series, give `series={name!r}`, else `categorical={name!r}` or"
                f" `ignore={name!r}`",
                (what, {"series": name}),
            )


def series_key(records: Records, request: RoleRequest, roles: Roles, options: ReadOptions) -> str:
    """Returns the fewest columns, joined by commas, in whose combinations no time comes twice, or a
    hundredth as often as without them, and most times are one step apart, as the first rows show;
    "" without any."""
    if roles.time is None:
        return ""
    base = parts_of(roles.series) if roles.series else []
    target = request.target if roles.target[1:] else roles.target  # a key may be one of many
    taken = {roles.time, roles.series, *base, *target, *request.future, *COUNTERS}
    kinds = {f.name: f.type for f in records.schema if f.name not in taken}
    likely = [n for n, k in kinds.items() if is_text(k) or pa.types.is_dictionary(k)]
    likely += [n for n, k in kinds.items() if pa.types.is_integer(k) and not _OF_DAY.search(n)]
    likely = likely[:_MAX_LISTED]
    own = base if {*base} <= {*records.schema.names} else [str(roles.series)]  # joined already
    types = {n: records.schema.field(n).type for n in (roles.time, *own, *likely)}
    batch = next(records.batches(types)).slice(0, _KEY_ROWS)
    texts = batch.column(roles.time)
    texts = with_nulls(texts, records.null_words) if is_text(texts.type) else texts
    reader = TimeReader(roles.time, records.name, replace(options, tz=None))  # local ones will do
    times = reader.read(texts, 0)
    codes = {name: _codes(batch.column(name)) for name in (*own, *likely)}
    likely = [name for name in likely if 1 < len(np.unique(codes[name])) <= len(times) / 2][
        :_KEY_CHOICES
    ]
    most_shared = (np.diff(np.sort(times)) == 0).sum() / 100
    for count in range(0 if base else 1, _KEY_COLUMNS):
        for more in combinations(likely, count):
            keys = [codes[name] for name in (*own, *more)]
            order = np.lexsort((times, *keys))
            is_same = ~np.any([np.diff(key[order]) for key in keys], axis=0)
            steps = np.diff(times[order])[is_same]
            usual = np.unique(steps, return_counts=True)[1].max(initial=0)
            if 2 * usual > len(steps) > len(times) / 2 and (steps == 0).sum() <= most_shared:
                return ",".join(more and [*base, *more])
    for name in likely if not base and (np.diff(times) < 0).any() else ():  # events, one by one
        steps = np.diff(times[order := np.argsort(codes[name], kind="stable")])
        if is_text(kinds[name]) and (steps[np.diff(codes[name][order]) == 0] >= 0).all():
            return str(name)
    return ""


def _codes(column: pa.Array) -> NDArray[np.int64]:
    indices = column.dictionary_encode().indices.fill_null(-1)
    return np.asarray(indices.to_numpy(zero_copy_only=False), np.int64)


def is_number(kind: pa.DataType) -> bool:
    """Returns whether a column of this type holds numbers; one without values counts."""
    kinds = pa.types
    tests = (kinds.is_integer, kinds.is_floating, kinds.is_boolean, kinds.is_decimal)
    return kinds.is_null(kind) or any(is_kind(kind) for is_kind in tests)


def _time_like(records: Records, free: Sequence[str], like: Timeline | None) -> str | None:
    """Returns the column of times. Columns that only may hold times are no error if the table
    `like` was read with its rows counted."""
    try:
        return find_time(records, free)
    except DataError:
        if like is None or like.frequency.unit != "rows":
            raise
        return None


def find_time(records: Records, free: Sequence[str]) -> str | None:
    """Returns the column of times; refuses what may be times but is not read as such."""
    kinds = {name: records.schema.field(name).type for name in free}
    is_typed = {
        n: pa.types.is_timestamp(kind) or pa.types.is_date(kind) for n, kind in kinds.items()
    }
    named, typed = _first(TIME_NAMES, free), [name for name in free if is_typed[name]]
    parts = _TIMES | {"1", "2"}
    likely = [
        n
        for n, kind in kinds.items()
        if is_text(kind)
        or is_typed[n]
        or pa.types.is_time(kind)
        or n.lower() in parts
        or _OF_DAY.search(n)
    ]
    if not (named or typed):  # years and weeks
        numbers = [n for n, k in kinds.items() if pa.types.is_integer(k) and n not in likely]
        likely += numbers[:_MAX_PARTS]
    if likely == [named]:
        return named
    texts = records.first_texts(likely)
    if len(joined := _parts_of_time(texts, named)) > 1:
        what = f"times in the columns {' and '.join(map(repr, joined))}"
        what += f" (or `time={named!r}` if it holds them alone)" if named else ""
        places = [n or str(records.schema.names.index(n) + 1) for n in joined]
        raise looks_like(records.name, [(what, {"time": ",".join(places)})], "")
    if named or len(typed) == 1:
        return named or typed[0]
    if typed:
        best = max(typed, key=lambda name: len(pc.unique(texts[name])))
        raise CurableError(
            f"{records.name} has several columns of times: {listed(typed)}; name the one with the"
            f" times of the rows, such as `time={best!r}`",
            (f"times in the column {best!r}", {"time": best}),
        )
    texts = {name: values for name, values in texts.items() if is_text(kinds[name])}
    times = list[str]()
    for is_time in (are_times, are_mostly_times):  # the row of another text is then refused
        times = times or [name for name, values in texts.items() if is_time(values)]
        if len(times) == 1:
            return times[0]
    _refuse_texts_of_times(records, texts)
    refuse_unread_time(records, free)
    return None


def _refuse_texts_of_times(records: Records, texts: Mapping[str, pa.Array]) -> None:
    """Refuses texts that look like times, and proposes their format."""
    for name, values in texts.items():
        if len(values) and usual_kind(values.to_pylist()) == "date":
            more_rows = records.first_texts([name], _KEY_ROWS)[name]  # day or month first
            forms = [] if are_times(values) else formats_of(more_rows) or formats_of(values)
            forms = forms or ([] if are_times(values) else ["%d.%m.%Y %H:%M"])
            found = (f"times in the column {name!r}", {"time": name}), *finding_of_format(forms)
            more = f" with, for example, {settings(merged(found[1:]))}" if forms else ""
            raise CurableError(
                f"{records.name}: column '{name}' looks like times ({values[0].as_py()[:40]!r})"
                f" but is not read as the time column: give `time={name!r}`{more}, or"
                f" `ignore={name!r}`",
                *found,
            )


def _parts_of_time(texts: Mapping[str, pa.Array], named: str | None) -> list[str]:
    """Returns the columns that hold the times together: date and clock or hour, or year, month …"""
    usual = {name: usual_kind(values.to_pylist()) for name, values in texts.items()}
    dates, clocks = ([n for n in texts if usual[n] == kind] for kind in ("date", "clock"))
    if dates:
        date = named if named in dates else dates[0]
        num_dates = len(pc.unique(texts[date]))
        hours = [n for n in texts if n.lower() in _PARTS[3] and usual[n] == "number"]
        if hours:  # not the opening hour of a shop: several hours a day
            pairs = set(zip(texts[date].to_pylist(), texts[hours[0]].to_pylist(), strict=True))
            hours = hours if len(pairs) >= 3 * num_dates else []
        clocks = (
            clocks or hours or [n for n in texts if _OF_DAY.search(n) if steps_of_day(texts[n])]
        )
        if len(clocks) > 1:  # a start and an end
            clocks = list(filter(_START.search, clocks))[:1]
        is_repeated = num_dates < len(texts[date])
        return [date, *(clocks if is_repeated and len(clocks) == 1 else [])]
    parts = [next((n for n in texts if n.lower() in names), None) for names in _PARTS]
    given = [name for name in parts if name is not None and usual[name] == "number"]
    if parts[0] and parts[1] and len(given) > 1 and named is None:
        return given
    periods = [n for n in texts if n.lower() in PERIODS and usual[n] == "number"]
    if parts[0] and given == parts[:1] and len(periods) == 1 and named is None:
        return given + periods
    if named is None and (weekly := _year_and_part(texts)):
        return weekly
    is_month = texts.keys() >= {"1", "2"} and _are_numbers(texts["1"], 1800, 2099)
    return ["1", "2"] if is_month and _are_numbers(texts["2"], 1, 12) else []


def _year_and_part(texts: Mapping[str, pa.Array]) -> list[str]:
    """Returns columns of years and weeks or months by name, as their values are; none without
    both."""
    years = [name for name, values in texts.items() if _are_numbers(values, 1800, 2100)]
    months = [name for name, values in texts.items() if are_month_names(values)]
    if len(months) == 1 and years:
        return [years[0], months[0]]
    weeks = [name for name, values in texts.items() if are_weeks(values)]
    for year, week in ((a, b) for a in years for b in weeks if len(texts[a]) == len(texts[b])):
        first, second = (texts[name].cast(pa.int64()).to_numpy() for name in (year, week))
        steps = np.diff(53 * first + second)
        steps = steps[steps != 0]
        if len(steps) and np.isin(steps, (1, 2)).mean() > _COUNTED / 2:  # 2: a year of 52 weeks
            return [year, week]
    return []


def are_month_names(texts: pa.Array) -> bool:
    """Returns whether texts are names of months."""
    return not _are_numbers(texts, 1, 12) and _are_numbers(month_numbers(texts), 1, 12)


def are_weeks(texts: pa.Array) -> bool:
    """Returns whether texts are numbers up to 53 and more than days of a month."""
    return _are_numbers(texts, 1, 53) and pc.max(texts.cast(pa.int64())).as_py() > 31


def steps_of_day(texts: pa.Array) -> int:
    """Returns how many half-hours, quarters of an hour or 5 minutes a day has if texts number
    these; else 0."""
    most = pc.max(texts.cast(pa.int64())).as_py() if _are_numbers(texts, 0, 300) else 0
    return next((n for n in (48, 96, 288) if 23 * n <= 24 * most <= 25 * n), 0)


def _are_numbers(texts: pa.Array, low: int, high: int) -> bool:
    if not len(texts) or not pc.all(pc.match_substring_regex(texts, r"^\d{1,4}$")).as_py():
        return False
    bounds = pc.min_max(texts.cast(pa.int64())).as_py()
    return bool(low <= bounds["min"] and bounds["max"] <= high)


def is_year(name: str, low: float, high: float) -> bool:
    """Returns whether a column of this name and range holds years."""
    return name.strip().lower() in YEAR_NAMES and 1800 <= low < high <= 2100


def _refuse_numbers(records: Records, names: Sequence[str], problems: Problems) -> None:
    """Refuses columns of texts most of which are numbers: a word among them made texts of all."""
    if not records.is_parsed:
        return
    names = [name for name in names if is_text(records.schema.field(name).type)]
    texts = {name: values for name, values in records.first_texts(names).items() if len(values)}
    for name, values in texts.items():
        is_number = pc.match_substring_regex(values, _NUMBER)
        if 2 * pc.sum(is_number).as_py() <= len(values):
            continue
        if are_categories(pc.unique(values).to_pylist()):
            found = f"codes in column {name!r}", {"categorical": (name,)}
            what = f"{records.name}: column {name!r} holds codes, some of them letters"
            cure = f"give {settings(found[1])}, or leave it out with `ignore={name!r}`"
            problems.add(CurableError(f"{what}; {cure}", found), name)
            continue
        row = 0
        try:
            for batch in records.batches({name: pa.string()}):
                column = with_nulls(batch.column(name), records.null_words)
                numbers_of(column, records.name, name, row, is_csv=True)
                row += len(column)
        except DataError as error:
            problems.add(error, name)


def _columns(roles: RoleRequest | Roles, role: str) -> tuple[str, ...]:
    value = getattr(roles, role)
    return (value,) if isinstance(value, str) else value or ()


def listed(names: Sequence[str]) -> str:
    """Returns names separated by commas; of many the first, and their number."""
    more = f" … ({len(names):,} in all)" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _no_target(
    names: Sequence[str], numbers: Sequence[str], origin: str, counters: Sequence[str]
) -> DataError:
    columns = f" (its columns: {listed(names)})"
    if not numbers:
        but = "".join(f" but {n!r}, which counts rows (`target={n!r}` takes it)" for n in counters)
        return DataError(
            f"{origin} has no column of numbers to forecast{but}{columns}: numbers are digits with"
            " a decimal point; for decimal commas give `decimal=','`, for 1,000 `thousands=','`,"
            " for signs such as $ or % `units=True`; if blanks separate columns, convert it by"
            " pandas.read_csv(FILE, sep=r'\\s+').to_csv('table.csv', index=False)"
        )
    free = [name for name in numbers if not _PLACE.search(name)] or numbers
    likely = next(filter(_TARGET.search, free), free[0])
    others = [name for name in numbers if name != likely]
    return CurableError(
        f"{origin} has no column 'y' to forecast; name one with `target`, such as"
        f" `target={likely!r}`{columns}",
        (f"a table of several columns of numbers (also {listed(others)})", {"target": likely}),
    )


def _first(wanted: Sequence[str], names: Sequence[str]) -> str | None:
    plain = {name.strip(): name for name in reversed(names)}
    return next((plain[name] for name in wanted if name in plain), None)


def named_columns(name: str, names: Sequence[str]) -> list[str]:
    """Returns the columns that a user means by a name, a pattern (``temp_*``) or a number from 1.

    Spaces around a name do not count where it remains the only one.
    """
    if name in names:
        return [name]
    alike = [other for other in names if other.strip() == name.strip()]
    if len(alike) == 1:
        return alike
    if name.isdecimal() and 1 <= int(name) <= len(names):
        return [names[int(name) - 1]]
    is_pattern = any(sign in name for sign in "*?[")
    return [other for other in names if is_pattern and fnmatchcase(other, name)]


def _existing(
    names: Sequence[str], request: RoleRequest, origin: str, problems: Problems
) -> RoleRequest:
    """Returns the request without missing columns, which are reported to `problems`."""
    missing: dict[str, list[str]] = {}
    present: dict[str, Any] = {}
    for role in ("target", "time", "series", *LISTS[1:]):
        if getattr(request, role) is None:
            continue
        found = list[str]()
        for name in _columns(request, role):
            if not (columns := named_columns(name, names)):
                missing.setdefault(name, []).append(role)
            found += [column for column in columns if column not in found]
        present[role] = tuple(found) if role in LISTS else next(iter(found), None)
    for name, roles in missing.items():
        problems.add(
            DataError(
                f"{origin} has no column '{name}' (given as {' and '.join(roles)})"
                f"{nearest_hint(name, names)}; its columns: {listed(names)}"
            )
        )
    gone = {role for roles in missing.values() for role in roles}
    if gone & {"target", "time", "series"} or (gone and not request.has_target):
        problems.raise_all()  # the other roles depend on these, and a table of none has no values
    return replace(request, **present)


def _check_roles(roles: Roles, origin: str) -> None:
    seen: dict[str, str] = {}
    for role in ("time", "series", "target", "past", "future", "static"):
        for name in _columns(roles, role):
            if name in seen:
                what = f"column '{name}' cannot be both {seen[name]} and {role}"
                raise DataError(f"{origin}: {what}; choose one role")
            if name in RESERVED:
                raise DataError(
                    f"{origin}: the column name '{name}' is reserved for tables of forecasts;"
                    " rename it, or leave it out with `ignore`"
                )
            seen[name] = role
    if roles.time is None and "step" in roles.target:
        raise DataError(f"{origin}: the target name 'step' is reserved for forecasts; rename it")
    for name in roles.categorical:
        if seen.get(name) not in ("past", "future", "static"):
            role = seen.get(name, "left out")
            raise DataError(
                f"{origin}: column '{name}' is categorical and {role}; only past, future and"
                " static columns can be categorical"
            )
