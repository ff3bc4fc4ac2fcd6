"""Options of reading a table and of training a forecaster: Python, flags, YAML and config.json."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fastlstm.errors import ConfigError
from fastlstm.system.fields import Precision, check_encoding, check_fields, parse_split
from fastlstm.training.options import BOUNDS, TrainingOptions

Channels = Literal["shared", "joint"]
Normalize = Literal["last", "standard", "none", "log"]
OutputKind = Literal["point", "quantiles", "student_t", "negative_binomial"]
Loss = Literal["mae", "mse", "huber"]
Gaps = Literal["split", "fill"]
Disorder = Literal["error", "sort"]
Duplicates = Literal["error", "first", "last"]
Names = tuple[str, ...]
Numbers = tuple[float | str, ...]
"""Numbers for all columns, and texts such as "humidity=-1" for one column."""
_NUMBER = re.compile(r"((?:.*?=)??)\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(?:,|$)")
CALENDAR = ("hour", "weekday", "year")
"""Periods of the calendar that can be future covariates."""


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
            since 1900; or year: years with months as fractions.
        tz: time zone of times without one, such as Europe/Berlin; the hour that comes twice in
            autumn is read in order. Times with an offset are shown by its clocks.
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
            elif mark == "" and name in ("delimiter", "escape"):
                object.__setattr__(self, name, None)
            elif (mark or name == "decimal") and len(mark) != 1:
                raise ConfigError(f"`{name}` is {mark!r:.40}, expected one character")
            elif mark and name != "thousands" and (not "\0" < mark <= "~" or mark in '\r\n"'):
                raise ConfigError(
                    f"`{name}` is {mark!r}, expected a character of ASCII that is no quote and ends"
                    " no line"
                )
        marks = [m for m in (self.delimiter, self.decimal, self.thousands, self.escape) if m]
        if len(set(marks)) < len(marks):
            raise ConfigError(
                "`delimiter`, `decimal`, `thousands` and `escape` are"
                f" {', '.join(map(repr, marks))}, expected different characters"
            )
        check_encoding(self.encoding)


READING = tuple(field.name for field in dataclasses.fields(ReadOptions))


@dataclass(frozen=True, kw_only=True)
class ForecastConfig(TrainingOptions, ReadOptions):
    """Options of training a forecaster. `None`: chosen from the data and reported.

    Attributes:
        horizon: number of steps to forecast.
        target: columns to forecast; default y, or all numeric columns of a single series.
        time: column of timestamps; default ds, date … or the only column with times. Names with
            commas in between are joined: Date,Time.
        series: column with the name of the series; default unique_id if it exists. Names with
            commas in between are joined: store,item.
        past: past covariates, unknown in the future; default all other numeric columns.
        future: future covariates, known in advance.
        calendar: sines and cosines of hour, weekday, year as future covariates, or none. The
            default, for a single target, takes the periods that fit twice into the training part,
            the year if it fits in 1.5 times, if they lower the validation error of the linear path
            by 1 %.
        static: static covariates, one value per series.
        categorical: covariates that are categories.
        ignore: columns not to use.
        cache_dir: cache of prepared tables (default ~/.cache/fastlstm).
        split: train/validation/test by time, in percent, or in steps: 8640,2880,2880; rest,48,48:
            the last 48 rows of each series for the test, the 48 before them for validation.
        input_size: past steps that the model reads; default up to 720, if the data allows.
        pad_start: empty rows before each series, so that series shorter than the input are trained
            on and forecast; default: as many as an input of up to 4 horizons needs, if one in ten
            series is too short for it.
        patch: time steps per LSTM step; default fits input and horizon.
        hidden_size: hidden units, H.
        num_layers: number of LSTM layers.
        channels: shared forecasts each target from its own past, by one network; joint forecasts
            all targets from the past of all. The default is shared; joint for 2 to 64 targets if
            the lags of the other targets lower the error of a linear forecast on newer windows by
            1 %.
        linear: add to the LSTM a linear path with the weights of ridge regression on lags and
            future covariates; default for a single target.
        effects: learn first, by a small network, what the columns known in advance and the calendar
            add to the targets of the same step, and forecast the rest; default: if this lowers the
            validation error of the linear path by 1 %, in short tables by more.
        bidirectional: read the input in both directions.
        normalize: per window: subtract the last value, standardize, nothing, or subtract the last
            value of the logarithms. The default is last; log for a single target that is never
            below 0, and 0 never or in 1 % of the rows or more, if it lowers the validation error of
            the linear path by 1 %.
        non_negative: no forecast and no quantile is below 0 (outputs point and quantiles); the
            default where no target is below 0, and each is 0 in 1 % of the rows or more.
        tbptt: truncated backpropagation: train on series in order, in chunks of N steps with the
            state carried over, not on windows.
        dropout: dropout before the output layer.
        output: point forecasts, seven quantiles, Student's t, or negative binomial for counts.
        loss: loss of point forecasts.
        budget: wall-clock time of the whole command (of fit), e.g. 90s, 5m, with setup,
            evaluations, the test and the report; default 2m without --steps or --epochs.
        batch_size: windows per step; lanes with tbptt.
        balance: sample all series equally often, whatever their length.
        evaluations: number of validations, evenly spaced over the run; by default up to 16, which
            take about 3 % of the time.
    """

    default_budget: ClassVar[str] = "2m"

    horizon: int = 24
    target: Names = ()
    time: str | None = None
    series: str | None = None
    past: Names | None = None
    future: Names = ()
    calendar: Names | None = None
    static: Names = ()
    categorical: Names = ()
    ignore: Names = ()
    cache_dir: str | None = None
    split: str = "70/10/20"

    input_size: int | None = None
    pad_start: int | None = None
    patch: int | None = None
    hidden_size: int = 256
    num_layers: int = 1
    channels: Channels | None = None
    linear: bool | None = None
    effects: bool | None = None
    bidirectional: bool = False
    normalize: Normalize | None = None
    non_negative: bool | None = None
    tbptt: int | None = None
    dropout: float = 0.1
    output: OutputKind = "point"
    loss: Loss = "mae"

    balance: bool = False
    ema: float = 0.99
    evaluations: int | None = None

    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        check_fields(self, _BOUNDS)
        ReadOptions.__post_init__(self)
        self.check_schedule()
        for field in dataclasses.fields(self):
            read = _READERS.get(str(field.type))
            if read is not None:
                object.__setattr__(self, field.name, read(field.name, getattr(self, field.name)))
        if self.calendar is not None:
            if unknown := [part for part in self.calendar if part not in ("none", *CALENDAR)]:
                raise ConfigError(
                    f"`calendar` is '{unknown[0]}', expected some of {', '.join(CALENDAR)}, or none"
                )
            chosen = tuple(part for part in CALENDAR if part in self.calendar)
            object.__setattr__(self, "calendar", chosen)
        if double := set(self.missing_value) & set(self.keep_value):
            shown = ", ".join(c if isinstance(c, str) else f"{c:g}" for c in double)
            raise ConfigError(
                f"`missing_value` and `keep_value` both hold {shown}; leave it out of one"
            )
        split_of(self.split)
        if self.balance and self.tbptt is not None:
            raise ConfigError(
                "`balance` samples windows of all series equally often, `tbptt` reads whole series;"
                " leave out one of them"
            )


_BOUNDS: dict[str, tuple[float, float]] = {
    **BOUNDS,
    **dict.fromkeys(("skip_rows", "skip_footer", "skip_below", "pad_start"), (0, 10**6)),
    **dict.fromkeys(("horizon", "input_size", "patch", "tbptt", "evaluations"), (1, 10**6)),
    "hidden_size": (1, 65_536),
    "num_layers": (1, 64),
    "dropout": (0.0, 0.95),
}


def _names(field: str, value: Any) -> Names | None:
    """Returns column names; a string has commas in between."""
    if value is None:
        return None
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if not isinstance(value, Iterable) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"`{field}` is {value!r}, expected names of columns")
    return tuple(value)


def _numbers(field: str, value: Any) -> Numbers:
    """Returns numbers and strings "COLUMN=NUMBER"; a string has commas in between."""
    text = value
    if isinstance(value, Mapping):
        pairs = {name: c if isinstance(c, list | tuple) else [c] for name, c in value.items()}
        text = [f"{name}={code}" for name, codes in pairs.items() for code in codes]
    if not isinstance(text, str):
        parts = (text,) if isinstance(text, int | float) else () if text is None else text
        text = ",".join(map(str, parts)) if isinstance(parts, Iterable) else "?"
    found = list(_NUMBER.finditer(text))
    if "".join(match[0] for match in found) != text or not all(
        math.isfinite(float(match[2])) for match in found
    ):
        raise ConfigError(
            f"`{field}` is {value!r}, expected numbers, such as -9999 or -9999,-99.9, or of one"
            " column humidity=-1"
        )
    return tuple(match[1].strip() + match[2] if match[1] else float(match[2]) for match in found)


_READERS = {"Names": _names, "Names | None": _names, "Numbers": _numbers}


def split_of(text: str) -> tuple[float, ...] | tuple[int, ...]:
    """Returns the shares, with sum 1, of ``"70/10/20"``, or the steps of ``"8640,2880,2880"``; of
    ``"rest,48,48"`` the first is 0. Raises ConfigError: another text."""
    if "/" in text:
        return parse_split(text)
    first, *others = (part.strip() for part in text.split(","))
    is_rest = first == "rest" and len(others) == 2
    try:
        counts = tuple(int(part) for part in ([] if is_rest else [first]) + others)
    except ValueError:
        counts = ()
    if len(counts) not in (2, 3) or any(count < 1 for count in counts):
        raise ConfigError(
            f"`split` is {text!r}, expected training/validation/test in percent, such as 70/10/20,"
            " two or three counts of steps, such as 8640,2880,2880, or rest,48,48: the last rows of"
            " each series"
        )
    return (0, *counts) if is_rest else counts
