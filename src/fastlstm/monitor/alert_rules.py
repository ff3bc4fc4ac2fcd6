"""The rules of alerts: each looks at the events of one run and says whether its trouble is there.

Beside the events of metrics.jsonl they get `process` events, which whoever watches a run on its
own machine makes (`run_process.py`).
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from statistics import fmean, median
from typing import ClassVar

from fastlstm.report.events import Event, number, text_of

MB, GB = 1e6, 1e9
CLEAR = ""


class Rule:
    """One kind of trouble.

    Attributes:
        value: its threshold; what it means is the class' first sentence.
        severity: "error" or "warning".
        advice: what to do.
    """

    name: ClassVar[str]
    default: ClassVar[float] = 0.0
    severity: ClassVar[str] = "warning"
    advice: ClassVar[str]

    def __init__(self, value: float | None = None) -> None:
        self.value = self.default if value is None else value
        self.is_active = False

    def update(self, event: Event) -> str | None:
        """Returns a sentence where the trouble is there, `CLEAR` where it is not, else None."""
        raise NotImplementedError


class NotFinite(Rule):
    """A step was skipped because of NaN or Inf; clears after so many good `step` events."""

    name, default, severity = "nan", 30.0, "error"
    advice = "lower --learning-rate, or set --grad-clip; the run goes back by itself if it lasts"

    def __init__(self, value: float | None = None) -> None:
        super().__init__(value)
        self._good = 0

    def update(self, event: Event) -> str | None:
        kind = event.get("event")
        if kind == "skip" or (kind == "step" and number(event, "loss") is None):
            self._good = 0
            what = text_of(event, "what") or "the loss"
            tensor = text_of(event, "tensor")
            where = f" ({tensor})" if tensor else ""
            return f"step {event.get('step')}: {what} is not a finite number{where}"
        self._good += kind == "step"
        return CLEAR if self._good >= self.value else None


class LossSpike(Rule):
    """The training loss is so many robust deviations above its median of 50 `step` events."""

    name, default = "spike", 6.0
    advice = "lower --learning-rate or set --grad-clip; look at the data around this step"

    def __init__(self, value: float | None = None) -> None:
        super().__init__(value)
        self._losses: deque[float] = deque(maxlen=50)
        self._high = self._low = 0

    def update(self, event: Event) -> str | None:
        loss = number(event, "loss")
        if event.get("event") == "start":
            self._losses.clear()
        if event.get("event") != "step" or loss is None:
            return None
        if len(self._losses) < 20:
            self._losses.append(loss)
            return None
        middle = median(self._losses)
        spread = 1.4826 * median(abs(x - middle) for x in self._losses)
        z = (loss - middle) / max(spread, 0.02 * abs(middle), 1e-9)
        self._high = self._high + 1 if z > self.value else 0
        self._low = self._low + 1 if z < self.value / 2 else 0
        if z <= self.value and not self.is_active:
            self._losses.append(loss)
        if self._high >= 2 or z > 5 * self.value:
            return f"step {event.get('step')}: the loss is {loss:.4g}, it was {middle:.4g}"
        return CLEAR if self._low >= 5 else None


class InputStall(Rule):
    """Share of 30 s of training that steps waited for input."""

    name, default = "input", 0.2
    advice = "run fastlstm profile; copy the data to a local disk, or free a core for the loader"

    def __init__(self, value: float | None = None) -> None:
        super().__init__(value)
        self._parts: deque[tuple[float, float, float]] = deque(maxlen=200)
        self._last: float | None = None

    def update(self, event: Event) -> str | None:
        if event.get("event") == "start":
            self._parts.clear()
            self._last = None
        share, now = number(event, "input_wait_share"), number(event, "elapsed_s")
        if event.get("event") != "step" or share is None or now is None:
            return None
        if self._last is not None and now > self._last:
            self._parts.append((now, now - self._last, min(share, 1.0)))
        self._last = now
        while self._parts and self._parts[0][0] < now - 30.0:
            self._parts.popleft()
        span = sum(seconds for _, seconds, _ in self._parts)
        if span < 25.0:
            return None
        mean = sum(seconds * part for _, seconds, part in self._parts) / span
        if mean > self.value:
            return f"training waited for input {100 * mean:.0f} % of the last {span:.0f} s"
        return CLEAR if mean < self.value / 2 else None


class EtaSlip(Rule):
    """The run will take longer than first foreseen, by this share."""

    name, default = "eta", 0.2
    advice = "see what else the machine does (machine events, fastlstm profile)"

    def __init__(self, value: float | None = None) -> None:
        super().__init__(value)
        self._totals: deque[tuple[float, float]] = deque(maxlen=200)
        self._first: float | None = None

    def update(self, event: Event) -> str | None:
        if event.get("event") == "start":
            self._totals.clear()
            self._first = None
        now, eta = number(event, "elapsed_s"), number(event, "eta_s")
        if event.get("event") != "step" or now is None or eta is None:
            return None
        self._totals.append((now, now + eta))
        while self._totals[0][0] < now - 45.0:
            self._totals.popleft()
        if len(self._totals) < 8 or now - self._totals[0][0] < 25.0:
            return None
        total = median(total for _, total in self._totals)
        self._first = total if self._first is None else self._first
        self._first += 0.05 * min(total - self._first, 0.0)  # one quiet minute is no promise
        slip = total / max(self._first, 1.0) - 1.0
        if slip > self.value:
            told = f"{_clock(total)} in all, {_clock(self._first)} were foreseen"
            return f"the run will take {100 * slip:.0f} % longer: {told}"
        return CLEAR if slip < self.value / 2 else None


class Slowdown(Rule):
    """Share of its speed that the run has lost while the machine is not busy with other work."""

    name, default = "speed", 0.15
    advice = "see clocks and temperature of the machine; run fastlstm profile"

    def __init__(self, value: float | None = None) -> None:
        super().__init__(value)
        self._rates: deque[float] = deque(maxlen=70)
        self._busy: deque[float] = deque(maxlen=3)

    def update(self, event: Event) -> str | None:
        kind = event.get("event")
        if kind == "start":
            self._rates.clear()
        if kind in ("machine", "process"):
            shares = [number(event, f"{name}_share") for name in ("others", "steal", "throttled")]
            if shares[0] is not None:
                self._busy.append(sum(share for share in shares if share is not None))
        rate = number(event, "units_per_s")
        if kind != "step" or rate is None:
            return None
        if self.is_active and len(self._rates) == 70:
            del self._rates[60]  # what it was compared with stays
        self._rates.append(rate)
        rates = list(self._rates)
        if len(rates) < 40 or not self._busy or max(self._busy) > 0.1:
            return None
        before, now = median(rates[:-10]), median(rates[-10:])
        spread = 1.4826 * median(abs(x - before) for x in rates[:-10])
        lost = 1.0 - now / max(before, 1e-9)
        if lost > self.value and before - now > 3.0 * spread:
            told = f"{now:,.0f} a second now, {before:,.0f} before; the machine is not busy"
            return f"training is {100 * lost:.0f} % slower: {told}"
        return CLEAR if lost < self.value / 2 else None


class MemoryGrowth(Rule):
    """Hours after which memory is used up at its present growth."""

    name, default, severity = "memory", 1.0, "error"
    advice = "stop the run (Ctrl-C saves it) and continue with --resume, which frees the memory"

    def __init__(self, value: float | None = None) -> None:
        super().__init__(value)
        self._used, self._newest = _Slope(300.0), _Slope(12.0)

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
        if left < 300.0 * self._newest.rate:  # ten seconds tell of a fast growth only
            rate, hours = self._newest.rate, 1.0
        grown = max(self._used.change, self._newest.change)
        if rate > 0.0 and grown > 64 * MB and left / rate < 3600.0 * hours:
            told = f"{rate * 60 / MB:,.0f} MB a minute, {left / GB:.1f} GB are left"
            return f"memory grows by {told}: used up in {_clock(left / rate)}"
        return CLEAR if rate <= 0.0 or left / rate > 7200.0 * self.value else None


class DiskFull(Rule):
    """Hours after which the disk of the run is full at its present growth."""

    name, default, severity = "disk", 1.0, "error"
    advice = "free space on the disk of the run, or lower --keep-checkpoints"

    def __init__(self, value: float | None = None) -> None:
        super().__init__(value)
        self._used, self._checkpoint = _Slope(600.0), 0.0

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
            return f"the disk will be full in {_clock(free / rate)}, {free / GB:.1f} GB are free"
        return CLEAR if free > 1.5 * least else None


class Overfitting(Rule):
    """So many evaluations in a row are worse than the best while the training loss falls."""

    name, default = "overfitting", 3.0
    advice = "the best weights are kept: end the run (--patience), or raise --dropout"

    def __init__(self, value: float | None = None) -> None:
        super().__init__(value)
        self._best = self._best_train = float("inf")
        self._worse: list[float] = []
        self._losses: list[float] = []

    def update(self, event: Event) -> str | None:
        loss, kind = number(event, "loss"), event.get("event")
        if kind == "step" and loss is not None:
            self._losses = [*self._losses[-200:], loss]
        if kind != "eval" or loss is None or event.get("split", "valid") != "valid":
            return None
        train = fmean(self._losses) if self._losses else self._best_train
        self._losses = []
        if loss < self._best:
            self._best, self._best_train, self._worse = loss, train, []
            return CLEAR
        self._worse.append(loss)
        newest = self._worse[-int(self.value) :]
        rises = len(newest) >= self.value and newest == sorted(newest)
        margin = 0.01 * abs(self._best)
        if rises and loss > self._best + margin and train < self._best_train - margin:
            told = f"{loss:.4g} after {self._best:.4g} at best"
            return f"the validation loss rises ({told}) while the training loss falls"
        return None


class Dead(Rule):
    """The process of the run is gone, and the run has not ended; so many looks confirm it."""

    name, default, severity = "dead", 2.0, "error"
    advice = "the same command with --resume continues it"

    def __init__(self, value: float | None = None) -> None:
        super().__init__(value)
        self._looks = 0

    def update(self, event: Event) -> str | None:
        if event.get("event") != "process" or event.get("is_locked") is None:
            return None
        self._looks = 0 if event["is_locked"] else self._looks + 1
        if self._looks >= self.value:
            return "no process writes this run any more, and it has not ended"
        return CLEAR if event["is_locked"] else None


class Hang(Rule):
    """Seconds without an event while the process uses no processor time."""

    name, default, severity = "hang", 8.0, "error"
    advice = "look at the process (py-spy dump); end it and continue with --resume"

    def __init__(self, value: float | None = None) -> None:
        super().__init__(value)
        self._gaps: deque[float] = deque(maxlen=100)
        self._last: float | None = None

    def update(self, event: Event) -> str | None:
        now = number(event, "elapsed_s")
        if event.get("event") in ("start", "step", "eval") and now is not None:
            if self._last is not None:
                self._gaps.append(max(now - self._last, 0.0))
            self._last = now
        silent = number(event, "silent_s")
        if event.get("event") != "process" or silent is None or not event.get("is_locked"):
            return None
        if event.get("state") == "T" and silent > 3.0:
            return f"the process is stopped (SIGSTOP); no event for {silent:.0f} s"
        usual, share = max(self._gaps, default=0.0), number(event, "cpu_share")
        told = f"no event for {silent:.0f} s"
        if silent > max(self.value, 4 * usual) and share is not None and share < 0.02:
            return f"{told}, and the process uses no processor time"
        if silent > max(300.0, 10 * usual):
            return f"{told}; before at most {usual:.0f} s"
        return CLEAR if silent < 2.0 else None


RULES = {
    rule.name: rule
    for rule in (
        NotFinite, LossSpike, InputStall, EtaSlip, Slowdown,
        MemoryGrowth, DiskFull, Overfitting, Dead, Hang,
    )
}  # fmt: skip


class _Slope:
    """Whether a figure grows steadily: by about as much in each quarter of its samples."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
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
        span, size = time_s - self._samples[0][0], len(self._samples) // 4
        if span < 10.0 or size < 2:
            return
        values = [value for _, value in self._samples]
        means = [fmean(values[at * size : (at + 1) * size]) for at in range(4)]
        steps = [after - before for before, after in pairwise(means)]
        if min(steps) > 0.4 * fmean(steps) > 0.0:
            self.change = value - values[0]
            self.rate = max(self.change, 0.0) / span


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
