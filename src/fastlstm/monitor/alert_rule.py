"""What the rules of alerts have in common.

A rule looks at the events of one run. Beside those of metrics.jsonl it gets `process` events, which
whoever watches a run on its own machine makes (`run_process.py`).
"""

from __future__ import annotations

from collections import deque
from statistics import fmean
from typing import ClassVar

from fastlstm.monitor.machine_strip import others_share
from fastlstm.report.events import Event, number

MB, GB = 1e6, 1e9
CLEAR = ""
BUSY = 0.1
"""Share of the machine that others use, above which a run may be slow because of them."""


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
    advice: str

    def __init__(self, value: float | None = None) -> None:
        self.value = self.default if value is None else value
        self.is_active = False

    def update(self, event: Event) -> str | None:
        """Returns a sentence where the trouble is there, `CLEAR` where it is not, else None."""
        raise NotImplementedError


class OthersLoad:
    """What others used of the machine during the last seconds, by `machine` and `process` events.

    Args:
        window_s: how far back an event counts.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._shares: deque[tuple[float, float]] = deque(maxlen=200)

    def add(self, event: Event) -> None:
        """Takes an event of any kind."""
        if event.get("event") not in ("machine", "process"):
            return
        share, time_s = others_share(event), number(event, "time")
        if share is None or time_s is None:
            return
        if self._shares and time_s < self._shares[-1][0]:
            self._shares.clear()
        self._shares.append((time_s, share))
        while self._shares[0][0] < time_s - self._window_s:
            self._shares.popleft()

    @property
    def mean(self) -> float | None:
        """Mean share of the machine, 0..1; None where it is not known."""
        return fmean(share for _, share in self._shares) if self._shares else None

    @property
    def is_busy(self) -> bool:
        """Whether others use enough of it to be felt."""
        return (self.mean or 0.0) > BUSY

    @property
    def told(self) -> str:
        """A clause about it, empty where it is not known."""
        mean = self.mean
        return "" if mean is None else f"others use {100 * mean:.0f} % of the machine"
