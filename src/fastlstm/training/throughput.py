"""How fast a run is: rates since the last `step` event, and what its parts take."""

from __future__ import annotations

import time
from typing import Any

from fastlstm.system import hardware
from fastlstm.training.task import Task

_LOG_INTERVAL_S = 1.0


class ThroughputMeter:
    """Collects steps between two `step` events.

    Attributes:
        evaluation_s: seconds of the newest evaluation, 0 before the first.
        save_s: seconds of the newest checkpoint.
        seconds_per_step: a moving mean; 0 before the first.
        is_ceiling_wrong: steps were faster than the ceiling, so it says nothing from then on.
    """

    def __init__(self, task: Task, ceiling_gflops: float) -> None:
        self._task, self._ceiling_gflops = task, ceiling_gflops
        self.evaluation_s, self.save_s, self.seconds_per_step = 0.0, 0.5, 0.0
        self._scored, self._wait_s, self.is_ceiling_wrong = 0, 0.0, False
        self._clear()

    def _clear(self) -> None:
        self._loss = self._norm = self._seconds = 0.0
        self._units = self._steps = 0
        self._since = time.perf_counter()

    @property
    def unit_s(self) -> float:
        """Returns the seconds of scoring a validation unit; before an evaluation, from steps."""
        if self._scored:
            return self.evaluation_s / self._scored
        return self._task.forward_share * self.seconds_per_step / self._task.step_units

    def add_step(self, loss: float, norm: float, units: int, seconds: float) -> None:
        """Records one optimizer step: mean loss, gradient norm, units and seconds."""
        self._loss += loss * units
        self._norm += norm
        self._units += units
        self._steps += 1
        self._seconds += seconds
        mean = self.seconds_per_step
        self.seconds_per_step = seconds if not mean else 0.9 * mean + 0.1 * seconds

    def add_evaluation(self, seconds: float, units: int) -> None:
        """Records an evaluation of so many units."""
        self.evaluation_s, self._scored = seconds, units

    def log_due(self, every: int | None, step: int) -> bool:
        """Returns whether to emit a `step` event: every so many steps, or about once a second."""
        if every is not None:
            return step % every == 0
        return time.perf_counter() - self._since >= _LOG_INTERVAL_S

    def take(self, wait_s: float) -> dict[str, Any]:
        """Returns the rates since the last call; `wait_s` is what `Loader.wait_s` is now."""
        units, seconds = max(self._units, 1), max(self._seconds, 1e-9)
        gflops = units / seconds * self._task.flop_per_unit / 1e9
        share = hardware.ceiling_share(gflops, self._ceiling_gflops)
        if share is None and self._ceiling_gflops:
            self._ceiling_gflops, self.is_ceiling_wrong = 0.0, True
        rates = {
            "loss": self._loss / units,
            "grad_norm": self._norm / max(self._steps, 1),
            "units_per_s": units / seconds,
            "gflops": gflops,
            "ceiling_share": share,
            # Skipped steps wait too, and their seconds are not counted.
            "input_wait_share": min(max(wait_s - self._wait_s, 0.0) / seconds, 1.0),
        }
        self._wait_s = wait_s
        self._clear()
        return rates
