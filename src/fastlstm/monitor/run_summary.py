"""What is known of a run from its events: state, figures and short curves, kept up to date."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.monitor.curve import MAX_POINTS, Curve, Point
from fastlstm.monitor.event_tail import EventTail
from fastlstm.monitor.machine_strip import MachineStrip
from fastlstm.report.events import decode_event, measure_of, number, text_of, unit_of
from fastlstm.report.lines import is_unfinished
from fastlstm.runs.lock_holder import lock_holder
from fastlstm.runs.run_directory import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fastlstm.report.events import Event, Measure

_MAX_ALERTS = 20
_MAX_PHASES = 12
_LAST_KEYS = (
    *("step", "units", "progress", "units_per_s", "ceiling_share", "input_wait_share"),
    *("elapsed_s", "eta_s", "loss", "bits_per_char"),
)
_SLIP_FROM = 0.02
"""Share of the run after which its first prediction of the end counts."""
_STEP = (b'{"event":"step",', b'{"event": "step",')
_EVAL = (b'{"event":"eval",', b'{"event": "eval",')
_PROGRESS = re.compile(rb'"progress": ?([0-9.e-]+)')


class RunSummary:
    """The summary of one run directory; `update` reads what was added.

    Attributes:
        path: the run directory.
        start: its newest start event, empty where there is none.
        end: its end event, None while it continues.
        last: figures of its newest step event.
        training: curve of its steps.
        validation: curve of its evaluations on validation data.
        machine: what it and others used of the machine.
        machine_event: its newest `machine` event, empty where there is none.
        phases: seconds spent in each phase.
        outlook: its newest `outlook` event, empty where there is none.
        alerts: newest alerts, skipped steps and warnings, oldest first.
        num_alerts: how many there were.
        first_end_s: total seconds that the run predicted at first, None before that.
        added: the events of the last `update`; None where it has read the run from its beginning,
            or more than is decoded of: `newest_events` has them.
    """

    def __init__(self, path: Path, stored: Sequence[Any] | None = None) -> None:
        self.path = path
        self._file, self._lock = RunDirectory(path).metrics_path, path / ".lock"
        self._clear()
        position = None
        if stored is not None:
            try:
                position = self._restore(stored)
            except (KeyError, TypeError, ValueError, RecursionError):
                self._clear()
        self._tail = EventTail(self._file, position)
        self.added: list[Event] | None = None

    def _clear(self) -> None:
        self.start: Event = {}
        self.end: Event | None = None
        self.last: dict[str, float] = {}
        self.training, self.validation, self.machine = Curve(), Curve(), MachineStrip()
        self.machine_event: Event = {}
        self.phases: dict[str, float] = {}
        self.outlook: Event = {}
        self.alerts: list[str] = []
        self.num_alerts = 0
        self.first_end_s: float | None = None
        self._last_step: Event = {}

    def stored(self) -> tuple[str, bytes, bytes, bytes]:
        """Returns the summary for a cache: figures and position as JSON, and the curves."""
        figures = {name: getattr(self, name) for name in _STORED}
        text = json.dumps({**figures, "position": self._tail.position})
        return text, self.training.stored(), self.validation.stored(), self.machine.stored()

    def _restore(self, stored: Sequence[Any]) -> Any:
        text, training, validation, machine = stored
        figures = json.loads(text)
        for name, kind in _STORED.items():
            if not isinstance(figures[name], kind):
                raise TypeError(f"{name} is not of its kind")
            setattr(self, name, figures[name])
        self.training, self.validation = map(Curve.restored, (training, validation))
        self.machine = MachineStrip.restored(machine)
        return figures["position"]

    def update(self) -> bool:
        """Reads what was added to the run; returns whether there was anything new."""
        is_changed = False
        self.added = []
        while True:
            before, (_, offset, _) = self._tail.num_replaced, self._tail.position
            lines = self._tail.read_lines()
            if self._tail.num_replaced != before:
                self._clear()
                is_changed = True
            is_first = self._tail.num_replaced != before or (lines and offset == 0)
            if is_first or len(lines) > MAX_POINTS:
                self.added = None
            self._add_lines(lines)
            if self._last_step:
                figures = ((key, number(self._last_step, key)) for key in _LAST_KEYS)
                self.last = {key: value for key, value in figures if value is not None}
                self._last_step = {}
            is_changed |= bool(lines)
            if not self._tail.has_more:
                return is_changed

    def newest_events(self, num_bytes: int) -> list[Event]:
        """Returns the events in the last bytes, so many at most, that `update` has read."""
        return self._tail.read_back(num_bytes)

    def _add_lines(self, lines: Sequence[bytes]) -> None:
        """Adds events; of very many steps, only those that something is shown of are decoded."""
        steps = [at for at, line in enumerate(lines) if line.startswith(_STEP)]
        skipped: set[int] = set()
        if len(steps) > MAX_POINTS:
            self.training.make_room(len(steps))
            skipped = {at for at in steps[:-1] if not lines[at + 1].startswith(_EVAL)}
        for at, line in enumerate(lines):
            if at in skipped and not self.training.is_due and not self._predicts_end(line):
                self.training.skip()
            elif (event := decode_event(line)) is not None:
                self._add(event)
                if self.added is not None:
                    self.added.append(event)

    def _predicts_end(self, line: bytes) -> bool:
        """Whether `first_end_s` is taken from this step."""
        if self.first_end_s is not None:
            return False
        progress = _PROGRESS.search(line)
        return progress is None or not progress[1].startswith((b"0.00", b"0.01"))

    def _add(self, event: Event) -> None:
        kind = event.get("event")
        if kind == "step":
            self._add_step(event)
        elif kind == "eval" and event.get("split", "valid") == "valid":
            self._add_point(self.validation, event)
        elif kind == "start":
            self._begin(event)
        elif kind == "end":
            self.end = event
        elif kind == "phase":
            self._add_phases(event)
        elif kind == "machine":
            self.machine.add(event)
            self.machine_event = event
        elif kind == "outlook":
            self.outlook = event
        elif kind in ("alert", "skip") or (
            kind == "message" and event.get("level") in ("warning", "error")
        ):
            words = text_of(event, "text") or text_of(event, "what") or text_of(event, "rule")
            self.alerts = [*self.alerts, words[:200]][-_MAX_ALERTS:]
            self.num_alerts += 1

    def _begin(self, event: Event) -> None:
        at = number(event, "resumed_from") or 0.0
        self.training.cut_after(at)
        self.validation.cut_after(at)
        self.machine.cut_after(number(event, "resumed_s") or 0.0)
        self.phases = self.phases if at else {}
        self.start, self.end, self.outlook = event, None, {}

    def _add_phases(self, event: Event) -> None:
        seconds = event.get("seconds")
        if not isinstance(seconds, dict):
            return
        for name in seconds:
            spent = number(seconds, name)
            if spent is not None and (name in self.phases or len(self.phases) < _MAX_PHASES):
                self.phases[name] = self.phases.get(name, 0.0) + max(spent, 0.0)

    def _add_step(self, event: Event) -> None:
        self._last_step = event
        if self.first_end_s is None and (number(event, "progress") or 0.0) >= _SLIP_FROM:
            seconds, left = number(event, "elapsed_s"), number(event, "eta_s")
            if seconds is not None and left is not None:
                self.first_end_s = seconds + left
        self._add_point(self.training, event)

    def _add_point(self, curve: Curve, event: Event) -> None:
        step, seconds = number(event, "step"), number(event, "elapsed_s")
        value = number(event, self.measure.key)
        if step is None or seconds is None or value is None:
            return
        units = number(event, "units")
        if units is None:  # an evaluation does not count them: the newest step does
            trained = self.training
            has_steps = len(trained) > 0 and trained.steps[-1] != 0.0
            units = trained.units[-1] * step / trained.steps[-1] if has_steps else 0.0
        curve.add(Point(step, seconds, units, value))

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
        return self.state_by(None)

    def state_by(self, held: Mapping[int, int] | None) -> str:
        """Returns `state`; `held` is as in `lock_holder`."""
        if self.end is not None:
            return "stopped" if is_unfinished(self.end) else "finished"
        return "running" if lock_holder(self._lock, held)[0] else "dead"

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
        at += [curve.seconds[-1] for curve in (self.training, self.validation) if curve]
        return max((value for value in at if value is not None), default=0.0)

    @property
    def best(self) -> float | None:
        """The lowest validation figure."""
        return min(self.validation.values, default=None)

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
        """Tokens per character of a text, None before the first figure; 1 of other runs."""
        if self.measure.key != "bits_per_char" or text_of(self.start, "vocab") == "char":
            return 1.0
        for event, best in ((self.last, ""), (self.end or {}, "best_")):
            loss, bits = number(event, f"{best}loss"), number(event, f"{best}bits_per_char")
            if loss and bits:
                return bits * math.log(2.0) / loss
        return None

    def best_until(self, limit: float, by: str) -> float | None:
        """Returns the lowest validation figure up to a limit of `seconds` or `chars`."""
        if by == "seconds":
            return self.validation.lowest_until(limit, self.validation.seconds)
        limit *= self.units_per_char or math.nan
        return self.validation.lowest_until(limit, self.validation.units)

    def reach(self, by: str) -> float | None:
        """Returns the seconds or the characters at the last evaluation; None: not known."""
        if not self.validation:
            return None
        if by == "seconds":
            return self.validation.seconds[-1]
        per_char = self.units_per_char
        return None if per_char is None else self.validation.units[-1] / per_char


_STORED: dict[str, type | tuple[type, ...]] = {
    "start": dict, "end": (dict, type(None)), "last": dict, "machine_event": dict, "phases": dict,
    "outlook": dict, "alerts": list, "num_alerts": int, "first_end_s": (float, int, type(None)),
}  # fmt: skip
