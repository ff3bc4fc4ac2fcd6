"""Reads the time column, as microseconds since 1970 or as plain whole numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastlstm.errors import ConfigError, DataError, counted
from fastlstm.forecast.config import ReadOptions
from fastlstm.forecast.data.names import is_text
from fastlstm.forecast.data.problems import CurableError, looks_like
from fastlstm.forecast.data.records import Records, first_refused
from fastlstm.forecast.data.table import row_blocks
from fastlstm.forecast.data.time_text import (
    YEAR_NAMES,
    finding_of_format,
    has_late_times,
    hint_for_time,
    is_like_time,
    micro_of_floats,
    read_times,
    starts_of,
)
from fastlstm.forecast.data.timeline import HOUR_US, Frequency, Timeline, most_frequent, show_time
from fastlstm.system.fields import parse_duration

EPOCH_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""Values of time_format for whole numbers since 1970, and the number of each in a second."""
EXCEL = "excel"
"""Value of time_format for days since 1900, as Excel counts them."""
_EXCEL_1970 = 25_569
YEARS = "year"
"""Value of time_format for years whose fractions are months: 1949.083 is February of 1949."""
NUMBER_FORMATS = (EXCEL, YEARS, *EPOCH_UNITS)
_MONTH_DIGITS = 0.07
"""Twelve times the error of a year with two digits of its fraction."""
_MONTHLY_NAMES = ("time", "date", "datetime", "period", "month", "quarter")
"""Names of columns that may hold years with fractions."""
_FEWEST_YEARS, _YEAR_ROWS = 3, 1 << 17
"""Different years from which a column is one of times, and the rows that are looked at."""
_DATE_FORMATS = ("%Y%m", "%Y%m%d", "%Y%m%d%H", "%Y%m%d%H%M", "%Y%m%d%H%M%S")
_EPOCH_YEARS = (10 * 365 * 86_400, 130 * 365 * 86_400)
"""Seconds since 1970 of 1980 and 2100: large whole numbers between them may be times."""
_NAMES_OF_TIME = re.compile(
    "time|epoch|stamp|unix|_at$|(^|[^a-z])(ts|date|datum|day|tag|week|month|period)([^a-z]|$)", re.I
)
_CALENDAR = (-62_135_596_800, 253_402_300_799)
"""Seconds since 1970 at the start of year 1 and the end of year 9999."""
_INT64 = np.iinfo(np.int64)
_ROWS = 1 << 20


def unit_since_1970(low: float, high: float) -> str | None:
    """Returns the time_format of numbers that are years 1980 to 2100, or None."""
    first, last = _EPOCH_YEARS
    if _EXCEL_1970 + first / 86_400 <= low and high <= _EXCEL_1970 + last / 86_400:
        return EXCEL
    units = [u for u, n in EPOCH_UNITS.items() if first * n <= low and high <= last * n]
    return units[0] if units else None


def months_of(values: NDArray[np.float64]) -> NDArray[np.int64] | None:
    """Returns the months since 1970 of years with fractions; None if one is no year from 1600 to
    2199, or a fraction no number of twelfths with two digits or more."""
    if not ((values >= 1600) & (values < 2200)).all():
        return None
    months = np.rint(12 * values)
    is_month = abs(12 * values - months) <= _MONTH_DIGITS
    return months.astype(np.int64) - 12 * 1970 if is_month.all() else None


def refuse_unread_time(records: Records, names: Sequence[str]) -> None:
    """Raises DataError for a column of dates such as 20240131, that is called a time and holds
    numbers since 1970 or 1900, or of years in order, in all or of each series."""
    kinds = {name: records.schema.field(name).type for name in names}
    likely = [n for n, k in kinds.items() if pa.types.is_integer(k) or pa.types.is_floating(k)]
    named = [n for n in likely if n.strip().lower() in (*YEAR_NAMES, *_MONTHLY_NAMES)]
    for name, texts in records.first_texts(named, _YEAR_ROWS).items():
        given = _years(name, texts.cast(pa.float64()).to_numpy(zero_copy_only=False))
        if given is not None:
            what = f"years in the column {name!r} ({texts[0]})"
            others = f"; if these are not the times of the rows, `ignore={name!r}`"
            raise looks_like(records.name, [(what, given)], others)
    for name, texts in records.first_texts(likely).items():
        values = texts.cast(pa.float64()).to_numpy(zero_copy_only=False)
        asked = _DATE_FORMATS[1 : None if _NAMES_OF_TIME.search(name) else 2]
        forms = [f for f in asked if len(values) and _are_dates(texts, values, f)]
        if pa.types.is_integer(kinds[name]) and forms:
            given = {"time": name, "time_format": forms[0]}
            what = f"dates in the column {name!r} ({texts[0]})"
            raise looks_like(records.name, [(what, given)], f"; if they are not, `ignore={name!r}`")
        if not _NAMES_OF_TIME.search(name):
            continue
        unit = unit_since_1970(values.min(), values.max()) if len(values) else None
        if unit is not None and (np.diff(values) >= 0).all():
            what = "times since 1970" if unit != EXCEL else "times since 1900, as in Excel,"
            raise CurableError(
                f"{records.name}: column '{name}' looks like {what} ({texts[0]}) but is not read as"
                f" the time column: give `time={name!r}` and `time_format={unit!r}`, or"
                f" `ignore={name!r}`",
                (f"{what.rstrip(',')} in the column {name!r}", {"time": name, "time_format": unit}),
            )


def _years(name: str, values: NDArray[np.float64]) -> dict[str, str] | None:
    """Returns the options that read years in order, in all rows or in those of each series; None if
    the values are no such years. Only a column called a year may have years without fractions."""
    months, steps = months_of(values), np.diff(values)
    if months is None or len(np.unique(values)) < _FEWEST_YEARS:
        return None
    ahead, back = (steps > 0).sum(), (steps < 0).sum()
    if max(ahead, back) < 2 * min(ahead, back):
        return None
    if (months % 12).any():
        return {"time": name, "time_format": YEARS}
    return {"time": name} if name.strip().lower() in YEAR_NAMES else None


class TimeReader:
    """Reads the times of the column `name`, batch by batch.

    Attributes:
        has_clock: times are dates and times; else whole numbers.
        skipped: rows without any value at times that the clocks of the zone skip.
    """

    def __init__(self, name: str, origin: str, options: ReadOptions) -> None:
        self.name, self._origin, self._format = name, origin, options.time_format
        self._zone, snap = options.tz, options.snap
        self._snap = 0 if snap is None else round(parse_duration(snap, "snap") * 1e6)
        self._twice = set[tuple[int, int]]()
        self._num_moved, self._has_intervals = 0, False
        self._shift = 0  # of times that end a period: the clocks of its start tell the zone's time
        self._where = f"{origin}: the times in '{name}'"
        self._kind: str | None = None
        self._low, self._high = _INT64.max, _INT64.min
        self._date_formats = list(_DATE_FORMATS)
        self.time_zone: str | None = None
        self.skipped: list[int] = []

    @property
    def has_clock(self) -> bool:
        return self._kind != "whole numbers"

    def read(
        self,
        column: pa.Array,
        first_row: int,
        series: NDArray[np.int32] | None = None,
        is_empty: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.int64]:
        """Returns the times of a batch without nulls, in UTC if they have a zone.

        `first_row` is the row number of its first entry, `series` the series number of each row,
        `is_empty` says which rows have no value: these may have a time that clocks skip. Raises
        DataError: not times, or of another kind than in earlier batches.
        """
        if isinstance(column, pa.DictionaryArray):
            column = column.dictionary_decode()
        column = self._typed(column, first_row)
        if self._zone is not None and pa.types.is_timestamp(column.type) and not column.type.tz:
            shift = pa.scalar(self._shift, pa.duration("us"))
            starts = pc.subtract(column, shift) if self._shift else column
            column = self._zoned(starts, first_row, series, is_empty)
            column = pc.add(column, shift) if self._shift else column
        zone = getattr(column.type, "tz", None)
        if pa.types.is_integer(column.type):
            self._require_kind("whole numbers", first_row)
            values = np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.int64)
            forms = self._date_formats
            self._date_formats = [form for form in forms if _are_dates(column, values, form)]
        else:
            self._require_kind("times" if zone is None else "times with a time zone", first_row)
            self.time_zone = self.time_zone or (zone and (self._zone or zone))
            values = self._micro(column, zone, first_row)
            if self._snap:
                near = (values + self._snap // 2) // self._snap * self._snap
                self._num_moved += int((near != values).sum())
                values = near
        self._low = min(self._low, int(values.min()))
        self._high = max(self._high, int(values.max()))
        return values

    def finish(self, path: Path, like: Timeline | None) -> bool:
        """Converts the UTC times of a file to local times if these are regular; returns whether it
        did.

        Days and months are regular in local time, hours in UTC. Local times are used if all rows
        have the same local time of day; a table with a single time follows `like`. Raises
        DataError: whole numbers that look like dates.
        """
        if not self.has_clock:
            self._refuse_dates()
            if like is not None and like.frequency.unit != "rows":
                self._refuse_numbers()
        if self.time_zone is None:
            return False
        is_wall = None
        if like is not None and like.time_zone is not None:
            self.time_zone, is_wall = like.time_zone, like.is_wall
        times = np.memmap(path, dtype=np.int64, mode="r+")
        try:
            self._wall(times[:1])
        except pa.ArrowInvalid:
            raise DataError(
                f"{self._where} have the time zone {self.time_zone!r:.60}, which this system does"
                " not know; convert them to another"
            ) from None
        blocks = [slice(*block) for block in row_blocks(0, len(times), 1, _ROWS)]
        wall, days = self._wall(times[:_ROWS])
        hour = most_frequent(wall - days)
        if is_wall is None:
            is_wall = self._low != self._high and all(
                self._local(times[block], hour)[1].all() for block in blocks
            )
        for block in blocks if is_wall else ():
            times[block] = self._local(times[block], hour)[0]
        return is_wall

    def notes(self) -> list[str]:
        """Returns a note if times are intervals, or whole numbers that may be times since 1970."""
        if self.has_clock:
            text = f"the times in '{self.name}' are intervals: their starts are used"
            return [text] if self._has_intervals else []
        unit = unit_since_1970(self._low, self._high)
        if unit is None or unit == EXCEL:
            return []
        shown = show_time(self._low * 10**6 // EPOCH_UNITS[unit])
        return [
            f"the times in '{self.name}' are read as plain whole numbers; if they count time since"
            f" 1970 ({self._low} would be {shown}), give `time_format={unit!r}`"
        ]

    def repairs(self) -> list[str]:
        """Returns a note if times were rounded."""
        moved = counted(self._num_moved, "time")
        return [f"{moved} rounded to the nearest {Frequency(self._snap)}"] * bool(self._num_moved)

    def _typed(self, column: pa.Array, first_row: int) -> pa.Array:
        kind = column.type
        if self._format in NUMBER_FORMATS:
            if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
                what = f"{self._origin}: column '{self.name}' is {kind}, expected numbers for "
                raise DataError(f"{what}`time_format={self._format!r}`")
            given = column
            if self._format == YEARS:
                return self._months(column, first_row)
            if self._format == EXCEL:
                column = pc.multiply(
                    pc.subtract(column.cast(pa.float64(), safe=False), _EXCEL_1970), 86_400.0
                )
            unit = "s" if self._format == EXCEL else self._format
            self._require_years(column, given, unit, first_row)
            if pa.types.is_floating(column.type):
                return micro_of_floats(column, 10**6 / EPOCH_UNITS[unit])
            return column.cast(pa.int64()).cast(pa.timestamp(unit))
        if is_text(kind):
            return self._parsed(column, first_row)
        if pa.types.is_integer(kind):
            if self._format is not None:
                return self._parsed(column.cast(pa.string()), first_row)
            return column
        if pa.types.is_date(kind):
            return column.cast(pa.timestamp("s"))
        if pa.types.is_floating(kind):
            return self._whole(column)
        if not pa.types.is_timestamp(kind):
            what = f"{self._origin}: column '{self.name}' is {kind}"
            raise DataError(f"{what}, expected times or whole numbers; convert it")
        return column

    def _months(self, column: pa.Array, first_row: int) -> pa.Array:
        """Returns years with months as fractions as the starts of the months."""
        values = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
        months = months_of(values)
        if months is None:
            row = next(
                row for row in range(len(values)) if months_of(values[row : row + 1]) is None
            )
            raise DataError(
                f"{self._where} cannot be read: row {first_row + row + 1} has {values[row]};"
                f" `time_format={YEARS!r}` expects years whose fractions are months, such as"
                " 1949.083 for February of 1949"
            )
        return pa.array(months.astype("M8[M]").astype("M8[us]"))

    def _whole(self, column: pa.Array) -> pa.Array:
        """Returns numbers with a decimal point as whole ones."""
        try:
            return column.cast(pa.int64())
        except pa.ArrowInvalid:
            values = column.to_numpy(zero_copy_only=False)
        form, odd = unit_since_1970(values.min(), values.max()), [*values[values % 1 != 0], *values]
        form = YEARS if months_of(values) is not None else form
        cure = f"give `time_format={form!r}`, or" if form else "convert them, or"
        raise CurableError(
            f"{self._where} are numbers with fractions ({odd[0]}), expected times or whole"
            f" numbers; {cure} count rows instead with `ignore={self.name!r}`",
            *finding_of_format([form] if form else []),
        )

    def _zoned(
        self,
        column: pa.Array,
        first_row: int,
        series: NDArray[np.int32] | None,
        is_empty: NDArray[np.bool_] | None,
    ) -> pa.Array:
        """Returns local times with their zone.

        The hour that comes twice when summer time ends: the first of two rows of one series and
        local time is the earlier one, so rows must be in order.
        """

        def read(ambiguous: str, nonexistent: str) -> pa.Array:
            return pc.assume_timezone(
                column, self._zone, ambiguous=ambiguous, nonexistent=nonexistent
            )

        try:
            early, late = (read(which, "latest") for which in ("earliest", "latest"))
        except pa.ArrowInvalid:
            raise ConfigError(
                f"`tz={self._zone!r}` is a time zone that this system does not know, expected a"
                " name such as Europe/Berlin"
            ) from None
        skipped = np.flatnonzero(pc.not_equal(early, read("earliest", "earliest")))
        if len(skipped) and (is_empty is None or not is_empty[skipped].all()):
            row, value = first_row + int(skipped[0]) + 1, column[int(skipped[0])].as_py()
            raise DataError(
                f"{self._where}: row {row} has {value}, which the clocks of {self._zone} skip when"
                " summer time begins; leave out `tz` if the times are UTC"
            )
        self.skipped += (first_row + skipped).tolist()
        is_twice = pc.not_equal(early, late).to_numpy(zero_copy_only=False)
        if not is_twice.any():
            return early
        local = column.cast(pa.timestamp("us")).cast(pa.int64()).to_numpy()
        is_later = np.zeros(len(column), dtype=bool)
        for row in np.flatnonzero(is_twice).tolist():
            key = (0 if series is None else int(series[row]), int(local[row]))
            is_later[row] = key in self._twice
            self._twice.add(key)
        return pc.if_else(pa.array(is_later), late, early)

    def _micro(self, column: pa.Array, zone: str | None, first_row: int) -> NDArray[np.int64]:
        """Returns times as microseconds since 1970."""
        is_finer = column.type.unit == "ns"  # digits below a microsecond are dropped
        try:
            micro = column.cast(pa.timestamp("us", zone), safe=not is_finer)
        except pa.ArrowInvalid:
            values = column.cast(pa.int64()).to_numpy(zero_copy_only=False)
            limit = _INT64.max // (10**6 // EPOCH_UNITS[column.type.unit])
            row = int(((values > limit) | (values < -limit)).argmax())
            raise DataError(
                f"{self._origin}: the time of row {first_row + row + 1} in '{self.name}' is"
                f" {values[row]} {column.type.unit} since 1970, which does not fit 64 bits of"
                " microseconds; correct it or drop the row"
            ) from None
        return np.asarray(micro.cast(pa.int64()).to_numpy(zero_copy_only=False), dtype=np.int64)

    def _require_years(self, column: pa.Array, given: pa.Array, unit: str, first_row: int) -> None:
        """Refuses numbers since 1970 beyond the years 1 to 9999."""
        values = column.to_numpy(zero_copy_only=False)
        first, last = (bound * EPOCH_UNITS[unit] for bound in _CALENDAR)
        first, last = max(first, _INT64.min), min(last, _INT64.max)
        is_beyond = ~np.isfinite(values)
        if not is_beyond.any() and (int(values.min()) < first or int(values.max()) > last):
            is_beyond = (values < first) | (values > last)
        if is_beyond.any():
            row = int(is_beyond.argmax())
            raise DataError(
                f"{self._where} cannot be read: row {first_row + row + 1} has {given[row]};"
                f" expected the years 1 to 9999 with `time_format={self._format!r}`"
            )

    def _require_kind(self, kind: str, first_row: int) -> None:
        if self._kind is not None and kind != self._kind:
            raise DataError(
                f"{self._origin}: column '{self.name}' starts with {self._kind} and has {kind}"
                f" from row {first_row + 1}; convert all to one kind"
            )
        self._kind = kind

    def _parsed(self, column: pa.Array, first_row: int) -> pa.Array:
        if not self._has_intervals and len(column):
            self._has_intervals = starts_of(column[:1]) != column[:1]
        try:
            times = read_times(column, self._format)
            if self._zone is not None and first_row == 0 and has_late_times(column):
                steps = np.diff(np.unique(times.cast(pa.int64()).to_numpy()))
                self._shift = int(steps.min(initial=HOUR_US))
            return times
        except pa.ArrowInvalid as error:
            row, value = first_refused(column, lambda part: read_times(part, self._format))
            hint, found = hint_for_time(str(value), column)
            if self._format is not None:
                hint, found = f"expected the format of `time_format={self._format!r}`", []
            if row and str(value)[:1].isalpha() and not is_like_time(str(value)):
                hint, found = "remove such rows, as subtotals are, from the file", []
            raise CurableError(
                f"{self._where} cannot be read: row {first_row + row + 1} has {value!r:.60};"
                f" {hint}",
                *found,
            ) from error

    def _refuse_numbers(self) -> None:
        """Refuses whole numbers in place of the times of another table."""
        unit = unit_since_1970(self._low, self._high)
        cure = f"give `time_format={unit!r}`" if unit else "convert them"
        raise CurableError(
            f"{self._where} are whole numbers ({self._low}), and the table before has dates and"
            f" times; {cure}",
            *finding_of_format([unit] if unit else []),
        )

    def _refuse_dates(self) -> None:
        unit = unit_since_1970(self._low, self._high)
        if unit == EXCEL and self.name.lower() in ("ds", "date", "day"):
            raise CurableError(
                f"{self._where} are whole numbers that look like days since 1900, as in Excel"
                f" ({self._low}); give `time_format={unit!r}`, or count rows instead with"
                f" `ignore={self.name!r}`",
                *finding_of_format([unit]),
            )
        if self._date_formats and self._low != self._high:
            form = self._date_formats[0]
            first = pc.strptime(pa.array([str(self._low)]), format=form, unit="us")
            raise CurableError(
                f"{self._where} are whole numbers that look like dates ({self._low} as"
                f" {show_time(first.cast(pa.int64())[0].as_py())}); give `time_format={form!r}`,"
                f" or count rows instead with `ignore={self.name!r}`",
                *finding_of_format([form]),
            )

    def _wall(self, times: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns local times and the midnight before each."""
        utc = pa.array(np.asarray(times)).cast(pa.timestamp("us", self.time_zone))
        wall = pc.local_timestamp(utc)
        days = pc.floor_temporal(wall, unit="day")
        return wall.cast(pa.int64()).to_numpy(), days.cast(pa.int64()).to_numpy()

    def _local(
        self, times: NDArray[np.int64], hour: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns local times, and which of them are at the time of day `hour`.

        If the change to summer time skips `hour`, as midnight in some zones, the first moment
        after the change counts as `hour`.
        """
        wall, days = self._wall(times)
        usual = pa.array(days + hour).cast(pa.timestamp("us"))
        zoned = pc.assume_timezone(
            usual, self.time_zone, ambiguous="earliest", nonexistent="latest"
        )
        is_usual = (wall == days + hour) | (zoned.cast(pa.int64()).to_numpy() == times)
        return np.where(is_usual, days + hour, wall), is_usual


def _are_dates(column: pa.Array, values: NDArray[np.int64], form: str) -> bool:
    """Returns whether all numbers match a date format, with years from 1900 to 2100."""
    rest = 10 ** (len(form) - 2)  # the year has four digits, any other part two
    if values.min() < 1900 * rest or values.max() >= 2101 * rest:
        return False
    read = pc.strptime(column.cast(pa.string()), format=form, unit="us", error_is_null=True)
    return bool(read.null_count == 0)
