"""Rules of alerts about memory and disk."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from statistics import fmean

from fastlstm.monitor.alert_rule import CLEAR, GB, MB, Rule
from fastlstm.report.events import Event, number
from fastlstm.report.terminal import clock


class Slope:
    """Whether a figure grows steadily: by about as much in each quarter of its samples."""

    def __init__(self, window_s: float, least_s: float = 10.0) -> None:
        self._window_s, self._least_s = window_s, least_s
        self._samples: deque[tuple[float, float]] = deque(maxlen=1000)
        self.rate = self.change = 0.0

    def clear(self) -> None:
        self._samples.clear()
        self.rate = self.change = 0.0

    def add(self, time_s: float, value: float) -> None:
        self._samples.append((time_s, value))
        while self._samples[0][0] < time_s - self._window_s:
            self._samples.popleft()
        self.rate = self.change = 0.0
        span, count = time_s - self._samples[0][0], len(self._samples)
        if span < self._least_s or count < 6:
            return
        values = [value for _, value in self._samples]
        means = [fmean(values[at * count // 4 : (at + 1) * count // 4]) for at in range(4)]
        steps = [after - before for before, after in pairwise(means)]
        if min(steps) > 0.4 * fmean(steps) > 0.0:
            self.change = value - values[0]
            self.rate = max(self.change, 0.0) / span


class MemoryGrowth(Rule):
    """Hours after which memory is used up at its present growth."""

    name, default, severity = "memory", 1.0, "error"
    advice = "stop the run (Ctrl-C saves it) and continue with --resume, which frees the memory"

    def __init__(self, value: float | None = None) -> None:
        super().__init__(value)
        self._used, self._newest = Slope(300.0, least_s=60.0), Slope(6.5, least_s=4.5)

    def update(self, event: Event) -> str | None:
        if event.get("event") == "start":
            self._used.clear()
            self._newest.clear()
        now, used = number(event, "time"), number(event, "anonymous_bytes")
        left = number(event, "available_bytes")
        if event.get("event") not in ("machine", "process"):
            return None
        if now is None or used is None or left is None:
            return None
        self._used.add(now, used)
        self._newest.add(now, used)
        rate, hours = self._used.rate, self.value
        if left < 300.0 * self._newest.rate:  # six seconds tell of a fast growth only
            rate, hours = self._newest.rate, 1.0
        grown = max(self._used.change, self._newest.change)
        if rate > 0.0 and grown > 64 * MB and left / rate < 3600.0 * hours:
            told = f"{rate * 60 / MB:,.0f} MB a minute, {left / GB:.1f} GB are left"
            return f"memory grows by {told}: used up in {clock(left / rate)}"
        return CLEAR if rate <= 0.0 or left / rate > 7200.0 * self.value else None


class DiskFull(Rule):
    """Hours after which the disk of the run is full at its present growth."""

    name, default, severity = "disk", 1.0, "error"
    advice = "free space on the disk of the run, or lower --keep-checkpoints"

    def __init__(self, value: float | None = None) -> None:
        super().__init__(value)
        self._used, self._checkpoint = Slope(600.0), 0.0

    def update(self, event: Event) -> str | None:
        if event.get("event") == "checkpoint":
            self._checkpoint = number(event, "bytes") or 0.0
        free, now = number(event, "disk_free_bytes"), number(event, "time")
        if event.get("event") not in ("machine", "process") or free is None or now is None:
            return None
        self._used.add(now, -free)
        least = max(2.0 * self._checkpoint, 100 * MB)
        if free < least:
            return f"{free / MB:,.0f} MB of the disk are free, {least / MB:,.0f} MB are needed"
        rate = self._used.rate
        if rate > 0.0 and self._used.change > 0.02 * free and free / rate < 3600.0 * self.value:
            return f"the disk will be full in {clock(free / rate)}, {free / GB:.1f} GB are free"
        return CLEAR if free > 1.5 * least else None
