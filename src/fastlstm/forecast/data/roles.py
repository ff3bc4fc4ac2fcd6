"""What each column of a table is for: time, series, target, past, future, static, categorical."""

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
"""Columns that tools write to count rows; left out unless they are named."""
RESERVED = ("cutoff", "forecast", "segment")
"""Names that forecasts and backtests add to their tables."""
_MOST_LISTED = 40


@dataclass(frozen=True)
class RoleRequest:
    """What the user said about columns; what is not said is found (`find_roles`).

    Attributes:
        target: the columns to forecast.
        time: the column of times.
        series: the column that tells series of a long table apart.
        past: known up to now only; default every other number.
        future: known ahead, such as the hour or a planned price.
        static: one value per series.
        categorical: columns of any kind whose values are names, not numbers.
        ignore: left out.
        has_target: False for a table of what is known ahead, which has none.
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

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, part of a cache's key."""
        return asdict(self)


@dataclass(frozen=True)
class Roles:
    """The columns of a table by what they are for.

    Attributes:
        target: what is forecast; one or more numbers.
        time: the column of times, or None: rows are counted.
        series: the column that tells series apart, or None: there is one.
        past: known up to now only.
        future: known ahead.
        static: one value per series.
        categorical: which of past, future and static are names.
        notes: what was decided for the user, a line each.
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
    """Gives every column its role.

    Args:
        names: all columns.
        numbers: those that hold numbers.
        times: those that hold times.
        asked: what the user said.
        origin: what messages call the table.
        problems: is told of columns that are not there, which are left out.

    Raises:
        DataError: two roles for one column, no target, or one of the columns of target, time and
            series is not there.
    """
    asked = _known_names(names, asked, origin, problems)
    are_numbers = set(numbers) - set(COUNTERS)
    lists = asked.target, asked.future, asked.static, asked.ignore, asked.categorical, asked.past
    spoken = {name for given in lists for name in given or ()}
    free = [name for name in names if name not in spoken]
    free_times = [name for name in times if name not in spoken]
    only = free_times[0] if len(free_times) == 1 else None
    time = asked.time or _first(TIME_NAMES, free) or only
    series = asked.series or _first(SERIES_NAMES, [name for name in free if name != time])
    taken = {time, series, *spoken.difference(asked.target)}
    target = asked.target
    notes = []
    if not target and asked.has_target:
        named = [name for name in TARGET_NAMES if name in names and name not in taken]
        others = [name for name in names if name in are_numbers and name not in taken]
        target = tuple(named[:1]) if named else tuple(others if series is None else ())
        if not target:
            raise _no_target(names, numbers, origin)
        if not named:
            notes.append(f"target: every number, {listed(target)}")
    taken |= set(target)
    others = [n for n in names if n not in taken]
    past = asked.past
    if past is None:
        known = are_numbers.intersection(others)
        known |= set(asked.categorical) - {*asked.future, *asked.static}
        past = tuple(n for n in names if n in known)
        if past:
            notes.append(f"read as known up to now only (past): {listed(past)}")
    taken |= set(past)
    left = [n for n in others if n not in taken]
    if left:
        notes.append(f"left out, as no role was given and they are no numbers: {listed(left)}")
    roles = Roles(
        target, time, series, past, asked.future, asked.static, asked.categorical, tuple(notes)
    )
    _check_roles(roles, names, origin)
    return roles


def listed(names: Sequence[str]) -> str:
    """Returns names as messages say them: the first of many, and how many there are."""
    more = f" … ({len(names):,} in all)" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + more


def _no_target(names: Sequence[str], numbers: Sequence[str], origin: str) -> DataError:
    columns = f" (its columns: {listed(names)})"
    if not numbers:
        what = "no column of numbers, with a decimal point where they have one, to forecast"
        return DataError(f"{origin} has {what}{columns}")
    name = Setting("target", ...)
    return DataError(f"{origin} has no column 'y' to forecast; name one with ", name, columns)


def _first(wanted: Sequence[str], names: Sequence[str]) -> str | None:
    return next((name for name in wanted if name in names), None)


def _known_names(
    names: Sequence[str], asked: RoleRequest, origin: str, problems: Problems
) -> RoleRequest:
    """Returns what is asked for without the columns that are not there, which are problems."""
    known = Counter(names)
    if len(known) < len(names):
        double = min(name for name, count in known.items() if count > 1)
        raise DataError(f"{origin} has two columns called '{double}'; rename one")
    missing: dict[str, list[str]] = {}
    for role, value in asked.to_json().items():
        if isinstance(value, bool):
            continue
        for name in (value,) if isinstance(value, str) else value or ():
            if name not in known:
                missing.setdefault(name, []).append(role)
    for name, roles in missing.items():
        problems.add(
            DataError(
                f"{origin} has no column '{name}' (asked for as {' and '.join(roles)})"
                f"{nearest_hint(name, names)}; its columns: {listed(names)}"
            )
        )
    if {role for roles in missing.values() for role in roles} & {"target", "time", "series"}:
        problems.raise_all()  # without them nothing is known of the others
    left: dict[str, Any] = {
        role: tuple(name for name in value if name not in missing)
        for role, value in asked.to_json().items()
        if isinstance(value, tuple | list)
    }
    return replace(asked, **left)


def _check_roles(roles: Roles, names: Sequence[str], origin: str) -> None:
    seen: dict[str, str] = {}
    singles = {"time": roles.time, "series": roles.series}
    given = [(role, (name,)) for role, name in singles.items() if name is not None]
    given += [(role, getattr(roles, role)) for role in ("target", "past", "future", "static")]
    for role, members in given:
        for name in members:
            if name in seen:
                raise DataError(
                    f"{origin}: column '{name}' cannot be both {seen[name]} and {role}; give it"
                    " one role"
                )
            if name in RESERVED:
                raise DataError(
                    f"{origin}: a column is called '{name}', a name that forecasts use for columns"
                    " of their own; rename it, or leave it out with ",
                    Setting("ignore", ...),
                )
            seen[name] = role
    if roles.time is None and "step" in roles.target:
        raise DataError(
            f"{origin}: a target is called 'step', as the steps of forecasts; rename it"
        )
    for name in roles.categorical:
        if seen.get(name) not in ("past", "future", "static"):
            role = seen.get(name, "left out")
            raise DataError(
                f"{origin}: column '{name}' is categorical and {role}; only past, future and"
                " static columns can be categorical"
            )
