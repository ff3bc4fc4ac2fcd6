"""How the validation loss of a forecaster falls with the length of the run.

A doubling of a complete run gains a share of what the doubling before it gained. Two complete runs,
one twice as long as the other, say how much that was; where the longer one is no better, a longer
one still will not be: a forecaster of a small table has learned what there is within a hundred
steps. The share and the errors were measured on complete runs of 30 to 960 steps
(`benchmarks/forecast_sizes.py --steps`, `benchmarks/fit_loss_law.py`; benchmarks/log).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

KEPT_GAIN = 0.6
"""Share of the gain of a doubling that the next one gains."""
_BELOW, _ABOVE = (0.025, 0.01), (0.045, 0.02)
"""Shares of the loss from the prediction to the limits of 90 % of runs, below and above: at the
length measured, and what is added per root of doublings. A longer run is more often worse than
predicted than better: it learns the rows of a small table by heart."""


@dataclass(frozen=True)
class PredictedLoss:
    """Validation loss that a run is expected to end at, with the limits of 90 % of such runs."""

    loss: float
    low: float
    high: float


def loss_after(steps: float, measured_steps: float, half: float, measured: float) -> PredictedLoss:
    """Returns what a complete run ends at, from two shorter ones of the same model and table.

    Args:
        steps: of the run.
        measured_steps: of the longer one.
        half: the loss of a run of half as many steps.
        measured: the loss of the longer one.
    """
    doublings = math.log2(steps / measured_steps)
    gained = max(0.0, half - measured)
    later = KEPT_GAIN * (1.0 - KEPT_GAIN**doublings) / (1.0 - KEPT_GAIN)
    loss = measured - gained * later
    root = math.sqrt(abs(doublings))
    below, above = (abs(loss) * (near + each * root) for near, each in (_BELOW, _ABOVE))
    return PredictedLoss(loss, loss - below, loss + above)
