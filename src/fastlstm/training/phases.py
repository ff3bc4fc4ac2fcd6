"""Where the time of a run goes: `phase` events."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fastlstm.runs.events import Event

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer

INTERVAL_S = 10.0


class PhaseTimes:
    """The seconds of each phase of training since the last `phase` event.

    They are differences of counters that the loader, the stepper and `Progress` keep anyway. On a
    GPU the update runs on while the next step begins, so a part of it is counted there.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.begin()

    def begin(self) -> None:
        """Counts from now on."""
        self._since, self._before = time.monotonic(), self._counters()

    def is_due(self) -> bool:
        """Returns whether to emit an event: about every 10 s."""
        return time.monotonic() - self._since >= INTERVAL_S

    def take(self) -> dict[str, float]:
        """Returns the seconds of each phase since the last call; `other` is the rest."""
        wall_s = time.monotonic() - self._since
        before, now = self._before, self._counters()
        spent = {name: max(now[name] - before[name], 0.0) for name in now}
        self.begin()
        return {**spent, "other": max(wall_s - sum(spent.values()), 0.0)}

    def event(self) -> Event:
        """Returns the `phase` event of the time since the last one."""
        return {"event": "phase", "step": self._trainer.progress.step, "seconds": self.take()}

    def _counters(self) -> dict[str, float]:
        trainer = self._trainer
        spent = trainer.progress.spent
        return {
            "input_wait": trainer.task.loader.wait_s,
            **trainer.stepper.seconds,
            "evaluation": spent.get("evaluations", 0.0),
            "checkpoint": spent.get("saving", 0.0),
        }
