"""Rules of alerts about the loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from statistics import fmean, median

from fastlstm.monitor.alert_rule import CLEAR, Rule
from fastlstm.report.events import Event, number, text_of
from fastlstm.report.lines import skip_text


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
            if kind == "skip":
                return skip_text(event)
            return f"step {text_of(event, 'step')}: the loss is not a finite number"
        self._good += kind == "step"
        return CLEAR if self._good >= self.value else None


class LossSpike(Rule):
    """The training loss is so many robust deviations above its last 15 `step` events.

    The deviation is that of neighbours among 50 events, so that a loss that still falls fast, as
    at the beginning of a run, does not widen it.
    """

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
        losses = list(self._losses)
        middle = median(losses[-15:])
        spread = 1.05 * median(abs(after - before) for before, after in pairwise(losses))
        z = (loss - middle) / max(spread, 0.02 * abs(middle), 1e-9)
        self._high = self._high + 1 if z > self.value else 0
        self._low = self._low + 1 if z < self.value / 2 else 0
        if z <= self.value and not self.is_active:
            self._losses.append(loss)
        if self._high >= 2 or z > 5 * self.value:
            return f"step {text_of(event, 'step')}: the loss is {loss:.4g}, it was {middle:.4g}"
        return CLEAR if self._low >= 5 else None


class Overfitting(Rule):
    """So many evaluations in a row are worse than the best while the training loss falls.

    Worse by 1 % at least, and by seven times what evaluations vary beside their trend, the first
    of them by five times: of hundreds the best is low by chance, and some triple rises.
    """

    name, default = "overfitting", 3.0
    advice = "the best weights are kept: end the run (--patience), or raise --dropout"

    def __init__(self, value: float | None = None) -> None:
        super().__init__(value)
        self._best = self._best_train = float("inf")
        self._worse: list[float] = []
        self._losses: list[float] = []
        self._evaluations: deque[float] = deque(maxlen=100)

    def update(self, event: Event) -> str | None:
        loss, kind = number(event, "loss"), event.get("event")
        if kind == "step" and loss is not None:
            self._losses = [*self._losses[-200:], loss]
        if kind != "eval" or loss is None or event.get("split", "valid") != "valid":
            return None
        train = fmean(self._losses) if self._losses else self._best_train
        self._losses = []
        self._evaluations.append(loss)
        if loss < self._best:
            self._best, self._best_train, self._worse = loss, train, []
            return CLEAR
        self._worse.append(loss)
        newest = self._worse[-int(self.value) :]
        rises = len(newest) >= self.value and newest == sorted(newest)
        margin = 0.01 * abs(self._best)
        noise = _deviation(self._evaluations)
        is_worse = loss > self._best + max(margin, 7.0 * noise)
        rises = rises and newest[0] > self._best + 5.0 * noise
        if rises and is_worse and train < self._best_train - margin:
            told = f"{loss:.4g} after {self._best:.4g} at best"
            return f"the validation loss rises ({told}) while the training loss falls"
        return None


def _deviation(values: Iterable[float]) -> float:
    """Returns the robust deviation of values beside their trend, by their second differences."""
    steps = [after - before for before, after in pairwise(values)]
    bends = [abs(after - before) for before, after in pairwise(steps)]
    return 0.605 * median(bends) if bends else 0.0
