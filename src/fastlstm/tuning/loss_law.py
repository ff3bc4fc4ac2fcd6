"""How the validation loss of a forecaster falls with the length of the run: little, soon nothing.

A complete run of S steps ends at ``L (1 + k / S)``, where L is what no length of the model gets
below. k was fitted to complete runs of 30 to 960 steps (`benchmarks/forecast_sizes.py --steps`;
docs/log.md has the runs and the errors). Runs of more steps than that may end higher than said, not
lower: a forecaster of a small table learns its rows by heart, and the best weights are kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

STEPS_WORTH = 4.0
"""k of the law."""
_SD_NEAR = 0.01
"""Standard deviation of the logarithm of a prediction of the same length."""
_SD_OF_CHANGE = 0.5
"""What is added to it, in quadrature, per logarithm of the loss that the law changes."""
_Z90 = 1.645


@dataclass(frozen=True)
class PredictedLoss:
    """Validation loss that a run is expected to end at, with the limits of 90 % of such runs."""

    loss: float
    low: float
    high: float


def loss_after(steps: float, measured_steps: float, measured_loss: float) -> PredictedLoss:
    """Returns what a complete run ends at, from a shorter one of the same model and table.

    Args:
        steps: of the run.
        measured_steps: of the complete run that was measured.
        measured_loss: that it ended at.
    """
    change = math.log1p(STEPS_WORTH / steps) - math.log1p(STEPS_WORTH / measured_steps)
    width = _Z90 * math.hypot(_SD_NEAR, _SD_OF_CHANGE * change)
    loss = measured_loss * math.exp(change)
    spread = abs(loss) * math.expm1(width)
    return PredictedLoss(loss, loss - spread, loss + spread)
