"""Summaries of runs from their events: state, figures, short curves, load of the machine.

They are kept up to date while other processes write the events.
"""

from __future__ import annotations

import math
import os
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fastlstm.errors import FastLSTMError, RunDirectoryError
from fastlstm.report.events import (
    Event,
    Measure,
    decode_event,
    measure_of,
    number,
    text_of,
    unit_of,
)
from fastlstm.report.lines import is_unfinished, rate_of, skip_text
from fastlstm.report.terminal import clock, percent
from fastlstm.runs.run_directory import RunDirectory, is_locked
from fastlstm.system.storage import MAX_JSON_BYTES, open_regular

_MAX_WARNINGS = 20
_MAX_PHASES = 12
_LAST_KEYS = (
    *("step", "units", "progress", "units_per_s", "ceiling_share", "input_wait_share"),
    *("elapsed_s", "eta_s", "loss", "bits_per_char"),
)
_SLIP_FROM = 0.02
"""Share of the run at which its first prediction of the end is taken."""
_STEP = (b'{"event":"step",', b'{"event": "step",')
_EVAL = (b'{"event":"eval",', b'{"event": "eval",')
_SEARCH_EVERY_S = 10.0
_NOT_SEARCHED = ("checkpoint-", "tensorboard", ".")
_NOT_SETTINGS = frozenset(
    (
        *("event", "time", "run", "resumed_from", "resumed_s", "precision_why"),
        *("flop_per_unit", "num_units", "unit", "task", "kernels", "device"),
        *("ceiling_gflops", "ceiling_how"),
    )
)


class RunSummary:
    """The summary of one run directory; `update` reads what was added.

    Attributes:
        start, machine_event, outlook: newest event of each kind, or an empty one.
        end: end event, None while the run continues.
        last: figures of the newest step event.
        training, validation: curves of the steps and of the validations.
        warnings: newest warnings, alerts and skipped steps, oldest first.
        first_end_s: first predicted total seconds, None before the first prediction.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file, self._lock = RunDirectory(path).metrics_path, path / ".lock"
        self._tail = EventTail(self._file)
        self._clear()

    def _clear(self) -> None:
        self.start: Event = {}
        self.end: Event | None = None
        self.last: dict[str, float] = {}
        self.training, self.validation, self.machine = Curve(), Curve(), MachineUse()
        self.machine_event: Event = {}
        self.phases: dict[str, float] = {}
        self.outlook: Event = {}
        self.warnings: list[str] = []
        self.num_warnings = 0
        self.first_end_s: float | None = None

    def update(self) -> bool:
        """Reads new events; returns whether there were any."""
        is_changed = False
        while True:
            num_replaced, lines = self._tail.num_replaced, self._tail.read()
            if self._tail.num_replaced != num_replaced:
                self._clear()
                is_changed = True
            self._add_lines(lines)
            is_changed |= bool(lines)
            if not self._tail.has_more:
                return is_changed

    def _add_lines(self, lines: Sequence[bytes]) -> None:
        """Adds events; of very many steps, only the ones shown are decoded."""
        steps = [at for at, line in enumerate(lines) if line.startswith(_STEP)]
        skipped: set[int] = set()
        if len(steps) > MAX_POINTS:
            self.training.make_room(len(steps))
            skipped = {at for at in steps[:-1] if not lines[at + 1].startswith(_EVAL)}
        for at, line in enumerate(lines):
            # Until `first_end_s` is known, any step may have it.
            if at in skipped and not self.training.is_due and self.first_end_s is not None:
                self.training.skip()
            elif (event := decode_event(line)) is not None:
                self._add(event)

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
        elif kind == "skip" or (kind == "message" and event.get("level") == "warning"):
            words = text_of(event, "text") or skip_text(event)
            self.warnings = [*self.warnings, words[:200]][-_MAX_WARNINGS:]
            self.num_warnings += 1

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
        figures = ((key, number(event, key)) for key in _LAST_KEYS)
        self.last = {key: value for key, value in figures if value is not None}
        if self.first_end_s is None and (number(event, "progress") or 0.0) >= _SLIP_FROM:
            seconds, left = number(event, "elapsed_s"), number(event, "eta_s")
            if seconds is not None and left is not None:
                self.first_end_s = seconds + left
        self._add_point(self.training, event)
        if len(self.training) == 1 and self.training.steps[0]:  # evaluations came before it
            each = self.training.units[0] / self.training.steps[0]
            self.validation.units[:] = array("d", [each * step for step in self.validation.steps])

    def _add_point(self, curve: Curve, event: Event) -> None:
        step, seconds = number(event, "step"), number(event, "elapsed_s")
        value = number(event, self.measure.key)
        if step is None or seconds is None or value is None:
            return
        units = number(event, "units")
        if units is None:  # an evaluation lacks them: take the newest step's
            trained = self.training
            has_steps = len(trained) > 0 and trained.steps[-1] != 0.0
            units = trained.units[-1] * step / trained.steps[-1] if has_steps else 0.0
        curve.add(step, seconds, units, value)

    @property
    def measure(self) -> Measure:
        return measure_of(self.start)

    @property
    def unit(self) -> str:
        return unit_of(self.start)

    @property
    def state(self) -> str:
        """finished, stopped (from outside), running, or dead (no process has its lock)."""
        return self.state_by(None)

    def state_by(self, held: Collection[int] | None) -> str:
        """Returns `state`; `held` is as in `is_locked`."""
        if self.end is not None:
            return "stopped" if is_unfinished(self.end) else "finished"
        return "running" if is_locked(self._lock, held) else "dead"

    @property
    def changed_at(self) -> float:
        """Unix time of the last change of metrics.jsonl; 0 if it is missing."""
        try:
            return self._file.stat().st_mtime
        except OSError:
            return 0.0

    @property
    def seconds(self) -> float:
        at = [self.last.get("elapsed_s"), number(self.end or {}, "elapsed_s")]
        at += [curve.seconds[-1] for curve in (self.training, self.validation) if curve]
        return max((value for value in at if value is not None), default=0.0)

    @property
    def best(self) -> float | None:
        return min(self.validation.values, default=None)

    @property
    def rate(self) -> float | None:
        return rate_of(self.end or {}) or self.last.get("units_per_s")

    @property
    def slip(self) -> float | None:
        """Delay of the end beyond the first prediction, as a share of the prediction."""
        left = 0.0 if self.end is not None else self.last.get("eta_s")
        if not self.first_end_s or left is None:
            return None
        return (self.seconds + left) / self.first_end_s - 1.0

    @property
    def units_per_char(self) -> float | None:
        """Tokens per character of a text, None before the first figure; 1 for other runs."""
        if self.measure.key != "bits_per_char" or text_of(self.start, "vocab") == "char":
            return 1.0
        for event, best in ((self.last, ""), (self.end or {}, "best_")):
            loss, bits = number(event, f"{best}loss"), number(event, f"{best}bits_per_char")
            if loss and bits:
                return bits * math.log(2.0) / loss
        return None

    def best_until(self, limit: float, by: str) -> float | None:
        """Returns the lowest validation figure up to a limit of `seconds` or `chars`."""
        places, values = self.validation.seconds, self.validation.values
        if by == "chars":
            places, limit = self.validation.units, limit * (self.units_per_char or math.nan)
        pairs = zip(places, values, strict=True)
        return min((value for at, value in pairs if at <= limit), default=None)

    def reach(self, by: str) -> float | None:
        """Returns the seconds or the characters at the last evaluation; None if unknown."""
        if not self.validation:
            return None
        if by == "seconds":
            return self.validation.seconds[-1]
        per_char = self.units_per_char
        return None if per_char is None else self.validation.units[-1] / per_char


class RunIndex:
    """The summaries of all runs at or below some directories; finds new runs too.

    Raises RunDirectoryError if a directory does not exist.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        for directory in directories:
            if not directory.is_dir():
                raise RunDirectoryError(
                    f"{directory}: no such directory; name one that has runs in it"
                )
        self._directories = directories
        self.runs: dict[Path, RunSummary] = {}
        self._searched_at = -_SEARCH_EVERY_S

    def update(self, show: Callable[[int, int], None] | None = None) -> bool:
        """Reads new events; returns whether there were any.

        `show` is called with the number of runs read and of all runs.
        """
        is_new, now = False, time.monotonic()
        if now - self._searched_at >= _SEARCH_EVERY_S:
            self._searched_at = now
            found = {path: self.runs.get(path) or RunSummary(path) for path in self._search()}
            is_new = found.keys() != self.runs.keys()
            self.runs = found
        for at, run in enumerate(self.runs.values()):
            is_new |= run.update()
            if show is not None:
                show(at + 1, len(self.runs))
        return is_new

    def _search(self) -> list[Path]:
        places = set[str]()
        for directory in self._directories:
            for place, names, files in os.walk(os.path.abspath(directory)):
                names[:] = [name for name in names if not name.startswith(_NOT_SEARCHED)]
                places |= {place} if "metrics.jsonl" in files else set()
        return [Path(place) for place in sorted(places)]


def differences(runs: Sequence[RunSummary]) -> dict[str, list[Any]]:
    """Returns the settings that are not equal in all runs: name -> one value per run.

    For runs of different tasks it compares only settings that all runs have.
    """
    flat = [_settings(run.start) for run in runs]
    names = dict.fromkeys(name for settings in flat for name in settings)
    if len({text_of(run.start, "task") or "text" for run in runs}) > 1:
        names = {name: None for name in names if all(name in settings for settings in flat)}
    rows = {name: [settings.get(name) for settings in flat] for name in names}
    return {name: values for name, values in rows.items() if any(v != values[0] for v in values)}


def _settings(start: Event) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for key, value in start.items():
        if isinstance(value, dict) and key not in _NOT_SETTINGS:
            settings |= {f"{key}.{name}": part for name, part in value.items()}
        elif key not in _NOT_SETTINGS:
            settings[key] = value
    kernels = text_of(start, "kernels")
    return {**settings, "device": text_of(start, "device"), "kernels": kernels}


MAX_POINTS = 120
"""Least number of points of a long curve; above twice as many every second one is dropped."""


class Curve:
    """Evenly thinned points of a figure: steps, seconds, units trained on, and its values.

    The newest and the lowest point are always kept.
    """

    def __init__(self) -> None:
        self.columns = tuple(array("d") for _ in range(4))
        self.steps, self.seconds, self.units, self.values = self.columns
        self._stride, self._num_offered = 1, 0
        self._is_last_kept = True

    def __len__(self) -> int:
        return len(self.values)

    @property
    def is_due(self) -> bool:
        """Whether the next point is kept; another is replaced by its successor."""
        return self._num_offered % self._stride == 0

    def skip(self) -> None:
        self._num_offered += 1

    def make_room(self, count: int) -> None:
        """Thins the curve for `count` points to be added or skipped."""
        while (self._num_offered + count) > 2 * MAX_POINTS * self._stride:
            self._thin()

    def add(self, *point: float) -> None:
        """Adds the newest point; drops the one before unless it was due or is the lowest."""
        if not self._is_last_kept and (
            self.values[-1] > min(self.values) or point[-1] <= self.values[-1]
        ):
            for column in self.columns:
                column.pop()
        for column, value in zip(self.columns, point, strict=True):
            column.append(value)
        self._is_last_kept = self.is_due
        self._num_offered += 1
        if len(self) > 2 * MAX_POINTS:
            self._thin()

    def _thin(self) -> None:
        self._stride *= 2
        last, lowest = len(self) - 1, self.values.index(min(self.values)) if len(self) else 0
        self._keep(at for at in range(len(self)) if at % 2 == 0 or at in (last, lowest))

    def cut_after(self, step: float) -> None:
        """Drops the points after a step; a resumed run repeats them."""
        self._keep(at for at, value in enumerate(self.steps) if value <= step)
        self._is_last_kept = True

    def _keep(self, places: Iterator[int]) -> None:
        kept = list(places)
        for column in self.columns:
            column[:] = array("d", [column[at] for at in kept])


MAX_BINS = 120
_LEAST_S, _MOST_S = 10.0, 1e9
"""Width of the narrowest bin, and the longest valid time."""
_OTHERS = ("others_share", "steal_share", "throttled_share")
"""Shares of the machine that a run cannot use."""
_BUSY = 0.1
_WIDTH, _HEIGHT = 600, 36


class MachineUse:
    """The shares of all cores used by a run and by others, from its `machine` events."""

    def __init__(self) -> None:
        self._seconds, self._own, self._others = array("d"), array("d"), array("d")

    @property
    def mean_others(self) -> float | None:
        """The mean share used by others; None if unknown."""
        return fmean(self._others) if self._others else None

    def add(self, event: Event) -> None:
        at, others = number(event, "elapsed_s"), [number(event, name) for name in _OTHERS]
        if at is None or others[0] is None or not 0.0 <= at < _MOST_S:
            return
        cores = max(number(event, "cores") or 1.0, 1.0)
        own = (number(event, "own_cores") or 0.0) / cores
        self._seconds.append(max(at, self._seconds[-1]) if self._seconds else at)
        self._own.append(min(max(own, 0.0), 1.0))
        self._others.append(min(max(sum(share or 0.0 for share in others), 0.0), 1.0))

    def cut_after(self, seconds: float) -> None:
        """Drops the events after a time; a resumed run repeats them."""
        kept = bisect_right(self._seconds, seconds)
        for column in (self._seconds, self._own, self._others):
            del column[kept:]

    @property
    def _bin_s(self) -> float:
        return max(self._seconds[-1] / (MAX_BINS - 1), _LEAST_S) if self._seconds else _LEAST_S

    def bins(self) -> list[tuple[float, float, float]]:
        """Returns start, own mean share and others' of at most 120 equal parts of the time."""
        width = self._bin_s
        found: dict[int, list[int]] = {}
        for place, at in enumerate(self._seconds):
            found.setdefault(int(at / width), []).append(place)
        return [
            (part * width, fmean(self._own[p] for p in at), fmean(self._others[p] for p in at))
            for part, at in found.items()
        ]

    def drawing(self) -> str:
        """Returns the used cores over time as SVG, shaded where others used a tenth or more."""
        bins = self.bins()
        if not bins:
            return ""
        width = self._bin_s
        end_s = bins[-1][0] + width
        paths = {"shade": "", "own": "", "others": ""}
        for begin, own, others in bins:
            left, across = _WIDTH * begin / end_s, _WIDTH * width / end_s
            paths["shade"] += _column(left, across, 0.0, 1.0) if others > _BUSY else ""
            paths["own"] += _column(left, across, 0.0, own)
            paths["others"] += _column(left, across, own, others)
        drawn = "".join(f'<path d="{path}" class="{name}"/>' for name, path in paths.items())
        busy = percent(sum(others > _BUSY for *_, others in bins) * width / end_s)
        return (
            f'<svg class="strip" viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none"'
            f' role="img" aria-label="cores used over time">{drawn}</svg>'
            '<p class="key"><span><b class="own"></b>this run</span><span><b class="others"></b>'
            f"others</span><span>0:00 to {clock(end_s)}; others used more than a tenth of the"
            f" machine for {busy} of the time</span></p>"
        )


def _column(left: float, width: float, low: float, share: float) -> str:
    height = _HEIGHT * min(share, max(1.0 - low, 0.0))
    top = _HEIGHT * (1.0 - low) - height
    return f"M{left:.1f} {top:.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z"


_MARK_BYTES = 64
"""Number of first bytes, and of bytes before the position, that identify a file's content."""


class EventTail:
    """Reads the lines added to a metrics.jsonl since the last call.

    A file that was cut, as by a resumed run, or replaced is read again from its beginning. A
    missing file has no lines.

    Attributes:
        num_replaced: number of new beginnings.
        has_more: the last call stopped at its limit: call again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset, self._mark = 0, 0, b""
        self._seen: tuple[int, int, int] | None = None
        self._is_within_long_line = False
        self.num_replaced = 0
        self.has_more = False

    def read(self) -> list[bytes]:
        """Returns the complete lines since the last call.

        One call reads at most 16 MB; a longer line is skipped. An unchanged file costs one `stat`.
        """
        try:
            info = os.lstat(self._path)
            if not self.has_more and self._seen == (info.st_ino, info.st_size, info.st_ctime_ns):
                return []
            self.has_more = False
            with open_regular(self._path) as (descriptor, size):
                info = os.fstat(descriptor)
                is_other = info.st_ino != self._inode or size < self._offset
                if self._offset and (is_other or self._bytes_around(descriptor) != self._mark):
                    self._offset, self._is_within_long_line = 0, False
                    self.num_replaced += 1
                self._inode = info.st_ino
                lines = self._new_lines(descriptor, size)
        except (FastLSTMError, OSError):
            self._seen = None
            return []
        self._seen = info.st_ino, size, info.st_ctime_ns
        return lines

    def _bytes_around(self, descriptor: int) -> bytes:
        length = min(_MARK_BYTES, self._offset)
        return b"".join(os.pread(descriptor, length, place) for place in (0, self._offset - length))

    def _new_lines(self, descriptor: int, size: int) -> list[bytes]:
        data = os.pread(descriptor, min(size - self._offset, MAX_JSON_BYTES), self._offset)
        num_complete = data.rfind(b"\n") + 1
        self.has_more = len(data) == MAX_JSON_BYTES
        lines = data[:num_complete].split(b"\n")[:-1]
        if self._is_within_long_line and num_complete:
            lines = lines[1:]
            self._is_within_long_line = False
        if self.has_more and not num_complete:
            num_complete = len(data)
            self._is_within_long_line = True
        if num_complete:
            self._offset += num_complete
            self._mark = self._bytes_around(descriptor)
        return lines
