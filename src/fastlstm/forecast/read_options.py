"""Options of reading a table; `ForecastConfig` has them too."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, fields
from typing import Literal

from fastlstm.errors import ConfigError

Gaps = Literal["split", "fill"]
Disorder = Literal["error", "sort"]
Duplicates = Literal["error", "first", "last"]
Names = tuple[str, ...]
Numbers = tuple[float | str, ...]
"""Numbers for all columns, and texts such as "humidity=-1" for one column."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    r"""How a table is read; each table may have its own options.

    Attributes:
        gaps: split cuts series at missing rows, fill inserts rows without values; default is fill
            for short gaps that add at most a quarter of the rows, else split.
        disorder: rows that are not in order of time are an error, or are sorted.
        duplicates: rows with the same timestamp are an error, or the first or last of them is kept.
        missing_value: numbers that mean a missing value, such as -9999,-99.9 in all columns, or
            humidity=-1 in one.
        keep_value: numbers, in all columns or in one, that look like codes of missing values and
            are not.
        time_format: format of times, such as %Y%m%d; or s, ms, us, ns since 1970; or excel: days
            since 1900.
        tz: time zone of times without one, such as Europe/Berlin; the hour that comes twice in
            autumn is read in order.
        snap: round times to multiples of a duration, such as 1h.
        delimiter: sign between the columns of a CSV; default is the most frequent of , ; tab | in
            its header.
        decimal: decimal mark of a CSV.
        thousands: mark between groups of three digits of a CSV; default none.
        encoding: encoding of a CSV, such as cp1252 or gb18030.
        header: the first line of a CSV names its columns; else their names are 1, 2 ….
        quotes: a CSV may have texts in double quotes; else double quotes are ordinary characters.
        escape: character of a CSV before a quote that is part of a text, such as \; by default
            such a quote is doubled.
        units: read numbers of a CSV with signs beside them: $ or other currencies, %, K, M and B
            for thousands, millions and billions, parentheses for negative numbers, and < (below a
            limit), which is read as half of the number.
        skip_rows: lines of a CSV before its header.
        skip_footer: lines at the end of a CSV that are no rows.
        skip_below: lines of a CSV below its header that are no rows, such as units.
        skip_headers: leave out lines of a CSV that repeat its header.
        na: more texts of a CSV that mean a missing value.
        look: refuse a CSV whose first and last 1,000 lines look like another format.
        wide: a column for each time, month of a year or series, instead of a row for each of both.
    """

    gaps: Gaps | None = None
    disorder: Disorder = "error"
    duplicates: Duplicates = "error"
    missing_value: Numbers = ()
    keep_value: Numbers = ()
    time_format: str | None = None
    tz: str | None = None
    snap: str | None = None
    delimiter: str | None = None
    decimal: str = "."
    thousands: str = ""
    encoding: str = "utf-8"
    header: bool = True
    quotes: bool = True
    escape: str | None = None
    units: bool = False
    skip_rows: int = 0
    skip_footer: int = 0
    skip_below: int = 0
    skip_headers: bool = False
    na: Names = ()
    look: bool = True
    wide: bool = False

    def __post_init__(self) -> None:
        for name in ("delimiter", "decimal", "thousands", "escape"):
            mark = getattr(self, name)
            if mark == "\\t":
                object.__setattr__(self, name, "\t")
            elif mark and len(mark) != 1:
                raise ConfigError(f"`{name}` is {mark!r:.40}, expected one character")
            elif name in ("delimiter", "escape") and mark and not "\0" < mark <= "~":
                raise ConfigError(f"`{name}` is {mark!r}, expected a character of ASCII")
        marks = [mark for mark in (self.delimiter, self.decimal, self.thousands) if mark]
        if len(set(marks)) < len(marks) or not self.decimal:
            raise ConfigError(
                f"`delimiter`, `decimal` and `thousands` are {', '.join(map(repr, marks))},"
                " expected different characters"
            )
        try:
            "".encode(self.encoding)
            if codecs.lookup(self.encoding).name in ("idna", "punycode"):  # of names of hosts
                raise LookupError
        except (LookupError, ValueError):
            raise ConfigError(
                f"`encoding` is {self.encoding!r:.40}, expected the name of a codec, such as"
                " utf-8, cp1252 or gb18030"
            ) from None


READING = tuple(field.name for field in fields(ReadOptions))
