"""The column of times: read as microseconds since 1970, or as whole numbers that count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastlstm.errors import DataError, Message, Setting
from fastlstm.forecast.data.records import first_refused, is_text
from fastlstm.forecast.data.time_text import micro_of_floats, read_times, wanted
from fastlstm.forecast.data.timeline import Timeline, show_time

EPOCH_UNITS = {"s": 10**6, "ms": 10**3, "us": 1, "ns": 1}
"""Values of time_format for whole numbers since 1970."""
_DATE_FORMATS = ("%Y%m", "%Y%m%d", "%Y%m%d%H", "%Y%m%d%H%M", "%Y%m%d%H%M%S")
_FIRST_YEAR, _LAST_YEAR = 1900, 2100
_EPOCH_YEARS = (10 * 365 * 86_400, 130 * 365 * 86_400)
"""Seconds since 1970 within which large whole numbers may be times: 1980 to 2100."""
_CALENDAR = (-62_135_596_800, 253_402_300_799)
"""Seconds since 1970 of the first and last moment of the years 1 to 9999."""
_INT64 = np.iinfo(np.int64)
_ROWS = 1 << 20


class TimeReader:
    """Reads the times of a table, batch by batch.

    Args:
        name: of the column.
        origin: what messages call the table.
        time_format: how times are written (strptime), or the unit of whole numbers since 1970.

    Attributes:
        time_zone: of the times, or None.
        has_clock: times are times; else whole numbers.
    """

    def __init__(self, name: str, origin: str, time_format: str | None = None) -> None:
        self._name, self._origin, self._format = name, origin, time_format
        self._kind: str | None = None
        self._low, self._high = np.iinfo(np.int64).max, np.iinfo(np.int64).min
        self._date_formats = list(_DATE_FORMATS)
        self.time_zone: str | None = None

    @property
    def has_clock(self) -> bool:
        return self._kind != "whole numbers"

    def read(self, column: pa.Array, first_row: int) -> NDArray[np.int64]:
        """Returns the times of a batch, in UTC where they have a zone.

        Args:
            column: without nulls.
            first_row: the number of its first row, from 0.

        Raises:
            DataError: no times, or times of another kind than in the batches before.
        """
        if isinstance(column, pa.DictionaryArray):
            column = column.dictionary_decode()
        column = self._typed(column, first_row)
        zone = getattr(column.type, "tz", None)
        if pa.types.is_integer(column.type):
            self._see("whole numbers", first_row)
            values = np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.int64)
            self._note_dates(column, values)
        else:
            self._see("times" if zone is None else "times with a time zone", first_row)
            self.time_zone = self.time_zone or zone
            values = self._micro(column, zone, first_row)
        self._low = min(self._low, int(values.min()))
        self._high = max(self._high, int(values.max()))
        return values

    def finish(self, path: Path, like: Timeline | None) -> bool:
        """Turns the times of a zone into those its clocks show, where these are regular.

        Days and months are regular by the clocks, hours are in UTC. Clocks that show one hour of
        the day in every row of the table are taken; a table of a single time is as `like` says.

        Args:
            path: file of all times, int64, in UTC.
            like: a table that this one must agree with, or None.

        Returns:
            Whether the times are as the clocks show them.

        Raises:
            DataError: whole numbers that read as dates.
        """
        if not self.has_clock:
            self._refuse_dates()
        if self.time_zone is None:
            return False
        if like is not None and like.time_zone is not None:
            self.time_zone, is_wall = like.time_zone, like.is_wall
        else:
            is_wall = None
        times = np.memmap(path, dtype=np.int64, mode="r+")
        try:
            self._wall(times[:1])
        except pa.ArrowInvalid:
            raise DataError(
                f"{self._origin}: the times in '{self._name}' have the time zone"
                f" {self.time_zone!r:.60}, which this system does not know; convert them to another"
            ) from None
        stretches = [slice(first, first + _ROWS) for first in range(0, len(times), _ROWS)]
        hour = self._usual_hour(times[:_ROWS])
        if is_wall is None:
            is_wall = self._low != self._high and all(
                self._by_the_clocks(times[part], hour)[1].all() for part in stretches
            )
        for part in stretches if is_wall else ():
            times[part] = self._by_the_clocks(times[part], hour)[0]
        return is_wall

    def notes(self) -> list[str]:
        """Returns what people should hear of the times."""
        if self.has_clock:
            return []
        low, high = _EPOCH_YEARS
        for unit, size in EPOCH_UNITS.items():
            per_second = 10**9 if unit == "ns" else 10**6 // size
            if low * per_second <= self._low and self._high <= high * per_second:
                shown = show_time(self._low * 10**6 // per_second)
                return [
                    Message(
                        f"the times in '{self._name}' are taken as whole numbers that count; if"
                        f" they are times since 1970 ({self._low} would be {shown}), give ",
                        Setting("time_format", unit),
                    )
                ]
        return []

    # kinds --------------------------------------------------------------------------------------

    def _typed(self, column: pa.Array, first_row: int) -> pa.Array:
        kind = column.type
        if self._format in EPOCH_UNITS:
            if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
                raise DataError(
                    f"{self._origin}: column '{self._name}' is {kind}, expected numbers for ",
                    Setting("time_format", self._format),
                )
            self._require_years(column, first_row)
            if pa.types.is_floating(kind):
                unit = str(self._format)
                return micro_of_floats(column, 1e-3 if unit == "ns" else EPOCH_UNITS[unit])
            return column.cast(pa.int64()).cast(pa.timestamp(self._format))
        if is_text(kind):
            return self._parsed(column, first_row)
        if pa.types.is_integer(kind):
            if self._format is not None:
                return self._parsed(column.cast(pa.string()), first_row)
            return column
        if pa.types.is_date(kind):
            return column.cast(pa.timestamp("s"))
        if not pa.types.is_timestamp(kind):
            raise DataError(
                f"{self._origin}: column '{self._name}' is {kind}, expected times or whole numbers;"
                " if they are seconds since 1970, give ",
                Setting("time_format", "s"),
            )
        return column

    def _micro(self, column: pa.Array, zone: str | None, first_row: int) -> NDArray[np.int64]:
        """Returns times as microseconds since 1970."""
        is_finer = column.type.unit == "ns"  # what is below a microsecond is left out
        try:
            micro = column.cast(pa.timestamp("us", zone), safe=not is_finer)
        except pa.ArrowInvalid:
            values = column.cast(pa.int64()).to_numpy(zero_copy_only=False)
            most = _INT64.max // EPOCH_UNITS[column.type.unit]
            row = int(np.flatnonzero((values > most) | (values < -most))[0])
            raise DataError(
                f"{self._origin}: the time of row {first_row + row + 1} in '{self._name}' is"
                f" {values[row]} {column.type.unit} since 1970, more microseconds than 64 bits"
                " hold; correct it or leave the row out"
            ) from None
        return np.asarray(micro.cast(pa.int64()).to_numpy(zero_copy_only=False), dtype=np.int64)

    def _require_years(self, column: pa.Array, first_row: int) -> None:
        """Refuses numbers since 1970 that are beyond the years 1 to 9999 in the unit given."""
        values = column.to_numpy(zero_copy_only=False)
        unit = str(self._format)
        per_second = 10**9 if unit == "ns" else 10**6 // EPOCH_UNITS[unit]
        first, last = (bound * per_second for bound in _CALENDAR)
        is_beyond = ~np.isfinite(values)
        if not is_beyond.any() and (int(values.min()) < first or int(values.max()) > last):
            is_beyond = (values < max(first, _INT64.min)) | (values > min(last, _INT64.max))
        if is_beyond.any():
            row = int(np.flatnonzero(is_beyond)[0])
            raise DataError(
                f"{self._origin}: the times in '{self._name}' cannot be read, that of row"
                f" {first_row + row + 1} is {values[row]}; expected numbers of the years 1 to 9999,"
                " as ",
                Setting("time_format", unit),
                " says",
            )

    def _see(self, kind: str, first_row: int) -> None:
        if self._kind is not None and kind != self._kind:
            raise DataError(
                f"{self._origin}: column '{self._name}' holds {self._kind} first and {kind} from"
                f" row {first_row + 1} on; bring all to one kind"
            )
        self._kind = kind

    def _parsed(self, column: pa.Array, first_row: int) -> pa.Array:
        try:
            return read_times(column, self._format)
        except pa.ArrowInvalid as error:
            row, value = first_refused(column, lambda part: read_times(part, self._format))
            told: tuple[object, ...] = wanted(str(value))
            if self._format is not None:
                told = ("expected them as ", Setting("time_format", self._format), " says")
            raise DataError(
                f"{self._origin}: the times in '{self._name}' cannot be read, that of row"
                f" {first_row + row + 1} is {value!r:.60}; ",
                *told,
            ) from error

    # dates as whole numbers ---------------------------------------------------------------------

    def _note_dates(self, column: pa.Array, values: NDArray[np.int64]) -> None:
        """Leaves the formats that all numbers so far can be read by."""
        self._date_formats = [
            form for form in self._date_formats if _are_dates(column, values, form)
        ]

    def _refuse_dates(self) -> None:
        if self._date_formats and self._low != self._high:
            form = self._date_formats[0]
            first = pc.strptime(pa.array([str(self._low)]), format=form, unit="us")
            raise DataError(
                f"{self._origin}: the times in '{self._name}' are whole numbers that read as dates"
                f" ({self._low} as {show_time(first.cast(pa.int64())[0].as_py())}); give ",
                Setting("time_format", form),
                ", or leave the column out with ",
                Setting("ignore", [self._name]),
                ", so that rows are counted",
            )

    # time zones ---------------------------------------------------------------------------------

    def _zoned(self, times: NDArray[np.int64]) -> pa.Array:
        return pa.array(np.asarray(times)).cast(pa.timestamp("us", self.time_zone))

    def _wall(self, times: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns what the clocks show, and the midnight before it."""
        wall = pc.local_timestamp(self._zoned(times))
        days = pc.floor_temporal(wall, unit="day")
        return wall.cast(pa.int64()).to_numpy(), days.cast(pa.int64()).to_numpy()

    def _usual_hour(self, times: NDArray[np.int64]) -> int:
        """Returns the time of the day, in microseconds, that the clocks show most often."""
        wall, days = self._wall(times)
        values, counts = np.unique(wall - days, return_counts=True)
        return int(values[counts.argmax()])

    def _by_the_clocks(
        self, times: NDArray[np.int64], hour: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns what the clocks show, and where that is the usual hour.

        Where the change to summer time left that hour out, as midnight in some zones, the first
        moment after the change stands for it.
        """
        wall, days = self._wall(times)
        usual = pa.array(days + hour).cast(pa.timestamp("us"))
        zoned = pc.assume_timezone(
            usual, self.time_zone, ambiguous="earliest", nonexistent="latest"
        )
        is_usual = (wall == days + hour) | (zoned.cast(pa.int64()).to_numpy() == times)
        return np.where(is_usual, days + hour, wall), is_usual


def _are_dates(column: pa.Array, values: NDArray[np.int64], form: str) -> bool:
    """Returns whether all numbers can be read by a format, as years of 1900 to 2100."""
    digits = {"%Y": 4, "%m": 2, "%d": 2, "%H": 2, "%M": 2, "%S": 2}
    rest = 10 ** (sum(digits[form[k : k + 2]] for k in range(0, len(form), 2)) - 4)
    if values.min() < _FIRST_YEAR * rest or values.max() >= (_LAST_YEAR + 1) * rest:
        return False
    read = pc.strptime(column.cast(pa.string()), format=form, unit="us", error_is_null=True)
    return bool(read.null_count == 0)
