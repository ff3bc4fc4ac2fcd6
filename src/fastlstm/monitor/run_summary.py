"""What is known of a run from its events: state, figures and short curves, kept up to date."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastlstm.monitor.event_tail import EventTail
from fastlstm.report.events import measure_of, number, text_of, unit_of
from fastlstm.report.lines import is_unfinished
from fastlstm.runs.lock_holder import lock_holder
from fastlstm.runs.run_directory import RunDirectory

if TYPE_CHECKING:
    from fastlstm.report.events import Event, Measure

MAX_POINTS = 120
"""Points kept of a curve; beyond them every second one goes."""
_MAX_ALERTS = 20
_LAST_KEYS = (
    *("step", "units", "progress", "units_per_s", "ceiling_share", "input_wait_share"),
    *("elapsed_s", "eta_s"),
)
_SLIP_FROM = 0.02
"""Share of the run after which its first prediction of the end counts."""


class Point(NamedTuple):
    """A figure of a run: step, seconds since its beginning, units trained on, value."""

    step: float
    seconds: float
    units: float
    value: float


class RunSummary:
    """The summary of one run directory; `update` reads what was added.

    Attributes:
        path: the run directory.
        start: its newest start event, empty where there is none.
        end: its end event, None while it continues.
        last: figures of its newest step event.
        training: curve of its steps.
        validation: curve of its evaluations on validation data.
        alerts: newest alerts, skipped steps and warnings, oldest first.
        num_alerts: how many there were.
        first_end_s: total seconds that the run predicted at first, None before that.
    """

    def __init__(self, path: Path, stored: dict[str, Any] | None = None) -> None:
        self.path = path
        self._file = RunDirectory(path).metrics_path
        self._clear()
        position = None
        if stored is not None:
            try:
                self._restore(stored)
                position = stored["position"]
            except (KeyError, TypeError, ValueError):
                self._clear()
        self._tail = EventTail(self._file, position)

    def _clear(self) -> None:
        self.start: Event = {}
        self.end: Event | None = None
        self.last: dict[str, float] = {}
        self.training: list[Point] = []
        self.validation: list[Point] = []
        self.alerts: list[str] = []
        self.num_alerts = 0
        self.first_end_s: float | None = None
        self._last_step: Event = {}

    def stored(self) -> dict[str, Any]:
        """Returns the summary as a JSON value, with the position in metrics.jsonl."""
        curves = {name: [list(p) for p in getattr(self, name)] for name in _CURVES}
        own = {name: getattr(self, name) for name in _STORED}
        return {**own, **curves, "position": self._tail.position}

    def _restore(self, stored: dict[str, Any]) -> None:
        if not isinstance(stored["start"], dict):
            raise TypeError("start is not an object")
        for name in _STORED:
            setattr(self, name, stored[name])
        for name in _CURVES:
            setattr(self, name, list(map(Point._make, stored[name])))

    def update(self) -> bool:
        """Reads what was added to the run; returns whether there was anything new."""
        is_changed = False
        while True:
            before = self._tail.num_replaced
            events = self._tail.read()
            if self._tail.num_replaced != before:
                self._clear()
                is_changed = True
            for event in events:
                self._add(event)
            if self._last_step:
                figures = ((key, number(self._last_step, key)) for key in _LAST_KEYS)
                self.last = {key: value for key, value in figures if value is not None}
                self._last_step = {}
            is_changed |= bool(events)
            if not self._tail.has_more:
                return is_changed

    def _add(self, event: Event) -> None:
        kind = event.get("event")
        if kind == "step":
            self._add_step(event)
        elif kind == "eval" and event.get("split", "valid") == "valid":
            self._add_point(self.validation, event)
        elif kind == "start":
            at = number(event, "resumed_from") or 0.0
            for name in _CURVES:
                setattr(self, name, [p for p in getattr(self, name) if p.step <= at])
            self.start, self.end = event, None
        elif kind == "end":
            self.end = event
        elif kind in ("alert", "skip") or (
            kind == "message" and event.get("level") in ("warning", "error")
        ):
            words = text_of(event, "text") or text_of(event, "what") or text_of(event, "rule")
            self.alerts = [*self.alerts, words[:200]][-_MAX_ALERTS:]
            self.num_alerts += 1

    def _add_step(self, event: Event) -> None:
        self._last_step = event
        if self.first_end_s is None and (number(event, "progress") or 0.0) >= _SLIP_FROM:
            seconds, left = number(event, "elapsed_s"), number(event, "eta_s")
            if seconds is not None and left is not None:
                self.first_end_s = seconds + left
        self._add_point(self.training, event)

    def _add_point(self, curve: list[Point], event: Event) -> None:
        step, seconds = number(event, "step"), number(event, "elapsed_s")
        value = number(event, self.measure.key)
        if step is None or seconds is None or value is None:
            return
        units = number(event, "units")
        if units is None:  # an evaluation does not count them: the newest step does
            newest = self.training[-1] if self.training else None
            units = newest.units * step / newest.step if newest and newest.step else 0.0
        curve.append(Point(step, round(seconds, 2), units, float(f"{value:.6g}")))
        if len(curve) > 2 * MAX_POINTS:
            best = min(curve, key=lambda point: point.value)
            newest_first = enumerate(reversed(curve))
            curve[:] = [p for at, p in newest_first if at % 2 == 0 or p is best][::-1]

    @property
    def measure(self) -> Measure:
        """The figure that the run is judged by."""
        return measure_of(self.start)

    @property
    def unit(self) -> str:
        """What it counts: tokens, windows or sequences."""
        return unit_of(self.start)

    @property
    def state(self) -> str:
        """finished, stopped (ended before its time), running, or dead (no process has its lock)."""
        if self.end is not None:
            return "stopped" if is_unfinished(self.end) else "finished"
        return "running" if lock_holder(self.path / ".lock")[0] else "dead"

    @property
    def changed_at(self) -> float:
        """When its metrics.jsonl was changed last, in seconds since 1970; 0 where it is gone."""
        try:
            return self._file.stat().st_mtime
        except OSError:
            return 0.0

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken."""
        at = [self.last.get("elapsed_s"), number(self.end or {}, "elapsed_s")]
        at += [curve[-1].seconds for curve in (self.training, self.validation) if curve]
        return max((value for value in at if value is not None), default=0.0)

    @property
    def best(self) -> float | None:
        """The lowest validation figure."""
        return min((point.value for point in self.validation), default=None)

    @property
    def rate(self) -> float | None:
        """Units per second of stepping."""
        units, train_s = (number(self.end or {}, key) for key in ("units", "train_s"))
        return units / train_s if units and train_s else self.last.get("units_per_s")

    @property
    def slip(self) -> float | None:
        """How much later than predicted at first the end comes, as a share of the prediction."""
        left = 0.0 if self.end is not None else self.last.get("eta_s")
        if not self.first_end_s or left is None:
            return None
        return (self.seconds + left) / self.first_end_s - 1.0

    @property
    def units_per_char(self) -> float | None:
        """Tokens per character of a text, None of other runs and before the first figure."""
        loss, bits = (
            number(self.end or {}, "best_loss"),
            number(self.end or {}, "best_bits_per_char"),
        )
        if not loss or not bits:
            return 1.0 if text_of(self.start, "vocab") == "char" else None
        return bits * math.log(2.0) / loss

    def best_until(self, limit: float, by: str) -> float | None:
        """Returns the lowest validation figure up to a limit of `seconds` or `chars`."""
        if by == "seconds":
            found = [point.value for point in self.validation if point.seconds <= limit]
        else:
            per_char = self.units_per_char or 1.0
            found = [p.value for p in self.validation if p.units / per_char <= limit]
        return min(found, default=None)

    def reach(self, by: str) -> float | None:
        """Returns the seconds or the characters at the last evaluation."""
        if not self.validation:
            return None
        last = self.validation[-1]
        return last.seconds if by == "seconds" else last.units / (self.units_per_char or 1.0)


_CURVES = ("training", "validation")
_STORED = ("start", "end", "last", "alerts", "num_alerts", "first_end_s")
