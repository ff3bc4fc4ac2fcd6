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
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fastlstm.errors import FastLSTMError
from fastlstm.system.storage import MAX_JSON_BYTES, open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

Event = dict[str, Any]

MAX_POINTS = 800
"""Points per curve; more cannot be told apart on a page and make it heavy."""
MAX_EVENTS = 1 << 15
"""Events of one kind that are kept: of a longer run evenly spread ones, and the best evaluation."""


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

    @cached_property
    def _tokens(self) -> tuple[list[float], list[float]]:
        """Steps and the tokens trained on at them."""
        known = [event for event in self.steps if _has(event, "tokens")]
        return [event["step"] for event in known], [event["tokens"] for event in known]

    def tokens_at(self, step: float) -> float | None:
        """Returns the tokens trained on at a step, from the nearest progress line at or before."""
        steps, counts = self._tokens
        if not steps:
            return None
        index = max(bisect_right(steps, step) - 1, 0)
        at, tokens = steps[index], counts[index]
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
    kept = {kind: _Kept() for kind in dict.fromkeys(_KINDS.values())}
    end: Event | None = None
    judged: dict[str, Any] = {}
    for event, num_bytes in _events(path):
        kind = str(event.get("event"))
        if kind == "start":
            for name in ("steps", "evals", "samples"):
                kept[name].forget_after(number(event, "resumed_from") or 0.0)
            end = None
        if kind in ("test", "calibration"):
            judged[kind] = event
        if kind == "test":
            kept["forecasts"] = _Kept()
        elif kind == "end":
            end = event
        elif kind in _KINDS and (kind not in ("step", "eval") or _has(event, "step")):
            kept[_KINDS[kind]].add(event, num_bytes)
    lists: dict[str, Any] = {name: part.events for name, part in kept.items()}
    return History(**lists, **judged, end=end)


_KINDS = {
    "start": "starts",
    "step": "steps",
    "eval": "evals",
    "sample": "samples",
    "message": "notes",
    "skip": "notes",
    "forecast": "forecasts",
}


class _Kept:
    """Events of one kind: all, or of very many evenly spread ones, the best and the newest."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Event, int]] = []
        self._num_bytes = 0

    @property
    def events(self) -> list[Event]:
        return [event for event, _ in self._pairs]

    def add(self, event: Event, num_bytes: int) -> None:
        """Takes an event that was written in so many bytes."""
        self._pairs.append((event, num_bytes))
        self._num_bytes += num_bytes
        if len(self._pairs) > MAX_EVENTS or self._num_bytes > MAX_JSON_BYTES:
            best = min(self._pairs, key=lambda pair: _score(pair[0]))
            newest_first = enumerate(reversed(self._pairs))
            self._keep([p for at, p in newest_first if at % 2 == 0 or p is best][::-1])

    def forget_after(self, step: float) -> None:
        """Drops what came after a step; events are written in the order of their steps."""
        while self._pairs and (number(self._pairs[-1][0], "step") or 0) > step:
            self._num_bytes -= self._pairs.pop()[1]

    def _keep(self, pairs: list[tuple[Event, int]]) -> None:
        self._pairs, self._num_bytes = pairs, sum(num_bytes for _, num_bytes in pairs)


def _score(event: Event) -> float:
    """Returns what a validation is judged by, infinity of anything else."""
    if event.get("split", "valid") != "valid":
        return math.inf
    score = number(event, "bits_per_char")
    score = number(event, "loss") if score is None else score
    return math.inf if score is None else score


def _events(path: Path) -> Iterator[tuple[Event, int]]:
    """Yields the events of a file, each with the bytes of its line."""
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
                    yield event, len(line)
    except FastLSTMError:
        return


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
