"""The role of each column: time, series, target, past, future, static, categorical."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fastlstm.errors import DataError, nearest_hint
from fastlstm.forecast.data.problems import Problems
from fastlstm.forecast.data.records import NUMBER, Records, is_text, require_distinct, with_nulls
from fastlstm.forecast.data.time_reader import refuse_unread_time
from fastlstm.forecast.data.time_text import (
    are_like_dates,
    are_mostly_times,
    are_times,
    formats_of,
)

TIME_NAMES = ("ds", "date", "datetime", "timestamp", "time")
SERIES_NAMES = ("unique_id", "series_id", "item_id")
TARGET_NAMES = ("y", "target")
COUNTERS = ("", "Unnamed: 0", "__index_level_0__")
"""Row counters that tools write; ignored unless named."""
RESERVED = ("cutoff", "forecast", "segment")
"""Columns that forecasts and backtests add to their tables."""
_LISTS = ("target", "past", "future", "static", "categorical", "ignore")
"""Roles of any number of columns."""
_NUMBER = rf"^\s*{NUMBER}\s*$"
_MAX_COLUMNS = 1 << 16
_MAX_LISTED = 40
_MAX_WORD = 20


@dataclass(frozen=True)
class RoleRequest:
    """Roles given by the user; `find_roles` chooses the others.

    Attributes:
        target: columns to forecast.
        time: column of times.
        series: column of series names.
        past: unknown in the future; default: all other numbers.
        future: known in advance, such as the hour or a planned price.
        static: one value per series.
        categorical: columns whose values are names, not numbers.
        ignore: columns to leave out.
        has_target: False for a table of future covariates, which has no target.
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


def find_roles(records: Records, request: RoleRequest, problems: Problems) -> Roles:
    """Chooses the role of every column.

    Args:
        records: the table; the first values of texts without a role are read if no column is
            called or typed a time.
        request: roles given by the user.
        problems: collects errors of missing columns.

    Raises:
        DataError: two roles for one column, no target, a missing column of target, time or
            series, too many columns, or texts that look like times in an unknown format.
    """
    schema, origin = records.schema, records.name
    names = schema.names
    if len(names) > _MAX_COLUMNS:
        raise DataError(
            f"{origin} has {len(names):,} columns, the limit is {_MAX_COLUMNS:,};"
            " expected a row per time and a column per quantity: is the table transposed?"
        )
    request = _existing(names, request, origin, problems)
    numbers = {field.name for field in schema if is_number(field.type)}
    usable_numbers = numbers.difference(COUNTERS)
    assigned = {name for role in _LISTS for name in _columns(request, role)}
    free = [name for name in names if name not in assigned and name != request.time]
    series = request.series or _first(SERIES_NAMES, free)
    free = [name for name in free if name != series]
    time = request.time or _first(TIME_NAMES, free) or find_time(records, free)
    taken = {time, series, *assigned.difference(request.target)}
    target, notes = request.target, []
    if not target and request.has_target:
        named = _first(TARGET_NAMES, [name for name in names if name not in taken])
        others = [name for name in names if name in usable_numbers and name not in taken]
        target = (named,) if named else tuple(others if series is None else ())
        if not target:
            raise _no_target(names, bool(numbers), origin)
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
    taken |= set(past)
    if ignored := [name for name in others if name not in taken and name not in request.ignore]:
        if request.has_target:
            _refuse_numbers(records, ignored, problems)
        if unused := [name for name in ignored if name in usable_numbers]:
            notes.append(f"ignored columns (not among the past covariates given): {listed(unused)}")
        if counters := [repr(name) for name in ignored if name in COUNTERS]:
            notes.append(f"ignored columns (row counters by their names): {', '.join(counters)}")
    roles = Roles(
        target, time, series, past, request.future, request.static, request.categorical,
        tuple(notes), tuple(n for n in ignored if n not in {*COUNTERS, *usable_numbers}),
    )  # fmt: skip
    _check_roles(roles, origin)
    return roles


def is_number(kind: pa.DataType) -> bool:
    """Returns whether a column of this type holds numbers; one without values counts."""
    kinds = pa.types
    tests = (kinds.is_integer, kinds.is_floating, kinds.is_boolean, kinds.is_decimal)
    return kinds.is_null(kind) or any(is_kind(kind) for is_kind in tests)


def find_time(records: Records, free: Sequence[str]) -> str | None:
    """Returns the only column of times; refuses what may be times but is not read as such."""
    kinds = {name: records.schema.field(name).type for name in free}
    times = [
        n for n, kind in kinds.items() if pa.types.is_timestamp(kind) or pa.types.is_date(kind)
    ]
    if len(times) == 1:
        return times[0]
    texts = records.first_texts([name for name, kind in kinds.items() if is_text(kind)])
    for is_time in (are_times, are_mostly_times):  # the row of another text is then refused
        times = times or [name for name, values in texts.items() if is_time(values)]
        if len(times) == 1:
            return times[0]
    for name, values in texts.items():
        if are_like_dates(values):
            form = next(iter(formats_of(values)), "%d.%m.%Y %H:%M")
            raise DataError(
                f"{records.name}: column '{name}' looks like times ({values[0].as_py()[:40]!r})"
                f" but is not read as the time column: give `time={name!r}` with, for example,"
                f" `time_format={form!r}`, or `ignore={name!r}`"
            )
    refuse_unread_time(records, free)
    return None


def _refuse_numbers(records: Records, names: Sequence[str], problems: Problems) -> None:
    """Refuses columns of texts most of which are numbers: a word among them made texts of all."""
    if not records.is_parsed:
        return
    names = [name for name in names if is_text(records.schema.field(name).type)]
    texts = {name: values for name, values in records.first_texts(names).items() if len(values)}
    for name, values in texts.items():
        is_number = pc.match_substring_regex(values, _NUMBER)
        if 2 * pc.sum(is_number).as_py() > len(values):
            word = _first_word(records, name)
            problems.add(
                DataError(
                    f"{records.name}: column '{name}' holds numbers and {word!r}; if that means no"
                    f" value, give `na={word!r}`, or leave the column out with `ignore={name!r}`"
                ),
                name,
            )


def _first_word(records: Records, name: str) -> str:
    """Returns the first text of a column that is no number."""
    for batch in records.batches({name: pa.string()}):
        column = with_nulls(batch.column(name), records.null_words).drop_null()
        words = column.filter(pc.invert(pc.match_substring_regex(column, _NUMBER)))
        if len(words):
            return str(words[0].as_py())[:_MAX_WORD]
    return ""


def _columns(roles: RoleRequest | Roles, role: str) -> tuple[str, ...]:
    value = getattr(roles, role)
    return (value,) if isinstance(value, str) else value or ()


def listed(names: Sequence[str]) -> str:
    """Returns names separated by commas; of many the first, and their number."""
    more = f" … ({len(names):,} in all)" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _no_target(names: Sequence[str], has_numbers: bool, origin: str) -> DataError:
    columns = f" (its columns: {listed(names)})"
    if not has_numbers:
        why = "numbers are digits with a decimal point, without signs such as $ or %"
        cure = "for decimal commas give `decimal=','`, for 1,000 `thousands=','`"
        return DataError(f"{origin} has no column of numbers to forecast{columns}: {why}; {cure}")
    return DataError(f"{origin} has no column 'y' to forecast; name one with `target`{columns}")


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
    require_distinct(names, origin)
    missing: dict[str, list[str]] = {}
    present: dict[str, Any] = {}
    for role in ("target", "time", "series", *_LISTS[1:]):
        if getattr(request, role) is None:
            continue
        found = list[str]()
        for name in _columns(request, role):
            if not (columns := named_columns(name, names)):
                missing.setdefault(name, []).append(role)
            found += [column for column in columns if column not in found]
        present[role] = tuple(found) if role in _LISTS else next(iter(found), None)
    for name, roles in missing.items():
        problems.add(
            DataError(
                f"{origin} has no column '{name}' (given as {' and '.join(roles)})"
                f"{nearest_hint(name, names)}; its columns: {listed(names)}"
            )
        )
    if {role for roles in missing.values() for role in roles} & {"target", "time", "series"}:
        problems.raise_all()  # the other roles depend on these
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
