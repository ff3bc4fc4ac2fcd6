"""The role of each column: time, series, target, past, future, static, categorical."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fastlstm.errors import DataError, Setting, nearest_hint
from fastlstm.forecast.data.problems import Problems

TIME_NAMES = ("ds", "date", "datetime", "timestamp", "time")
SERIES_NAMES = ("unique_id", "series_id", "item_id")
TARGET_NAMES = ("y", "target")
COUNTERS = ("", "Unnamed: 0", "__index_level_0__")
"""Row counters that tools write; ignored unless named."""
RESERVED = ("cutoff", "forecast", "segment")
"""Columns that forecasts and backtests add to their tables."""
_MAX_LISTED = 40


@dataclass(frozen=True)
class RoleRequest:
    """Roles given by the user; `find_roles` chooses the others.

    Attributes:
        target: columns to forecast.
        time: column of times.
        series: column of series names.
        past: known for the past only; default: all other numbers.
        future: known ahead, such as the hour or a planned price.
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
    """

    target: tuple[str, ...]
    time: str | None
    series: str | None
    past: tuple[str, ...]
    future: tuple[str, ...]
    static: tuple[str, ...]
    categorical: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def values(self) -> tuple[str, ...]:
        """The columns that a table stores row by row: target, past, future."""
        return (*self.target, *self.past, *self.future)


def find_roles(
    names: Sequence[str],
    numbers: Sequence[str],
    times: Sequence[str],
    asked: RoleRequest,
    origin: str,
    problems: Problems,
) -> Roles:
    """Chooses the role of every column.

    Args:
        names: all columns.
        numbers: columns of numbers.
        times: columns of times.
        asked: roles given by the user.
        origin: name of the table in messages.
        problems: collects errors of missing columns.

    Raises:
        DataError: two roles for one column, no target, or a missing column of target, time or
            series.
    """
    asked = _known_names(names, asked, origin, problems)
    are_numbers = set(numbers) - set(COUNTERS)
    lists = asked.target, asked.future, asked.static, asked.ignore, asked.categorical, asked.past
    assigned = {name for columns in lists for name in columns or ()}
    free = [name for name in names if name not in assigned]
    free_times = [name for name in times if name not in assigned]
    only = free_times[0] if len(free_times) == 1 else None
    time = asked.time or _first(TIME_NAMES, free) or only
    series = asked.series or _first(SERIES_NAMES, [name for name in free if name != time])
    taken = {time, series, *assigned.difference(asked.target)}
    target = asked.target
    notes = []
    if not target and asked.has_target:
        named = [name for name in TARGET_NAMES if name in names and name not in taken]
        others = [name for name in names if name in are_numbers and name not in taken]
        target = tuple(named[:1]) if named else tuple(others if series is None else ())
        if not target:
            raise _no_target(names, numbers, origin)
        if not named:
            notes.append(f"target: all numbers, {listed(target)}")
    taken |= set(target)
    others = [n for n in names if n not in taken]
    past = asked.past
    if past is None:
        known = are_numbers.intersection(others)
        known |= set(asked.categorical) - {*target, *asked.future, *asked.static}
        past = tuple(n for n in names if n in known)
        if past:
            notes.append(f"past covariates: {listed(past)}")
    taken |= set(past)
    left = [n for n in others if n not in taken]
    if left:
        notes.append(f"ignored columns (not numbers and without a role): {listed(left)}")
    roles = Roles(
        target, time, series, past, asked.future, asked.static, asked.categorical, tuple(notes)
    )
    _check_roles(roles, names, origin)
    return roles


def listed(names: Sequence[str]) -> str:
    """Returns names separated by commas; of many the first, and their number."""
    more = f" … ({len(names):,} in all)" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _no_target(names: Sequence[str], numbers: Sequence[str], origin: str) -> DataError:
    columns = f" (its columns: {listed(names)})"
    if not numbers:
        what = "no numeric column to forecast; numbers need a decimal point, not a comma"
        return DataError(f"{origin} has {what}{columns}")
    name = Setting("target", ...)
    return DataError(f"{origin} has no column 'y' to forecast; name one with ", name, columns)


def _first(wanted: Sequence[str], names: Sequence[str]) -> str | None:
    return next((name for name in wanted if name in names), None)


def _known_names(
    names: Sequence[str], asked: RoleRequest, origin: str, problems: Problems
) -> RoleRequest:
    """Returns the given roles without missing columns, which are reported to `problems`."""
    known = Counter(names)
    if len(known) < len(names):
        double = min(name for name, count in known.items() if count > 1)
        raise DataError(f"{origin} has two columns called '{double}'; rename one")
    missing: dict[str, list[str]] = {}
    for role, value in asdict(asked).items():
        if isinstance(value, bool):
            continue
        for name in (value,) if isinstance(value, str) else value or ():
            if name not in known:
                missing.setdefault(name, []).append(role)
    for name, roles in missing.items():
        problems.add(
            DataError(
                f"{origin} has no column '{name}' (given as {' and '.join(roles)})"
                f"{nearest_hint(name, names)}; its columns: {listed(names)}"
            )
        )
    if {role for roles in missing.values() for role in roles} & {"target", "time", "series"}:
        problems.raise_all()  # the other roles depend on these
    known_lists: dict[str, Any] = {
        role: tuple(name for name in value if name not in missing)
        for role, value in asdict(asked).items()
        if isinstance(value, tuple)
    }
    return replace(asked, **known_lists)


def _check_roles(roles: Roles, names: Sequence[str], origin: str) -> None:
    seen: dict[str, str] = {}
    singles = {"time": roles.time, "series": roles.series}
    columns = [(role, (name,)) for role, name in singles.items() if name is not None]
    columns += [(role, getattr(roles, role)) for role in ("target", "past", "future", "static")]
    for role, members in columns:
        for name in members:
            if name in seen:
                raise DataError(
                    f"{origin}: column '{name}' cannot be both {seen[name]} and {role}; choose one"
                    " role"
                )
            if name in RESERVED:
                raise DataError(
                    f"{origin}: the column name '{name}' is reserved for tables of forecasts;"
                    " rename it, or leave it out with ",
                    Setting("ignore", ...),
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
