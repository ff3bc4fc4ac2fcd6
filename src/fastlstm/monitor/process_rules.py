"""Rules of alerts about the process of a run."""

from __future__ import annotations

from collections import deque

from fastlstm.monitor.alert_rule import CLEAR, OthersLoad, Rule
from fastlstm.report.events import Event, number


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
    """Seconds without an event while the process uses no processor time.

    Four times as many where others use more than half of the machine: the run may get none.
    """

    name, default, severity = "hang", 8.0, "error"
    advice = "look at the process (py-spy dump); end it and continue with --resume"

    def __init__(self, value: float | None = None) -> None:
        super().__init__(value)
        self._gaps: deque[float] = deque(maxlen=100)
        self._last: float | None = None
        self._others = OthersLoad(30.0)

    def update(self, event: Event) -> str | None:
        self._others.add(event)
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
        least = self.value * (4.0 if (self._others.mean or 0.0) > 0.5 else 1.0)
        if silent > max(least, 4 * usual) and share is not None and share < 0.02:
            return f"{told}, and the process uses no processor time"
        if silent > max(300.0, 10 * usual):
            return f"{told}; before at most {usual:.0f} s"
        return CLEAR if silent < 2.0 else None
