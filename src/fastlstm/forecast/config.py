"""The typed configuration of a forecaster: for `Forecaster`, flags, YAML and config.json."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fastlstm.errors import ConfigError
from fastlstm.forecast.csv_format import CSV_OPTIONS, CsvFormat, Names
from fastlstm.system.fields import Precision, check_fields, parse_split
from fastlstm.training.options import BOUNDS, TrainingOptions

Channels = Literal["shared", "joint"]
Normalize = Literal["last", "standard", "none"]
Decoder = Literal["direct", "autoregressive"]
OutputKind = Literal["point", "quantiles", "student_t", "negative_binomial"]
Loss = Literal["mae", "mse", "huber"]
Gaps = Literal["split", "fill"]
Disorder = Literal["error", "sort"]
Duplicates = Literal["error", "first", "last"]
Numbers = tuple[float, ...]
CALENDAR = ("hour", "weekday", "year")
"""Periods of the calendar that can be future covariates."""
READING = (
    *("gaps", "disorder", "duplicates", "missing_value", "keep_value", "time_format", "tz", "snap"),
    *CSV_OPTIONS,
    "wide",
)
"""Options of reading a table; each table may have its own."""


@dataclass(frozen=True, kw_only=True)
class ForecastConfig(TrainingOptions, CsvFormat):
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
            default, for a single target without other future covariates, takes the periods that
            fit twice into the training part, if they lower the validation error of the linear
            path by 1 %.
        static: static covariates, one value per series.
        categorical: covariates that are categories.
        ignore: columns not to use.
        gaps: split cuts series at missing rows, fill inserts rows without values.
        disorder: rows that are not in order of time: an error, or sorted.
        duplicates: rows with the same timestamp: an error, or keep the first or last.
        missing_value: numbers that mean a missing value, such as -9999 or -9999,-99.9.
        keep_value: numbers that look like codes of missing values and are not.
        time_format: format of times, such as %Y%m%d; or s, ms, us, ns since 1970; or excel: days
            since 1900.
        tz: time zone of times without one, such as Europe/Berlin; the hour that comes twice in
            autumn is read in order.
        snap: round times to multiples of a duration, such as 1h.
        wide: a column for each time, month of a year or series, instead of a row for each of both.
        cache_dir: cache of prepared tables (default ~/.cache/fastlstm).
        split: train/validation/test by time, in percent, or in steps: 8640,2880,2880.
        input_size: past steps that the model reads; default up to 720, if the data allows.
        patch: time steps per LSTM step; default fits input and horizon.
        hidden_size: hidden units, H.
        num_layers: number of LSTM layers.
        channels: shared runs each target alone through one network, joint all targets together.
        linear: add to the LSTM a linear path with the weights of ridge regression on lags and
            future covariates; default for a single target.
        decoder: direct forecasts all patches at once; autoregressive forecasts one after another,
            each from those before it.
        bidirectional: read the input in both directions (direct decoder only).
        normalize: per window: subtract the last value, standardize, or nothing.
        tbptt: truncated backpropagation: train on series in order, in chunks of N steps with the
            state carried over, not on windows.
        dropout: dropout before the output layer.
        output: point forecasts, seven quantiles, Student's t, or negative binomial for counts.
        loss: loss of point forecasts.
        budget: wall-clock time of the whole command (of fit), e.g. 90s, 5m, with setup,
            evaluations, the test and the report; default 2m without --steps or --epochs.
        batch_size: windows per step; lanes with tbptt.
        balance: sample all series equally often, whatever their length.
        evaluations: number of validations, evenly spaced over the run; default up to 16 that take
            about 3 % of the time.
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
    gaps: Gaps = "split"
    disorder: Disorder = "error"
    duplicates: Duplicates = "error"
    missing_value: Numbers = ()
    keep_value: Numbers = ()
    time_format: str | None = None
    tz: str | None = None
    snap: str | None = None
    wide: bool = False
    cache_dir: str | None = None
    split: str = "70/10/20"

    input_size: int | None = None
    patch: int | None = None
    hidden_size: int = 256
    num_layers: int = 1
    channels: Channels = "shared"
    linear: bool | None = None
    decoder: Decoder = "direct"
    bidirectional: bool = False
    normalize: Normalize = "last"
    tbptt: int | None = None
    dropout: float = 0.5
    output: OutputKind = "point"
    loss: Loss = "mae"

    balance: bool = False
    ema: float = 0.99
    evaluations: int | None = None

    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        check_fields(self, _BOUNDS)
        CsvFormat.__post_init__(self)
        self.check_schedule()
        for field in dataclasses.fields(self):
            read = _READERS.get(str(field.type))
            if read is not None:
                object.__setattr__(self, field.name, read(field.name, getattr(self, field.name)))
        if self.calendar is not None:
            object.__setattr__(self, "calendar", _calendar(self.calendar))
        if double := set(self.missing_value) & set(self.keep_value):
            raise ConfigError(
                f"`missing_value` and `keep_value` both hold {min(double):g}; leave it out of one"
            )
        split_of(self.split)
        if self.balance and self.tbptt is not None:
            raise ConfigError(
                "`balance` samples windows of all series equally often, `tbptt` reads whole series;"
                " leave out one of them"
            )


_BOUNDS: dict[str, tuple[float, float]] = {
    **BOUNDS,
    **dict.fromkeys(("skip_rows", "skip_footer", "skip_below"), (0, 10**6)),
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


def _calendar(parts: Names) -> Names:
    """Returns the parts of a calendar in the order of `CALENDAR`; nothing for "none"."""
    if unknown := [part for part in parts if part not in ("none", *CALENDAR)]:
        raise ConfigError(
            f"`calendar` is '{unknown[0]}', expected some of {', '.join(CALENDAR)}, or none"
        )
    return tuple(part for part in CALENDAR if part in parts)


def _numbers(field: str, value: Any) -> Numbers:
    """Returns numbers; of a text those between commas."""
    parts = [p for p in value.split(",") if p.strip()] if isinstance(value, str) else value
    try:
        parts = () if parts is None else (parts,) if isinstance(parts, int | float) else parts
        numbers = tuple(float(part) for part in parts)
    except (TypeError, ValueError):
        numbers = (math.nan,)
    if not all(math.isfinite(number) for number in numbers):
        raise ConfigError(f"`{field}` is {value!r}, expected numbers, such as -9999 or -9999,-99.9")
    return numbers


_READERS = {"Names": _names, "Names | None": _names, "Numbers": _numbers}


def split_of(text: str) -> tuple[float, ...] | tuple[int, ...]:
    """Returns the shares, with sum 1, of ``"70/10/20"``, or the steps of ``"8640,2880,2880"``.

    Raises:
        ConfigError: another text.
    """
    if "/" in text:
        return parse_split(text)
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if len(counts) not in (2, 3) or any(count < 1 for count in counts):
        raise ConfigError(
            f"`split` is {text!r}, expected training/validation/test in percent, such as 70/10/20,"
            " or two or three counts of steps, such as 8640,2880,2880"
        )
    return counts
