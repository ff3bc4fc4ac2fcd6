"""How good forecasts are: errors, errors over those of naive forecasts, coverage."""

from __future__ import annotations

from collections.abc import Mapping
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


def pinball(quantiles: Mapping[float, Values], actual: Values) -> float:
    """Returns the mean pinball loss over levels and values, times two (MAE at the median)."""
    losses = []
    for level, forecast in quantiles.items():
        error = (actual - forecast)[~np.isnan(actual)]
        losses.append(2 * np.maximum(level * error, (level - 1) * error).mean())
    return float(np.mean(losses))


def coverage(low: Values, high: Values, actual: Values) -> float:
    """Returns the share of values within their interval, ends included."""
    is_there = ~np.isnan(actual)
    return float(((low <= actual) & (actual <= high))[is_there].mean())
