"""The events of metrics.jsonl by kind, for the charts and tables of a report.

The run may still write the file, or may have been killed: lines that are not a JSON object, and
points without their numbers, are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastlstm.errors import FastLSTMError
from fastlstm.report.events import Event, Measure, decode_event, measure_of, number, unit_of
from fastlstm.report.lines import rate_of
from fastlstm.system.storage import MAX_JSON_BYTES, open_regular

MAX_POINTS = 800
"""Points per curve: more are not visible on a page."""
MAX_EVENTS = 1 << 15
"""Events kept of one kind; a longer run keeps evenly spaced ones and the best evaluation."""


@dataclass(frozen=True)
class History:
    """The events of a run by kind; of a step that a resume repeated, only the newer event.

    `starts` has one event per start of the run, oldest first; `notes` has messages and skipped
    steps; `end` is None while the run continues.
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
        return self.starts[-1] if self.starts else {}

    def resumes(self, key: str) -> list[float]:
        """Returns the units, elapsed_s or step at which the run was resumed."""
        key = {"elapsed_s": "resumed_s", "step": "resumed_from"}.get(key, key)
        found: list[float] = []
        for event in self.starts:
            if at := number(event, key):
                found = [*(other for other in found if other < at), at]
        return found

    @property
    def measure(self) -> Measure:
        return measure_of(self.start)

    @property
    def unit(self) -> str:
        return unit_of(self.start)

    @property
    def validations(self) -> list[Event]:
        return [
            event
            for event in self.evals
            if event.get("split", "valid") == "valid"
            and number(event, self.measure.key) is not None
        ]

    @property
    def best(self) -> Event | None:
        """The validation with the lowest figure.

        As in training, a validation that callbacks do not accept discards the best before it.
        """
        best, key = None, self.measure.key
        for event in self.validations:
            if event.get("is_accepted") is False:
                best = None if best is None or best["step"] < event["step"] else best
            elif best is None or event[key] < best[key]:
                best = event
        return best

    @property
    def rate(self) -> float | None:
        """Units per second of training time; from the end event if there is one."""
        rates = [rate for e in self.steps if (rate := number(e, "units_per_s")) is not None]
        return rate_of(self.end or {}) or (sum(rates) / len(rates) if rates else None)

    @property
    def elapsed_s(self) -> float | None:
        times = [number(event, "elapsed_s") for event in [*self.steps, *self.evals]]
        times += [number(self.end, "elapsed_s")] if self.end is not None else []
        return max((value for value in times if value is not None), default=None)


def read_history(path: Path) -> History:
    """Reads metrics.jsonl; a damaged file as far as possible, a missing one as empty."""
    lists = {kind: _EventList() for kind in dict.fromkeys(_KINDS.values())}
    end: Event | None = None
    tested: dict[str, Any] = {}
    for event, num_bytes in read_events(path):
        kind = str(event.get("event"))
        if kind == "start":
            for name in ("steps", "evals", "samples"):
                lists[name].forget_after(number(event, "resumed_from") or 0.0)
            event = _with_units(event, "resumed_from", lists["steps"].newest)
            end = None
        if kind in ("test", "calibration"):
            tested[kind] = event
        if kind == "test":
            lists["forecasts"] = _EventList()
        elif kind == "end":
            end = event
        elif kind in _KINDS and (kind not in ("step", "eval") or number(event, "step") is not None):
            if kind == "eval":
                event = _with_units(event, "step", lists["steps"].newest)
            lists[_KINDS[kind]].add(event, num_bytes)
    events: dict[str, Any] = {name: part.events for name, part in lists.items()}
    return History(**events, **tested, end=end)


def _with_units(event: Event, key: str, newest: Event) -> Event:
    """Returns the event with the units of the step under `key`, from the newest progress."""
    at, step, units = number(event, key), number(newest, "step"), number(newest, "units")
    if at is None or not step or units is None:
        return event
    return {"units": units * at / step, **event}


_KINDS = {
    **{"start": "starts", "step": "steps", "eval": "evals", "sample": "samples"},
    **{"message": "notes", "skip": "notes", "forecast": "forecasts"},
}


class _EventList:
    """Events of one kind; above a limit evenly spaced ones, the best and the newest."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Event, int]] = []
        self._num_bytes = 0

    @property
    def events(self) -> list[Event]:
        return [event for event, _ in self._pairs]

    @property
    def newest(self) -> Event:
        return self._pairs[-1][0] if self._pairs else {}

    def add(self, event: Event, num_bytes: int) -> None:
        self._pairs.append((event, num_bytes))
        self._num_bytes += num_bytes
        if len(self._pairs) > MAX_EVENTS or self._num_bytes > MAX_JSON_BYTES:
            best = min(self._pairs, key=lambda pair: _score(pair[0]))
            newest_first = enumerate(reversed(self._pairs))
            self._pairs = [p for at, p in newest_first if at % 2 == 0 or p is best][::-1]
            self._num_bytes = sum(num_bytes for _, num_bytes in self._pairs)

    def forget_after(self, step: float) -> None:
        while self._pairs and (number(self._pairs[-1][0], "step") or 0) > step:
            self._num_bytes -= self._pairs.pop()[1]


def _score(event: Event) -> float:
    """Returns the score of a validation that training kept, infinity for other evaluations."""
    if event.get("split", "valid") != "valid" or event.get("is_accepted") is False:
        return math.inf
    score = number(event, "bits_per_char")
    score = number(event, "loss") if score is None else score
    return math.inf if score is None else score


def read_events(path: Path) -> Iterator[tuple[Event, int]]:
    """Yields the events of a file, each with the bytes of its line."""
    try:
        with (
            open_regular(path) as (descriptor, _),
            open(descriptor, "rb", closefd=False) as file,  # a run may be adding lines
        ):
            # A longer line is read in pieces, which are not JSON.
            for line in iter(lambda: file.readline(MAX_JSON_BYTES), b""):
                event = decode_event(line)
                if event is not None:
                    yield event, len(line)
    except FastLSTMError:
        return


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
