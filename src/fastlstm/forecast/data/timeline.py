"""The frequency of rows: how far apart their times are.

Times are microseconds since 1970. A frequency is a number of microseconds, calendar months or
business days (Monday to Friday). Every time has a tick number; consecutive rows are one tick apart.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import DataError, counted

_UNITS = (
    ("week", 604_800_000_000),
    ("day", 86_400_000_000),
    ("hour", 3_600_000_000),
    ("minute", 60_000_000),
    ("second", 1_000_000),
    ("millisecond", 1_000),
    ("microsecond", 1),
)
DAY_US, HOUR_US = 86_400_000_000, 3_600_000_000
_A_DAY, _A_MONTH = np.timedelta64(1, "D"), np.timedelta64(1, "M")
_LONGEST_STEP = 10**15
"""Limit of a stored frequency: 31 years in microseconds."""
_Unit = Literal["us", "months", "business_days", "rows"]
_LAST_EVERYWHERE = 27
"""The last day, from 0, that every month has."""
_MONDAY = 3
"""Days from the Monday before 1970-01-01, a Thursday, to it."""


@dataclass(frozen=True)
class Frequency:
    """The time from one row to the next.

    Attributes:
        step: in `unit`; rows are counted if there are no times.
        unit: us, months, business_days or rows.
        is_month_end: months run from last day to last day.
        month_day: day of the month, from 1, or the last one of shorter months; 0: that of the first
            time.
    """

    step: int
    unit: _Unit = "us"
    is_month_end: bool = False
    month_day: int = 0

    def __str__(self) -> str:
        if self.unit == "rows":
            return "rows" if self.step == 1 else str(self.step)
        if self.unit == "months":
            return counted(self.step, "month")
        if self.unit == "business_days":
            return "1 business day"
        name, size = next(unit for unit in _UNITS if self.step % unit[1] == 0)
        return counted(self.step // size, name)

    def ticks(self, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns a number for every time; consecutive times differ by one."""
        if self.unit == "months":
            return _months(times) // self.step
        if self.unit == "business_days":
            weeks, days = _weeks_and_days(times)
            return 5 * weeks + np.minimum(days, 4)
        return times // self.step

    def are_whole_steps(self, times: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns which times are whole steps after the one before, shape ``(N - 1,)``."""
        if self.unit == "business_days":
            is_business = _weeks_and_days(times)[1] < 5
            is_whole = np.diff(times) % DAY_US == 0
            return np.asarray(is_whole & is_business[1:] & is_business[:-1])
        if self.unit == "months":
            months, (days, is_end) = np.diff(_months(times)), _days_of_month(times)
            is_whole = (months > 0) & (months % self.step == 0) & (np.diff(times % DAY_US) == 0)
            if not (self.is_month_end or self.month_day):
                return np.asarray(is_whole & (np.diff(days) == 0))
            is_due = _are_due(days, self.month_day - 1) if self.month_day else is_end
            return np.asarray(is_whole & is_due[1:] & is_due[:-1])
        return np.asarray(np.diff(times) % self.step == 0)

    def fits(self, times: NDArray[np.int64], is_same: NDArray[np.bool_]) -> bool:
        """Returns whether rows of each series are whole steps apart, most of them one step.

        See `find_frequency` for times and is_same.
        """
        if not self.are_whole_steps(times)[is_same].all():
            return False
        steps = np.diff(self.ticks(times))[is_same]
        return len(steps) == 0 or most_frequent(steps) == 1

    def after(self, start: int, count: int, first: int = 0) -> NDArray[np.int64]:
        """Returns `count` times, beginning `first` steps after `start`."""
        numbers = np.arange(first, first + count, dtype=np.int64)
        if self.unit == "business_days":
            tick = int(self.ticks(np.array([start]))[0])
            weeks, days = np.divmod(tick + numbers, 5)
            return (7 * weeks + days - _MONDAY) * DAY_US + start % DAY_US
        if self.unit != "months":
            return start + numbers * self.step
        day = np.datetime64(start, "us").astype("datetime64[D]")
        month = day.astype("datetime64[M]")
        months = month + (numbers * self.step).astype("timedelta64[M]")
        days = (months + _A_MONTH).astype("datetime64[D]") - _A_DAY
        if not self.is_month_end:
            offset = np.timedelta64(self.month_day - 1, "D") if self.month_day else day - month
            days = np.minimum(months.astype("datetime64[D]") + offset, days)
        return np.asarray(days.astype("datetime64[us]").astype(np.int64) + start % DAY_US)

    @staticmethod
    def from_json(values: Any) -> Frequency:
        """Returns the frequency that `to_json` described; raises ValueError for anything else."""
        keys = {"step", "unit", "is_month_end"}
        if not isinstance(values, dict) or set(values) not in (keys, keys | {"month_day"}):
            raise ValueError(f"a frequency has {', '.join(sorted(keys))}, got {values!r:.80}")
        is_step = type(values["step"]) is int and 0 < values["step"] <= _LONGEST_STEP
        is_unit = values["unit"] in get_args(_Unit)
        day = values.get("month_day", 0)
        is_day = type(day) is int and 0 <= day <= 31 and type(values["is_month_end"]) is bool
        if not (is_step and is_unit and is_day):
            raise ValueError(f"{values!r:.80} is not a frequency")
        return Frequency(**values)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        values = asdict(self)
        return values if self.month_day else {k: values[k] for k in values if k != "month_day"}


ROWS = Frequency(1, "rows")
DAYS = Frequency(DAY_US)
BUSINESS_DAYS = Frequency(1, "business_days")


@dataclass(frozen=True)
class Timeline:
    """Properties of a table's times that another table must match.

    Attributes:
        is_wall: times are local times of the zone, else UTC; None if unknown.
        may_miss: values may be missing, so that gaps may be filled.
    """

    frequency: Frequency
    time_zone: str | None
    is_wall: bool | None
    may_miss: bool = True


def _weeks_and_days(times: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns each time's week number and weekday; Monday is 0."""
    return np.divmod(times // DAY_US + _MONDAY, 7)


def are_business_days(times: NDArray[np.int64]) -> bool:
    """Returns whether no time is on a Saturday or Sunday."""
    return bool((_weeks_and_days(times)[1] < 5).all())


def _months(times: NDArray[np.int64]) -> NDArray[np.int64]:
    months = times.astype("datetime64[us]").astype("datetime64[M]")
    return np.asarray(months.astype(np.int64))


def _days_of_month(times: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns each time's day of the month, from 0, and whether it is the last one."""
    days = times.astype("datetime64[us]").astype("datetime64[D]")
    months = days.astype("datetime64[M]")
    return (days - months).astype(np.int64), (days + _A_DAY).astype("datetime64[M]") != months


def most_frequent(values: NDArray[np.int64]) -> int:
    """Returns the most frequent value, the smallest of several; `values` is not empty."""
    unique, counts = np.unique(values, return_counts=True)
    return int(unique[counts.argmax()])


def show_time(time: int) -> str:
    """Returns a time as text, without trailing zero parts."""
    shown = str(np.datetime64(int(time), "us")).replace("T", " ")  # also beyond the year 9999
    return shown.removesuffix(".000000").removesuffix(" 00:00:00")


def find_frequency(
    times: NDArray[np.int64],
    is_same: NDArray[np.bool_],
    origin: str,
    has_clock: bool = True,
    cure: str = "",
) -> Frequency:
    """Finds the most frequent time between consecutive rows.

    The times of some rows, ``(N,)``, int64, increase within a series; `is_same` says whether a row
    has the series of the row before, ``(N - 1,)``. Without `has_clock` they are whole numbers.
    Raises DataError: the times are irregular; the message has `cure`.
    """
    steps = np.diff(times)[is_same]
    if len(steps) == 0:
        return DAYS if has_clock else ROWS
    values, counts = np.unique(steps, return_counts=True)
    usual = int(values[counts.argmax()])
    may_be_monthly = has_clock and usual >= 28 * DAY_US and usual % DAY_US == 0
    if may_be_monthly and (monthly := _calendar_frequency(times, is_same)) is not None:
        return monthly
    share = counts.max() / len(steps)
    on_grid = float(counts[values % usual == 0].sum() / len(steps))
    if share < 0.5 or on_grid < 0.9:
        order = np.argsort(-counts, kind="stable")[:3]
        shown = ", ".join(
            f"{Frequency(int(v)) if has_clock else v} ({c / len(steps):.0%})"
            for v, c in zip(values[order], counts[order], strict=True)
        )
        rounded = "round them with `snap`, such as `snap='1h'`, " if has_clock else ""
        raise DataError(
            f"{origin}: the times have no regular frequency (most often {shown});{cure}"
            f" {rounded}resample them, or count rows by leaving the time column out (`ignore`)"
        )
    if not has_clock:
        return Frequency(usual, "rows")
    if usual == DAY_US and are_business_days(times):
        weeks = _weeks_and_days(times)[0]
        if (np.diff(weeks)[is_same] > 0).any():  # a weekend is skipped
            return BUSINESS_DAYS
    return Frequency(usual)


def _are_due(days: NDArray[np.int64], day: int) -> NDArray[np.bool_]:
    """Returns which days of the month, from 0, are `day`; of a late one also earlier ones from the
    28th, as shorter months have them."""
    return np.asarray((days == day) | ((days >= _LAST_EVERYWHERE) & (days < day)))


def _calendar_frequency(times: NDArray[np.int64], is_same: NDArray[np.bool_]) -> Frequency | None:
    """Returns the frequency in months if all times are on one day of the month, or the last."""
    days, is_end = _days_of_month(times)
    last, is_month_end = int(days.max()), bool(is_end.all())
    if len(np.unique(times % DAY_US)) > 1 or not (is_month_end or _are_due(days, last).all()):
        return None
    usual = most_frequent(np.diff(_months(times))[is_same])
    is_one_day = bool((days == last).all())
    day = 0 if is_month_end or is_one_day else last + 1
    return Frequency(usual, "months", is_month_end, day) if usual >= 1 else None
