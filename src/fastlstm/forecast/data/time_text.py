"""Parses times written as text: ISO 8601, dates with one-digit parts, periods such as 2016-W05,
1950Q1, Q1 1950 and 1990M01, or a given format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastlstm.errors import DataError
from fastlstm.forecast.data.problems import Finding
from fastlstm.forecast.data.timeline import DAY_US

_YEAR_FIRST = (
    r"^\s*(?P<year>\d{4})[-/. ](?P<month>\d{1,2})[-/. ](?P<day>\d{1,2})"
    r"(?:[T ]\s*(?P<hour>\d{1,2})(?:[:.](?P<minute>\d{2})"
    r"(?:[:.](?P<second>\d{2})(?P<rest>\.\d{1,6})?)?)?)?\s*$"
)
_PERIOD = r"^\s*(?P<year>\d{4})[-/ ]?(?P<kind>[WQM])(?P<number>\d{1,2})\s*$"
_QUARTER_FIRST = r"^\s*(?:Q([1-4])|([1-4])Q)[-/ ]?(\d{4})\s*$"
_MONTH = r"^\s*(\d{4})[- ](\d{1,2})\s*$"
YEAR_NAMES = ("year", "yr", "jahr", "année", "annee", "anno", "año", "ano", "jaar", "rok", "år")
PERIODS = {
    **dict.fromkeys(("week", "wk", "isoweek", "iso_week", "woche", "kw", "semaine", "semana"), "W"),
    **dict.fromkeys(("quarter", "qtr", "quartal", "trimestre"), "Q"),
}
"""Names of columns that are periods of a year, with their letter."""
_NUM_PERIODS = {"W": 53, "Q": 4, "M": 12}
_MONTH_NAMES = (
    *("jan", "feb|f[ée]v", "m[aä]r|mrz", "apr|avr", "ma[iy]", "jun|juin", "jul|juil"),
    *("aug|ao[uû]", "sep", "o[ck]t", "nov", "de[cz]|déc"),
)
_OF_DATABASES = (  # 2024-01-01 00:00:00 UTC, … 00:00:00.000 +0000, … 00:00:00.0000000 +00:00
    (r" (?:\+0000 )?UTC\s*$", "Z"),
    (r"(:\d\d)(?:(\.\d{1,6})\d*)? ?([+-]\d\d:?\d\d|Z)?\s*$", r"\1\2\3"),
)
_LATE = r"^(.*[T ])24((?:[:.]00)+)\s*$|^(\d{4}\D\d{1,2}\D\d{1,2} )24$"
"""24 o'clock, the end of a day."""
_FIRST_ROWS = 100_000
"""Times that a format must read to be proposed."""
_INTERVAL = r"^(.*\d\S*)\s+(?:-|–|to|/)\s+\S*\d.*$"
_DATES = (
    *("%d-%m-%Y", "%m-%d-%Y", "%d-%m-%y", "%m-%d-%y", "%d-%b-%Y", "%d-%B-%Y", "%d-%b-%y"),
    *("%b-%d-%Y", "%Y-%b-%d", "%Y-%m-%d", "%m-%Y", "%b-%Y", "%B-%Y", "%b-%y", "%Y-%m", "%Y-%b"),
    "%Y-%B",
)
_OTHER_DATES = ("%Y%m%d", "%d%m%Y", "%b %d, %Y", "%B %d, %Y", "%a %d %b %Y", "%a, %d %b %Y")
_CLOCKS = (
    *("", " %H:%M", " %H:%M:%S", " %H.%M", " %H.%M.%S", " %I:%M %p", " %I:%M:%S %p"),
    *(", %H:%M", "T%H:%M:%S", " %H", " %H:%M:%S.%f", " %H:%M:%S GMT", "T%H%M%SZ"),
)

_ANY_DATE = (
    r"^\s*([A-Z][a-z]{2,8}\.?,? )?"  # the day of the week
    r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}"
    r"|[0-3]?\d[-/. ]+([0-3]?\d|[A-Za-z]{3,9})[-/., ]+(\d{4}|\d{2})"
    r"|[A-Za-z]{3,9}\.? \d{1,2},? \d{4}|\d{8}T\d{6}Z)"
    r"([T ,]+\d{1,2}[:.]\d{2}.*)?\s*$"
)
"""Dates in many forms, with or without a time of day."""


def read_times(column: pa.Array, form: str | None = None) -> pa.Array:
    """Returns texts as timestamps in microseconds, in UTC if they have a zone; of an interval, a
    week (ISO 8601), a quarter or a month its start. 24:00 is 00:00 of the next day. There are no
    nulls; without a strptime format the order is year, month, day, then the time of day.

    Raises:
        pa.ArrowInvalid: a text is not a time.
        DataError: an unsupported format.
    """
    try:
        return _read(column, form)
    except pa.ArrowInvalid:
        starts = starts_of(column)
        for pattern, text in _OF_DATABASES if form is None else ():
            starts = pc.replace_substring_regex(starts, pattern, text)
        is_late = pc.match_substring_regex(starts, _LATE)
        if not pc.any(is_late).as_py() and starts.equals(column):
            raise
        times = _read(pc.replace_substring_regex(starts, _LATE, r"\1\300\2"), form)
        return pc.if_else(is_late, pc.add(times, pa.scalar(DAY_US, pa.duration("us"))), times)


def has_late_times(column: pa.Array) -> bool:
    """Returns whether a time of day is 24:00, the end of a period."""
    return bool(pc.any(pc.match_substring_regex(column, _LATE)).as_py())


def _read(column: pa.Array, form: str | None) -> pa.Array:
    if form is not None:
        return _by_format(column if " - " in form else starts_of(column), form)
    column = pc.replace_substring_regex(starts_of(column), _MONTH, r"\1-\2-01")
    for zone in (None, "UTC"):  # with a zone as in 2016-07-01T13:00Z
        with suppress(pa.ArrowInvalid):
            return column.cast(pa.timestamp("us", zone))
    column = pc.replace_substring_regex(column, _QUARTER_FIRST, r"\3Q\1\2")
    periods = pc.extract_regex(column, _PERIOD)
    if not periods.null_count:
        return _starts_of_periods(periods)
    parts = pc.extract_regex(column, _YEAR_FIRST)
    if parts.null_count:
        raise pa.ArrowInvalid("no time")
    year, *pairs = (parts.field(k) for k in range(6))
    month, day, hour, minute, second = (pc.utf8_lpad(part, 2, "0") for part in pairs)
    text = _join(" ", _join("-", year, month, day), _join(":", hour, minute, second))
    return _join("", text, parts.field(6)).cast(pa.timestamp("us"))


def parts_of(names: str) -> list[str]:
    """Returns the columns that together hold times or names: "Date" and "Time" of "Date,Time"."""
    return [name.strip() for name in names.split(",")]


def month_numbers(texts: pa.Array) -> pa.Array:
    """Returns English, German and French names of months as numbers, other texts as they are."""
    for number, name in enumerate(_MONTH_NAMES, 1):
        texts = pc.replace_substring_regex(texts, rf"(?i)^\s*(?:{name})\pL*\.?\s*$", str(number))
    return texts


def starts_of(column: pa.Array) -> pa.Array:
    """Returns the starts of intervals ("00:00 - 01:00"), and other texts as they are."""
    return pc.replace_substring_regex(column, _INTERVAL, r"\1")


def formats_of(texts: pa.Array) -> list[str]:
    """Returns the strptime formats that read all texts; of several the ones with the fewest turns
    between ascending and descending, and without any, with the most regular steps: times in order,
    daily or monthly ones decide on day and month."""
    dates = [form.replace("-", mark) for mark in "-/. " for form in _DATES] + list(_OTHER_DATES)
    first, found = texts.slice(0, 1), list[tuple[tuple[int, int], str]]()
    for form in ("%Y", *dict.fromkeys(date + clock for date in dates for clock in _CLOCKS)):
        with suppress(pa.ArrowInvalid):
            if 1700 <= pc.year(read_times(first, form))[0].as_py() <= 2300:
                found.append((_num_odd_steps(read_times(texts, form)), form))
    found.sort(key=lambda one: one[0])
    turns = found[0][0][0] if found else 0
    # Of several series in turn the steps decide nothing: gaps and first days are odd steps too.
    return [form for count, form in found if count == found[0][0] or 0 < turns == count[0]]


def finding_of_format(forms: Sequence[str]) -> list[Finding]:
    """Returns what times in one of some formats look like; nothing without any."""
    others = f" (or {' or '.join(forms[1:])}: day or month may come first)" if forms[1:] else ""
    return [(f"times as {form}{others}", {"time_format": form}) for form in forms[:1]]


def _num_odd_steps(times: pa.Array) -> tuple[int, int]:
    """Returns how many steps between different times go against the others, and how many are not
    the usual one, in days or months."""
    micro = times.cast(pa.int64()).to_numpy()
    micro = micro[np.flatnonzero(np.diff(micro, prepend=micro[0] - 1))]
    months = micro.astype("M8[us]").astype("M8[M]")
    is_same_day = np.diff(micro - months.astype("M8[us]").astype(np.int64)) == 0
    by_month = np.diff(months.astype(np.int64))[is_same_day]
    usual = [np.unique(steps, return_counts=True)[1] for steps in (np.diff(micro), by_month)]
    num_back = int((np.diff(micro) < 0).sum())
    odd = len(micro) - max(int(counts.max(initial=0)) for counts in usual)
    return min(num_back, len(micro) - 1 - num_back), odd


def _starts_of_periods(periods: pa.Array) -> pa.Array:
    years, kinds, numbers = (periods.field(k) for k in range(3))
    kind, number = kinds[0].as_py(), numbers.cast(pa.int64()).to_numpy()
    if len(pc.unique(kinds)) > 1 or number.min() < 1 or number.max() > _NUM_PERIODS[kind]:
        raise pa.ArrowInvalid("no period")
    year = years.cast(pa.int64()).to_numpy() - 1970
    if kind == "W":  # the 4th of January lies in the first week, which begins on Monday
        fourth = year.astype("M8[Y]").astype("M8[D]").astype(np.int64) + 3
        days = fourth - (fourth + 3) % 7 + 7 * (number - 1)
        if ((days + 3).astype("M8[D]").astype("M8[Y]").astype(np.int64) != year).any():
            raise pa.ArrowInvalid("no such week")
        start = days.astype("M8[D]")
    else:
        months = 3 if kind == "Q" else 1
        start = (12 * year + months * (number - 1)).astype("M8[M]")
    return pa.array(start.astype("M8[us]"))


def _join(mark: str, *texts: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(*texts, pa.scalar(mark, texts[0].type))


def _by_format(column: pa.Array, form: str) -> pa.Array:
    if "%f" not in form:
        return _real_days(column, pc.strptime(column, format=form, unit="us"), form)
    if not form.endswith((".%f", ",%f")) or form.count("%f") > 1:
        raise DataError(
            f"`time_format={form!r}`: %f, a fraction of a second, is only supported at the end"
            " after a point or comma, as in `time_format='%Y-%m-%d %H:%M:%S.%f'`"
        )
    parts = pc.extract_regex(column, r"^(?P<head>.*)[.,](?P<fraction>\d{1,6})\s*$")
    if parts.null_count:
        raise pa.ArrowInvalid("no fraction")
    whole = _by_format(parts.field(0), form[:-3])
    fraction = pc.utf8_rpad(parts.field(1), 6, "0").cast(pa.int64())
    return pc.add(whole.cast(pa.int64()), fraction).cast(pa.timestamp("us"))


def _real_days(column: pa.Array, times: pa.Array, form: str) -> pa.Array:
    """Returns `times` after refusing dates such as 31 February, which Arrow reads as 2 March."""
    is_early = pc.less_equal(pc.day(times), 3)
    texts, early = column.filter(is_early), times.filter(is_early)
    back = pc.strftime(early.cast(pa.timestamp("s"), safe=False), format=form)
    differs = pc.not_equal(_plain(back), _plain(texts.cast(back.type)))
    for text in pc.unique(texts.filter(differs)).to_pylist():
        try:
            datetime.strptime(text.strip(), form)
        except ValueError as error:
            if "bad directive" not in str(error):  # known to Arrow only
                raise pa.ArrowInvalid("no such day") from error
    return times


def _plain(texts: pa.Array) -> pa.Array:
    """Returns texts in lower case without leading zeros of numbers."""
    return pc.replace_substring_regex(pc.utf8_lower(texts), r"(^|[^0-9])0+([0-9])", r"\1\2")


def are_times(texts: pa.Array) -> bool:
    """Returns whether all texts can be read as times."""
    with suppress(pa.ArrowInvalid):
        return len(texts) > 0 and texts.null_count == 0 and read_times(texts) is not None
    return False


def are_mostly_times(texts: pa.Array) -> bool:
    """Returns whether more than half of the texts can be read as times by themselves."""
    likely = texts.filter(pc.match_substring_regex(texts, _ANY_DATE))
    kept = [text for text in likely if are_times(pa.array([text.as_py()]))]
    return 2 * len(kept) > len(texts)


def is_like_time(text: str) -> bool:
    """Returns whether a text looks like a date in some form, or like an interval of two."""
    text = text[:100]  # the pattern takes quadratic time
    span = re.match(_INTERVAL, text)
    start = text if span is None else span[1]
    return re.match(_ANY_DATE, start) is not None or re.match(_YEAR_FIRST, start) is not None


def hint_for_time(value: str, column: pa.Array) -> tuple[str, list[Finding]]:
    """Returns advice on a text of a column that is not a time, and the formats it may have."""
    if re.fullmatch(_YEAR_FIRST, value):
        return "there is no such day or time of day", []
    found = formats_of(column.slice(0, _FIRST_ROWS)) or formats_of(pa.array([value]))
    forms = [f"`time_format={form!r}`" for form in found]
    if not forms:
        return (
            "expected 2016-07-01 13:00:00; for another format give, for example,"
            " `time_format='%d.%m.%Y %H:%M'`"
        ), []
    which = "day or month may come first: " if forms[1:] else ""
    return f"{which}give {' or '.join(forms[:2])}", finding_of_format(found)


def micro_of_floats(column: pa.Array, per_unit: float) -> pa.Array:
    """Returns finite numbers since 1970 as timestamps, rounded; `per_unit` is in microseconds."""
    values = np.rint(column.cast(pa.float64()).to_numpy(zero_copy_only=False) * per_unit)
    return pa.array(values.astype(np.int64)).cast(pa.timestamp("us"))
