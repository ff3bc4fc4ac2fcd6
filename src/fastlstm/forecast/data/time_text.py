"""Parses times written as text: ISO 8601, dates with one-digit parts, or a given format."""

from __future__ import annotations

import re
from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastlstm.errors import DataError, Setting

_YEAR_FIRST = (
    r"^\s*(?P<year>\d{4})[-/.](?P<month>\d{1,2})[-/.](?P<day>\d{1,2})"
    r"(?:[T ]\s*(?P<hour>\d{1,2}):(?P<minute>\d{2})"
    r"(?::(?P<second>\d{2})(?P<rest>\.\d{1,6})?)?)?\s*$"
)
_YEAR_LAST = re.compile(
    r"\s*\d{1,2}([-/.])\d{1,2}[-/.](\d{2}|\d{4})(?: (\d{1,2}:\d{2}(:\d{2})?))?\s*"
)

_ANY_DATE = (
    r"^\s*([A-Z][a-z]{2,8}\.?,? )?"  # the day of the week
    r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}"
    r"|[0-3]?\d[-/. ]+([0-3]?\d|[A-Za-z]{3,9})[-/., ]+(\d{4}|\d{2})"
    r"|[A-Za-z]{3,9}\.? \d{1,2},? \d{4})"
    r"([T ,]+\d{1,2}:\d{2}.*)?\s*$"
)
"""Dates in many forms, with or without a time of day."""


def read_times(column: pa.Array, form: str | None = None) -> pa.Array:
    """Returns texts as timestamps in microseconds, in UTC if they have a zone.

    Args:
        column: texts, without nulls.
        form: strptime format; None expects year, month, day, then the time of day.

    Raises:
        pa.ArrowInvalid: a text is not a time.
        DataError: an unsupported format.
    """
    if form is not None:
        return _by_format(column, form)
    for zone in (None, "UTC"):  # with a zone as in 2016-07-01T13:00Z
        try:
            return column.cast(pa.timestamp("us", zone))
        except pa.ArrowInvalid:
            pass
    return _year_first(column)


def _year_first(column: pa.Array) -> pa.Array:
    parts = pc.extract_regex(column, _YEAR_FIRST)
    if parts.null_count:
        raise pa.ArrowInvalid("no time")
    year, *pairs = (parts.field(k) for k in range(6))
    month, day, hour, minute, second = (pc.utf8_lpad(part, 2, "0") for part in pairs)
    text = _join(" ", _join("-", year, month, day), _join(":", hour, minute, second))
    return _join("", text, parts.field(6)).cast(pa.timestamp("us"))


def _join(mark: str, *texts: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(*texts, pa.scalar(mark, texts[0].type))


def _by_format(column: pa.Array, form: str) -> pa.Array:
    if "%f" not in form:
        return _real_days(column, pc.strptime(column, format=form, unit="us"), form)
    if not form.endswith((".%f", ",%f")) or form.count("%f") > 1:
        raise DataError(
            Setting("time_format", form), ": %f, a fraction of a second, is only supported at the"
            " end after a point or comma, as in ", Setting("time_format", "%Y-%m-%d %H:%M:%S.%f"),
        )  # fmt: skip
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
    try:
        return len(texts) > 0 and texts.null_count == 0 and read_times(texts) is not None
    except pa.ArrowInvalid:
        return False


def look_like_times(texts: pa.Array) -> bool:
    """Returns whether all texts look like dates in some form."""
    return len(texts) > 0 and pc.all(pc.match_substring_regex(texts, _ANY_DATE)).as_py()


def hint_for_time(value: str) -> tuple[object, ...]:
    """Returns advice on a text that is not a time, as parts of a message."""
    if re.fullmatch(_YEAR_FIRST, value):
        return ("there is no such day or time of day",)
    match = _YEAR_LAST.fullmatch(value)
    if match is None:
        form = Setting("time_format", "%d.%m.%Y %H:%M")
        return ("expected 2016-07-01 13:00:00; for another format give, for example, ", form)
    mark, year = match[1], "%Y" if len(match[2]) == 4 else "%y"
    clock = "" if match[3] is None else " %H:%M" + (":%S" if match[4] else "")
    forms = [mark.join([*pair, year]) + clock for pair in (("%d", "%m"), ("%m", "%d"))]
    day_first, month_first = (Setting("time_format", form) for form in forms)
    return ("day or month may come first: give ", day_first, " or ", month_first)


def micro_of_floats(column: pa.Array, per_unit: float) -> pa.Array:
    """Returns finite numbers since 1970 as timestamps, rounded; `per_unit` is in microseconds."""
    values = np.rint(column.cast(pa.float64()).to_numpy(zero_copy_only=False) * per_unit)
    return pa.array(values.astype(np.int64)).cast(pa.timestamp("us"))
