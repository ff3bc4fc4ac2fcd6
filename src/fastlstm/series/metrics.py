"""How good forecasts are: errors, errors over those of naive forecasts, quantiles, coverage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.floating]


@dataclass
class Scores:
    """Sums over forecasts, a batch at a time; values that are missing are left out.

    Attributes:
        num_values: values judged.
    """

    num_values: int = 0
    _absolute: float = 0.0
    _squared: float = 0.0
    _symmetric: float = 0.0
    _naive: float = 0.0

    def add(self, forecast: Values, actual: Values, naive: Values | None = None) -> None:
        """Takes forecasts in.

        Args:
            forecast: any shape.
            actual: the same; NaN where missing.
            naive: what a naive forecast says, for MASE.
        """
        is_there = ~np.isnan(actual)
        if naive is not None:
            is_there &= ~np.isnan(naive)
        f, a = forecast[is_there].astype(np.float64), actual[is_there].astype(np.float64)
        error = np.abs(f - a)
        self.num_values += len(error)
        self._absolute += float(error.sum())
        self._squared += float((error**2).sum())
        size = np.abs(f) + np.abs(a)
        self._symmetric += float((2 * error / np.where(size > 0, size, 1)).sum())
        if naive is not None:
            self._naive += float(np.abs(naive[is_there].astype(np.float64) - a).sum())

    def result(self) -> dict[str, float]:
        """Returns mse, mae, rmse, smape (0 to 2) and, with a naive forecast, mase.

        MASE is here the mean absolute error over that of the naive forecast of the same values
        (also called relative MAE); below 1 is better than naive.
        """
        n = max(self.num_values, 1)
        found = {
            "mse": self._squared / n,
            "mae": self._absolute / n,
            "rmse": (self._squared / n) ** 0.5,
            "smape": self._symmetric / n,
        }
        if self._naive > 0:
            found["mase"] = self._absolute / self._naive
        return found


class QuantileScores:
    """Pinball losses of quantiles and coverage of central intervals, a batch at a time.

    Args:
        quantiles: levels whose pinball loss is asked for (Koenker & Bassett 1978).
        intervals: levels of central intervals, such as 0.8.
        has_crps: judge the whole distribution, too: the continuous ranked probability score as
            twice the mean pinball loss over the levels 0.01 to 0.99 (Gneiting & Raftery 2007).

    Attributes:
        levels: the quantiles to be given to `add`, increasing.
        num_values: values judged.
    """

    def __init__(
        self, quantiles: Sequence[float], intervals: Sequence[float], has_crps: bool = True
    ) -> None:
        self._quantiles, self._intervals = tuple(quantiles), tuple(intervals)
        self._percentiles = [k / 100 for k in range(1, 100)] if has_crps else []
        ends = {end for interval in intervals for end in _ends(interval)}
        self.levels = tuple(sorted({*quantiles, *self._percentiles, *ends}))
        self.num_values = 0
        self._losses = dict.fromkeys(self.levels, 0.0)
        self._inside = dict.fromkeys(self._intervals, 0)

    def add(self, forecast: Values, actual: Values, scale: Values | float = 1.0) -> None:
        """Takes quantiles in.

        Args:
            forecast: shape ``(…, len(levels))``.
            actual: shape ``(…)``; NaN where missing.
            scale: by which errors are multiplied; broadcast to ``actual``.
        """
        is_there = ~np.isnan(actual)
        self.num_values += int(is_there.sum())
        for number, level in enumerate(self.levels):
            error = np.where(is_there, (actual - forecast[..., number]) * scale, 0.0)
            self._losses[level] += float(np.maximum(level * error, (level - 1) * error).sum())
        for interval in self._intervals:
            low, high = (forecast[..., self.levels.index(end)] for end in _ends(interval))
            self._inside[interval] += int(((low <= actual) & (actual <= high)).sum())

    def coverage(self) -> dict[float, float]:
        """Returns the share of values within their interval, ends included, by its level."""
        n = max(self.num_values, 1)
        return {interval: inside / n for interval, inside in self._inside.items()}

    def result(self) -> dict[str, float]:
        """Returns crps where asked for, ``pinball_0.1`` …, ``coverage_80`` …."""
        n = max(self.num_values, 1)
        found = {}
        if self._percentiles:
            found["crps"] = 2 * sum(self._losses[p] for p in self._percentiles) / (n * 99)
        found |= {f"pinball_{level:g}": self._losses[level] / n for level in self._quantiles}
        return found | {f"coverage_{100 * v:g}": share for v, share in self.coverage().items()}


def _ends(interval: float) -> tuple[float, float]:
    return round((1 - interval) / 2, 9), round((1 + interval) / 2, 9)
