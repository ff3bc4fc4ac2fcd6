"""Safe access to events: a key may be missing, and a stored file may hold any value."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from fastlstm.errors import FastLSTMError
from fastlstm.report.markup import name_text, visible
from fastlstm.system.storage import MAX_JSON_DEPTH, is_deeper, read_json

Event = dict[str, Any]

SPLITS = {"train": "training", "valid": "validation", "test": "test"}
_METRICS = {
    **{"bits_per_char": "bits/char", "loss": "loss"},
    **{"bits_per_byte": "bits/byte", "perplexity": "perplexity"},
}
_NO_METRICS = {"step", "units", "num_units", "seconds", "elapsed_s"}
_MAX_OWN_METRICS = 8


class Measure(NamedTuple):
    """The figure by which evaluations are compared: key, label in a line, heading."""

    key: str
    label: str
    title: str


def measure_of(start: Event) -> Measure:
    """Returns the figure of a run: bits per character of a text, else the loss."""
    if start.get("task", "text") == "text":
        return Measure("bits_per_char", "bits/char", "Bits per character")
    return Measure("loss", "loss", "Loss")


def metrics_of(events: Iterable[Event]) -> dict[str, str]:
    """Returns key and heading of the metrics of evaluations; callbacks may add their own."""
    names = {key for event in events for key in event if number(event, key) is not None}
    own = sorted(names - _NO_METRICS - _METRICS.keys())[:_MAX_OWN_METRICS]
    known = {key: name for key, name in _METRICS.items() if key in names}
    return known | {key: name_text(key) for key in own}


def unit_of(start: Event) -> str:
    """Returns the unit of a run's counts: tokens, windows or sequences."""
    return text_of(start, "unit") or "tokens"


def decode_event(line: bytes) -> Event | None:
    """Returns the event of a line of metrics.jsonl; None for a damaged line."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if line.count(b"[") + line.count(b"{") > MAX_JSON_DEPTH and is_deeper(event, MAX_JSON_DEPTH):
        return None
    return event if isinstance(event, dict) else None


def stored_json(path: Path) -> Any:
    """Returns the content of a JSON file of a run, None where it cannot be read."""
    try:
        return read_json(path)
    except FastLSTMError:
        return None


def number(event: Event, key: str) -> float | None:
    """Returns a finite number of an event, else None."""
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # A whole number may be beyond what a float holds.
    return float(value) if abs(value) <= sys.float_info.max else None


def text_of(event: Event, key: str) -> str:
    """Returns a value as one line of text; empty when absent."""
    value = event.get(key)
    if isinstance(value, list | tuple):
        value = ", ".join(str(part) for part in value)
    return "" if value is None else visible(value)


def rank_seconds(event: Event) -> list[float]:
    """Returns the seconds of a step's passes on each of several processes; empty for one."""
    seconds = event.get("rank_s")
    own = seconds if isinstance(seconds, list) else []
    is_known = all(type(s) in (int, float) and math.isfinite(s) and s >= 0 for s in own)
    return [float(s) for s in own] if is_known and len(own) > 1 else []
