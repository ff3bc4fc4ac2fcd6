"""metrics.jsonl read back as series: what the charts and tables of a report are drawn from.

A run may still be writing the file, or have been killed while it did: lines that are no JSON object
are left out, and a line without the needed numbers is no point.
"""

from __future__ import annotations

import json
import math
import sys
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastlstm.errors import FastLSTMError
from fastlstm.storage import MAX_JSON_BYTES, open_regular

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Event = dict[str, Any]

MAX_POINTS = 800
"""Points per curve; more cannot be told apart on a page and make it heavy."""


@dataclass(frozen=True)
class History:
    """The events of a run, sorted by kind; a step that a resumed run took anew is kept once.

    Attributes:
        starts: one per start of the run, oldest first.
        steps: progress of training, with `elapsed_s` and, of a text, `tokens`.
        evals: evaluations.
        samples: texts the model wrote on the way.
        notes: messages, and steps that were skipped.
        test: what a forecaster scored on its test part, or None.
        calibration: how often its intervals hold, or None.
        forecasts: some of its forecasts with what came.
        end: the last end event, or None while the run goes on.
    """

    starts: list[Event] = field(default_factory=list)
    steps: list[Event] = field(default_factory=list)
    evals: list[Event] = field(default_factory=list)
    samples: list[Event] = field(default_factory=list)
    notes: list[Event] = field(default_factory=list)
    test: Event | None = None
    calibration: Event | None = None
    forecasts: list[Event] = field(default_factory=list)
    end: Event | None = None

    @property
    def start(self) -> Event:
        """The newest start event, empty when there is none."""
        return self.starts[-1] if self.starts else {}

    @property
    def is_forecast(self) -> bool:
        """Whether a forecaster was trained, not a language model."""
        return self.start.get("task") == "forecast"

    @property
    def measure(self) -> str:
        """What an evaluation is judged by: the key of its event."""
        return "loss" if self.is_forecast else "bits_per_char"

    @property
    def validations(self) -> list[Event]:
        """Evaluations of the validation split that have a number to show."""
        return [
            event
            for event in self.evals
            if event.get("split", "valid") == "valid" and number(event, self.measure) is not None
        ]

    @property
    def best(self) -> Event | None:
        """The validation with the fewest bits per character, or the least loss."""
        return min(self.validations, key=lambda event: event[self.measure], default=None)

    def tokens_at(self, step: float) -> float | None:
        """Returns the tokens trained on at a step, from the nearest progress line at or before."""
        known = [(event["step"], event["tokens"]) for event in self.steps if _has(event, "tokens")]
        if not known:
            return None
        index = bisect_right([at for at, _ in known], step) - 1
        at, tokens = known[max(index, 0)]
        return float(tokens) * step / at if at else 0.0

    def mean(self, key: str) -> float | None:
        """Returns the mean of a step value weighted by the steps it is of, or None without."""
        total = weight_sum = before = 0.0
        for event in self.steps:
            weight, before = max(0.0, event["step"] - before), event["step"]
            value = number(event, key)
            if value is not None:
                total += weight * value
                weight_sum += weight
        return total / weight_sum if weight_sum else None

    @property
    def unit(self) -> str:
        """What is counted: tokens, or windows of a forecaster."""
        return "windows" if self.is_forecast else "tokens"

    @property
    def rate(self) -> float | None:
        """Tokens or windows over training time; from the end event where there is one."""
        if self.end is not None:
            count, seconds = number(self.end, self.unit), number(self.end, "train_s")
            if count and seconds:
                return count / seconds
        return self.mean(f"{self.unit}_per_s")

    @property
    def elapsed_s(self) -> float | None:
        """Wall time of the run so far."""
        times = [number(event, "elapsed_s") for event in [*self.steps, *self.evals]]
        times += [number(self.end, "elapsed_s")] if self.end is not None else []
        return max((value for value in times if value is not None), default=None)


def number(event: Event, key: str) -> float | None:
    """Returns a finite number of an event, else None."""
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # A whole number may be beyond what a float holds.
    return float(value) if abs(value) <= sys.float_info.max else None


def read_history(path: Path) -> History:
    """Reads metrics.jsonl; a missing or damaged file gives what can be read of it."""
    kinds = ("starts", "steps", "evals", "samples", "notes", "forecasts")
    history: dict[str, Any] = {kind: [] for kind in kinds}
    end: Event | None = None
    judged: dict[str, Any] = {}
    for event in _events(path):
        kind = event.get("event")
        if kind == "start":
            _forget_after(history, number(event, "resumed_from") or 0.0)
            history["starts"].append(event)
            end = None
        elif kind == "step" and _has(event, "step"):
            history["steps"].append(event)
        elif kind == "eval" and _has(event, "step"):
            history["evals"].append(event)
        elif kind == "sample":
            history["samples"].append(event)
        elif kind in ("message", "skip"):
            history["notes"].append(event)
        elif kind == "test":
            judged[kind], history["forecasts"] = event, []
        elif kind == "calibration":
            judged[kind] = event
        elif kind == "forecast":
            history["forecasts"].append(event)
        elif kind == "end":
            end = event
    return History(**history, **judged, end=end)


def _events(path: Path) -> list[Event]:
    events: list[Event] = []
    try:
        with (
            open_regular(path) as (descriptor, _),
            open(descriptor, "rb", closefd=False) as file,  # a run may be adding lines
        ):
            # What is longer comes in pieces, which are no JSON.
            for line in iter(lambda: file.readline(MAX_JSON_BYTES), b""):
                try:
                    event = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(event, dict):
                    events.append(event)
    except FastLSTMError:
        return []
    return events


def _forget_after(history: dict[str, Any], step: float) -> None:
    for kind in ("steps", "evals", "samples"):
        history[kind] = [event for event in history[kind] if (number(event, "step") or 0) <= step]


def _has(event: Event, *keys: str) -> bool:
    return all(number(event, key) is not None for key in keys)


def series(events: Sequence[Event], x_key: str, y_key: str) -> tuple[list[float], list[float]]:
    """Returns the points that have both numbers, averaged in bins down to `MAX_POINTS`."""
    points = [
        (x, y)
        for event in events
        if (x := number(event, x_key)) is not None and (y := number(event, y_key)) is not None
    ]
    size = math.ceil(len(points) / MAX_POINTS) or 1
    bins = [points[start : start + size] for start in range(0, len(points), size)]
    return (
        [sum(x for x, _ in part) / len(part) for part in bins],
        [sum(y for _, y in part) / len(part) for part in bins],
    )
