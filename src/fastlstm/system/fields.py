"""Checks of options: fields of dataclasses, durations, amounts, splits, keys."""

from __future__ import annotations

import codecs
import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from fastlstm.errors import ConfigError, kind_of_value, nearest_hint

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "fp32", "bf16", "fp16", "tf32"]
ConfigT = TypeVar("ConfigT")

ENDS = ("steps", "epochs", "budget")
"""Options that end a run; at most one is set."""
BELOW_1 = math.nextafter(1.0, 0.0)
"""The upper bound of a probability that is less than 1."""
_POWERS = {"": 1.0} | {
    u: 1000.0**k for k, pair in enumerate(("kK", "mM", "gG", "tT"), 1) for u in pair
}
_KINDS: dict[str, tuple[Any, str]] = {
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "bool": (bool, "True or False"),
    "str": (str, "a text"),
}


def check_fields(config: Any, bounds: Mapping[str, tuple[float, float]]) -> None:
    """Checks the fields of a dataclass, and that at most one end of a run is set.

    `bounds` are least and largest value by field. A numeric budget becomes text, NumPy numbers
    become Python's. Raises ConfigError: an invalid value; names the flag and what was expected.
    """
    check_values(config, bounds)
    ends = [name for name in ENDS if getattr(config, name) is not None]
    if len(ends) > 1:
        listed = " and ".join(f"`{end}`" for end in ends)
        raise ConfigError(f"{listed} exclude each other; choose one way to end the run")
    if config.budget is not None:
        parse_duration(config.budget)


def check_values(config: Any, bounds: Mapping[str, tuple[float, float]]) -> None:
    """Checks each field of a dataclass; see `check_fields`."""
    for field in dataclasses.fields(config):
        _check_kind(config, field.name, str(field.type))
    for name, (low, high) in bounds.items():
        value = getattr(config, name)
        if value is None:
            continue
        if not is_number(value) or not low <= value <= high:
            limit = "below 1" if high == BELOW_1 else high
            raise ConfigError(f"`{name}` is {value!r:.60}, expected a number from {low} to {limit}")
    for name, known in _literals(type(config)).items():  # type: ignore[arg-type]
        value = getattr(config, name)
        if value not in known:
            expected = ", ".join(filter(None, known))
            raise ConfigError(f"`{name}` is {value!r:.60}, expected one of {expected}")


@functools.cache
def _literals(kind: type) -> dict[str, tuple[Any, ...]]:
    """Returns the values of each field that takes certain texts, or these and None."""
    known = {}
    for name, hint in get_type_hints(kind).items():
        parts = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
        if parts:
            known[name] = get_args(parts[0]) + ((None,) if type(None) in get_args(hint) else ())
    return known


def _check_kind(config: Any, name: str, annotation: str) -> None:
    value, kind = getattr(config, name), annotation.removesuffix(" | None")
    if value is None and annotation.endswith("None"):
        return
    if is_number(value) and not isinstance(value, int | float):
        value = int(value) if is_whole(value) else float(value)
        object.__setattr__(config, name, value)
    if name == "budget" and re.fullmatch(r"\d+(\.\d+)?", str(value)):  # seconds
        object.__setattr__(config, name, f"{value}s")
    elif kind in _KINDS and (
        not isinstance(value, _KINDS[kind][0]) or (isinstance(value, bool) != (kind == "bool"))
    ):
        raise ConfigError(f"`{name}` is {value!r:.60}, expected {_KINDS[kind][1]}")


def is_number(value: object) -> bool:
    """Returns whether a value is a number of Python or NumPy; a bool is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    """Returns whether a value is an integer of Python or NumPy; a bool is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_encoding(name: str) -> None:
    """Raises ConfigError unless this is the name of a codec of texts."""
    try:
        "".encode(name)
        if codecs.lookup(name).name in ("idna", "punycode"):  # of names of hosts
            raise LookupError
    except (LookupError, ValueError):
        raise ConfigError(
            f"`encoding` is {name!r:.40}, expected the name of a codec, such as utf-8, cp1252 or"
            " gb18030"
        ) from None


def parse_duration(text: str, name: str = "budget") -> float:
    """Returns the seconds, at least 1, in ``"90s"``, ``"5m"``, ``"1h30m"`` or a plain number."""
    clean = text.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", clean):
        seconds = float(clean)
    else:
        match = re.fullmatch(
            r"(?:(\d+(?:\.\d+)?) ?h(?:ours?)? ?)?(?:(\d+(?:\.\d+)?) ?m(?:in(?:utes?)?)? ?)?"
            r"(?:(\d+(?:\.\d+)?) ?s(?:ec(?:onds?)?)?)?",
            clean,
        )
        if not clean or match is None:
            raise ConfigError(f"`{name}` is {text!r}, expected a duration such as 90s, 5m or 1h30m")
        hours, minutes, rest = (float(part or 0) for part in match.groups())
        seconds = hours * 3600 + minutes * 60 + rest
    if not 1 <= seconds <= 10**8:
        raise ConfigError(f"`{name}` is {text!r:.60}, expected 1s to 27777h")
    return seconds


def _quantity(text: str, pattern: str, units: Mapping[str, float]) -> float:
    """Returns the number in a text times its unit, 0 for any other text."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*{pattern}", text.strip())
    return 0.0 if match is None else float(match[1]) * units[match[2]]


def parse_latency(text: str, name: str) -> float:
    """Returns the seconds in ``"500us"``, ``"1ms"`` or ``"0.1s"``; `name` names the setting."""
    seconds = _quantity(text.lower(), "(us|ms|s)", {"us": 1e-6, "ms": 1e-3, "s": 1.0})
    if not 0.0 < seconds < 3600.0:
        raise ConfigError(
            f"`{name}` is {text!r:.60}, expected a time above 0 such as 500us, 1ms or 0.1s"
        )
    return seconds


def parse_amount(text: str, name: str, unit: str = "") -> float:
    """Returns the number in ``"200000"``, ``"500k"`` or ``"1.5M"`` (k, M, G: powers of 1,000).

    `name` is the name of the setting; the number may end in `unit`, such as "/s".
    """
    amount = _quantity(text.strip().removesuffix(unit), "([kMG]?)", _POWERS)
    if not 0 < amount < 1e15:
        raise ConfigError(
            f"`{name}` is {text!r:.60}, expected a number above 0 such as 200000{unit}, 500k{unit}"
            f" or 1.5M{unit}"
        )
    return amount


def parse_rate(text: str, name: str) -> float:
    """Returns the bytes a second in ``"1gbit"``, ``"100mbit"``, ``"25Gbit/s"`` or ``"125MB/s"``
    (k, M, G, T: powers of 1,000); `name` is the setting's."""
    bits = _quantity(text.lower(), "([kmgt]?)(?:bit(?:/s)?|bps)", _POWERS)
    amount = bits / 8 or _quantity(text, "([kmgtKMGT]?)B/s", _POWERS)
    if not 1e3 <= amount <= 1e13:
        raise ConfigError(
            f"`{name}` is {text!r:.60}, expected the speed of a network such as 1gbit, 100mbit,"
            " 25gbit or 125MB/s"
        )
    return amount


def parse_split(text: str) -> tuple[float, float, float]:
    """Returns the train, validation and test shares of ``"90/5/5"``; they sum to 1."""
    try:
        parts = [float(part) for part in text.split("/")]
    except ValueError:
        parts = []
    parts += [0.0] * (3 - len(parts))
    good = len(parts) == 3 and all(math.isfinite(p) and p >= 0 for p in parts)
    if not good or abs(sum(parts) - 100) > 1e-6 or parts[0] == 0 or parts[1] == 0:
        raise ConfigError(
            f"`split` is {text!r}, expected train/validation/test in percent that add up to 100,"
            " such as 90/5/5 or 90/10/0"
        )
    return parts[0] / 100, parts[1] / 100, parts[2] / 100


def called_with(
    kind: type[ConfigT], config: Any, fields: dict[str, Any], origin: str, stop: object
) -> ConfigT:
    """Returns the options of a call, given as `config` or as single fields. Checks `stop` too."""
    if config is not None and fields:
        raise ConfigError("give either config=… or single fields, not both")
    if stop is not None and not callable(stop):
        raise ConfigError(f"stop is {kind_of_value(stop)}, expected a function that is polled")
    config = config if config is not None else built(kind, fields, origin)
    if not isinstance(config, kind):
        raise ConfigError(f"config is {kind_of_value(config)}, expected a {kind.__name__}")
    return config


def built(kind: type[ConfigT], values: dict[str, Any], origin: str) -> ConfigT:
    """Builds a configuration from plain values. Raises ConfigError: an unknown key (names `origin`
    and the nearest key), or an invalid value."""
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise ConfigError(f"{origin}: unknown key '{key}'{nearest_hint(key, known)}")
    return kind(**values)
