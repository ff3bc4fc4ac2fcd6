"""Rules of alerts about the loss."""

from __future__ import annotations

from collections import deque
from statistics import fmean, median

from fastlstm.monitor.alert_rule import CLEAR, Rule
from fastlstm.report.events import Event, number, text_of


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
