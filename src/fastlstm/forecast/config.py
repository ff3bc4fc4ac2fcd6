"""The typed configuration of a forecaster: `Forecaster`, flags, YAML and config.json share it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from fastlstm.errors import ConfigError, Setting
from fastlstm.system.fields import Precision, check_fields, parse_split
from fastlstm.training.options import BOUNDS, CHOICES, TrainingOptions

Channels = Literal["shared", "joint"]
Normalize = Literal["last", "standard", "none"]
Decoder = Literal["direct", "autoregressive"]
OutputKind = Literal["point", "quantiles", "student_t", "negative_binomial"]
Loss = Literal["mae", "mse", "huber"]
Gaps = Literal["split", "fill"]
Disorder = Literal["error", "sort"]
Duplicates = Literal["error", "first", "last"]
Names = tuple[str, ...]
Numbers = tuple[float, ...]
READING = ("gaps", "disorder", "duplicates", "missing_value", "keep_value", "time_format")
"""Fields that say how a table is read; another one may be read in another way."""


@dataclass(frozen=True, kw_only=True)
class ForecastConfig(TrainingOptions):
    """Options of training a forecaster. `None` means: decided by the data, and said.

    Attributes:
        horizon: steps ahead.
        target: columns to forecast; default y, or every number of a table without series.
        time: the column of times; default ds, date … or the only one that holds times.
        series: the column that tells series apart; default unique_id where there is one.
        past: columns known up to now only; default every other number.
        future: columns known ahead.
        static: columns with one value per series.
        categorical: which of past, future, static hold names.
        ignore: columns left out.
        gaps: no window crosses missing rows, or fill puts empty ones in.
        disorder: what to do with rows that go back in time.
        duplicates: which of two rows of one time counts.
        missing_value: numbers that stand for no value, such as -9999 or -9999,-99.9.
        keep_value: numbers that look as if they stood for no value and are values.
        time_format: how times are written, such as %Y%m%d; or s, ms, us, ns since 1970.
        cache_dir: where prepared tables are kept (default ~/.cache/fastlstm).
        split: training, validation and test by time, in percent, or in steps: 8640,2880,2880.
        input_size: steps of the past that are read; default is up to 720, as the data allows.
        patch: steps read, and answered, at once; default fits input and horizon.
        hidden_size: hidden units, H.
        num_layers: number of LSTM layers.
        channels: shared gives each target its own pass through one network, joint reads all.
        decoder: direct answers all patches at once, autoregressive one after the other, each
            after reading the forecasts before it.
        bidirectional: read the input both ways; for the direct decoder.
        normalize: what is taken from a window: its last value, mean and deviation, or nothing.
        tbptt: train on long series in order, so many steps at once, state carried on, in place of
            windows from zero state.
        dropout: probability before the last layer.
        output: a point, seven quantiles, Student's t, or a negative binomial of counts.
        loss: of a point: mae, mse or huber.
        budget: end this much wall clock after the start of the command (of fit), e.g. 90s, 5m:
            set-up, evaluations, judging the test part and the report are within it; default 2m
            without another end.
        batch_size: windows per step; lanes with tbptt.
        balance: draw every series equally often, however long it is.
        evaluations: how often the validation windows are looked at, evenly over the run.
    """

    default_budget: ClassVar[str] = "2m"

    horizon: int = 24
    target: Names = ()
    time: str | None = None
    series: str | None = None
    past: Names | None = None
    future: Names = ()
    static: Names = ()
    categorical: Names = ()
    ignore: Names = ()
    gaps: Gaps = "split"
    disorder: Disorder = "error"
    duplicates: Duplicates = "error"
    missing_value: Numbers = ()
    keep_value: Numbers = ()
    time_format: str | None = None
    cache_dir: str | None = None
    split: str = "70/10/20"

    input_size: int | None = None
    patch: int | None = None
    hidden_size: int = 256
    num_layers: int = 1
    channels: Channels = "shared"
    decoder: Decoder = "direct"
    bidirectional: bool = False
    normalize: Normalize = "last"
    tbptt: int | None = None
    dropout: float = 0.5
    output: OutputKind = "point"
    loss: Loss = "mae"

    balance: bool = False
    ema: float = 0.99
    evaluations: int = 16

    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        check_fields(self, _BOUNDS, _CHOICES)
        self.check_schedule()
        for field in dataclasses.fields(self):
            if str(field.type).startswith("Names"):
                names = _names(field.name, getattr(self, field.name))
                object.__setattr__(self, field.name, names)
            elif str(field.type) == "Numbers":
                numbers = _numbers(field.name, getattr(self, field.name))
                object.__setattr__(self, field.name, numbers)
        if double := set(self.missing_value) & set(self.keep_value):
            raise ConfigError(
                Setting("missing_value"),
                " and ",
                Setting("keep_value"),
                f" both hold {min(double):g}; leave it out of one",
            )
        split_of(self.split)
        if self.balance and self.tbptt is not None:
            raise ConfigError(
                Setting("balance"),
                " draws windows of all series equally often, ",
                Setting("tbptt"),
                " reads series whole; leave out one of them",
            )


_BOUNDS: dict[str, tuple[float, float]] = {
    **BOUNDS,
    "horizon": (1, 10**6),
    "input_size": (1, 10**6),
    "patch": (1, 10**6),
    "tbptt": (1, 10**6),
    "hidden_size": (1, 65_536),
    "num_layers": (1, 64),
    "dropout": (0.0, 0.95),
    "evaluations": (1, 10**6),
}
_CHOICES: dict[str, tuple[str, ...]] = {
    **CHOICES,
    "gaps": get_args(Gaps),
    "disorder": get_args(Disorder),
    "duplicates": get_args(Duplicates),
    "channels": get_args(Channels),
    "decoder": get_args(Decoder),
    "normalize": get_args(Normalize),
    "output": get_args(OutputKind),
    "loss": get_args(Loss),
}


def _names(field: str, given: Any) -> Names | None:
    """Returns column names; of a text those between commas."""
    if given is None:
        return None
    if isinstance(given, str):
        return tuple(part.strip() for part in given.split(",") if part.strip())
    if not isinstance(given, Iterable) or not all(isinstance(name, str) for name in given):
        raise ConfigError(Setting(field), f" is {given!r}, expected names of columns")
    return tuple(given)


def _numbers(field: str, given: Any) -> Numbers:
    """Returns numbers; of a text those between commas."""
    parts = [p for p in given.split(",") if p.strip()] if isinstance(given, str) else given
    try:
        parts = () if parts is None else (parts,) if isinstance(parts, int | float) else parts
        numbers = tuple(float(part) for part in parts)
    except (TypeError, ValueError):
        numbers = (math.nan,)
    if not all(math.isfinite(number) for number in numbers):
        raise ConfigError(
            Setting(field), f" is {given!r}, expected numbers, such as -9999 or -9999,-99.9"
        )
    return numbers


def split_of(text: str) -> tuple[float, ...] | tuple[int, ...]:
    """Returns shares that sum to 1 of ``"70/10/20"``, or counts of steps of ``"8640,2880,2880"``.

    Raises:
        ConfigError: neither.
    """
    if "/" in text:
        return parse_split(text)
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if len(counts) not in (2, 3) or any(count < 1 for count in counts):
        raise ConfigError(
            Setting("split"),
            f" is {text!r}, expected training/validation/test in percent, such as 70/10/20,"
            " or two or three counts of steps, such as 8640,2880,2880",
        )
    return counts
