"""Rules of alerts about the speed of a run, which others on the machine may be the cause of."""

from __future__ import annotations

from collections import deque
from statistics import median

from fastlstm.monitor.alert_rule import CLEAR, OthersLoad, Rule
from fastlstm.report.events import Event, number
from fastlstm.report.terminal import clock
from fastlstm.system.machine_usage import CORE_WAIT, threads_with_cores

_OTHERS_ADVICE = "others slow the run down (top shows them): end them, or accept the later end"


class InputStall(Rule):
    """Share of 30 s of training that steps waited for input.

    A loader waits for a core as training does: what others use of the machine is added to the
    threshold, so that their load alone is no stall.
    """

    name, default = "input", 0.2
    advice = "run fastlstm profile; copy the data to a local disk, or free a core for the loader"

    def __init__(self, value: float | None = None) -> None:
        super().__init__(value)
        self._parts: deque[tuple[float, float, float]] = deque(maxlen=200)
        self._last: float | None = None
        self._others = OthersLoad(30.0)

    def update(self, event: Event) -> str | None:
        self._others.add(event)
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
        is_busy = self._others.is_busy
        if mean > self.value + (self._others.mean or 0.0 if is_busy else 0.0):
            told = f"training waited for input {100 * mean:.0f} % of the last {span:.0f} s"
            return f"{told}; {self._others.told}" if is_busy else told
        return CLEAR if mean < self.value / 2 else None


class EtaSlip(Rule):
    """The run will take longer than first foreseen, by this share."""

    name, default = "eta", 0.2
    advice = "run fastlstm profile, which finds what holds the run back"

    def __init__(self, value: float | None = None) -> None:
        super().__init__(value)
        self._totals: deque[tuple[float, float]] = deque(maxlen=200)
        self._first: float | None = None
        self._others = OthersLoad(45.0)

    def update(self, event: Event) -> str | None:
        self._others.add(event)
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
            told = f"{clock(total)} in all, {clock(self._first)} were foreseen"
            if others := self._others.told:
                told = f"{told}; {others}"
            self.advice = _OTHERS_ADVICE if self._others.is_busy else type(self).advice
            return f"the run will take {100 * slip:.0f} % longer: {told}"
        return CLEAR if slip < self.value / 2 else None


class Slowdown(Rule):
    """Share of its speed that the run has lost while the machine is not busy with other work."""

    name, default = "speed", 0.15
    advice = "see clocks and temperature of the machine; run fastlstm profile"

    def __init__(self, value: float | None = None) -> None:
        super().__init__(value)
        self._rates: deque[float] = deque(maxlen=70)
        self._others = OthersLoad(12.0)

    def update(self, event: Event) -> str | None:
        self._others.add(event)
        kind = event.get("event")
        if kind == "start":
            self._rates.clear()
        rate = number(event, "units_per_s")
        if kind != "step" or rate is None:
            return None
        if self.is_active and len(self._rates) == 70:
            del self._rates[60]  # what it was compared with stays
        self._rates.append(rate)
        rates = list(self._rates)
        if len(rates) < 40 or self._others.mean is None or self._others.is_busy:
            return None
        before, now = median(rates[:-10]), median(rates[-10:])
        lost = 1.0 - now / max(before, 1e-9)
        if lost > self.value and before - now > 3.0 * _spread(rates[:-10], before):
            told = f"{now:,.0f} a second now, {before:,.0f} before; {self._others.told}"
            return f"training is {100 * lost:.0f} % slower: {told}"
        return CLEAR if lost < self.value / 2 else None


def _spread(values: list[float], middle: float) -> float:
    """Returns the robust deviation of values from their median."""
    return 1.4826 * median(abs(value - middle) for value in values)


class CoreWait(Rule):
    """Threads of the run that are ready to run and have no core, in the mean of 15 s."""

    name, default = "cores", CORE_WAIT
    advice = _OTHERS_ADVICE

    def __init__(self, value: float | None = None) -> None:
        super().__init__(value)
        self._parts: deque[tuple[float, float, float]] = deque(maxlen=200)
        self._threads = 1
        self._others = OthersLoad(15.0)

    def update(self, event: Event) -> str | None:
        self._others.add(event)
        if event.get("event") == "start":
            self._parts.clear()
            self._threads = int(number(event, "threads") or 1)
        if event.get("event") not in ("machine", "process"):
            return None
        waiting, now = number(event, "waiting_threads"), number(event, "time")
        seconds = number(event, "seconds")
        if waiting is None or now is None or seconds is None:
            return None
        self._parts.append((now, seconds, waiting))
        while self._parts[0][0] < now - 15.0:
            self._parts.popleft()
        span = sum(seconds for _, seconds, _ in self._parts)
        if span < 8.0:
            return None
        mean = sum(seconds * waiting for _, seconds, waiting in self._parts) / span
        if mean > self.value:
            fewer = threads_with_cores(self._threads, mean)
            how = f", or continue with --resume --threads {fewer}" * (fewer < self._threads)
            self.advice = f"end what else uses the cores (top shows it){how}"
            told = f"{mean:.1f} of {self._threads} threads wait for a core"
            return f"{told}; {self._others.told}" if self._others.told else told
        return CLEAR if mean < self.value / 2 else None
