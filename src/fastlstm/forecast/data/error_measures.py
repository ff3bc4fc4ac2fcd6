"""How good forecasts are: errors, errors over those of naive forecasts, quantiles, coverage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.floating]


@dataclass
class Scores:
    """Sums over forecasts, a batch at a time; of values that are missing nothing is judged.

    Attributes:
        num_values: values judged.
        num_without_past: of these, values whose series has no value before the forecast, so that
            naive forecasts are the mean of the training rows.
        num_without_scale: of these, values that MASE leaves out: see `add`.
    """

    num_values: int = 0
    num_without_past: int = 0
    num_without_scale: int = 0
    _absolute: float = 0.0
    _squared: float = 0.0
    _symmetric: float = 0.0
    _naive: float = 0.0
    _scaled: float = 0.0

    def add(
        self, forecast: Values, actual: Values, naive: Values, scale: Values | None = None
    ) -> None:
        """Takes forecasts in.

        Args:
            forecast: any shape.
            actual: the same; NaN where missing.
            naive: what the naive forecast says, the same shape.
            scale: mean absolute error of the seasonal naive forecast on the training rows of each
                value's series, for MASE; broadcast to `actual`. Where it is 0 or NaN, MASE is
                undefined and the value is left out of it, and counted.
        """
        is_there = ~np.isnan(actual)
        f, a = forecast[is_there].astype(np.float64), actual[is_there].astype(np.float64)
        error = np.abs(f - a)
        self.num_values += len(error)
        self._absolute += float(error.sum())
        self._squared += float((error**2).sum())
        size = np.abs(f) + np.abs(a)
        self._symmetric += float((2 * error / np.where(size > 0, size, 1)).sum())
        self._naive += float(np.abs(naive[is_there].astype(np.float64) - a).sum())
        if scale is not None:
            divisor = np.broadcast_to(scale, actual.shape)[is_there]
            has_scale = divisor > 0
            self._scaled += float((error[has_scale] / divisor[has_scale]).sum())
            self.num_without_scale += int((~has_scale).sum())
        else:
            self.num_without_scale += len(error)

    def result(self) -> dict[str, float]:
        """Returns num_values, mse, mae, rmse, smape (0 to 2), rel_mae and mase.

        rel_mae is the mean absolute error over that of the naive forecast of the same values; below
        1 is better than naive. It is left out where the naive forecast has no error. mase is the
        mean of the absolute errors, each over the error of the seasonal naive forecast on the
        training rows of its series (Hyndman & Koehler 2006); it is left out where no series has
        one. num_without_past and num_without_scale are there where they are not 0.
        """
        n = max(self.num_values, 1)
        found: dict[str, float] = {
            "num_values": self.num_values,
            "mse": self._squared / n,
            "mae": self._absolute / n,
            "rmse": (self._squared / n) ** 0.5,
            "smape": self._symmetric / n,
        }
        if self._naive > 0:
            found["rel_mae"] = self._absolute / self._naive
        has_scale = self.num_values - self.num_without_scale
        if has_scale > 0:
            found["mase"] = self._scaled / has_scale
            if self.num_without_scale:
                found["num_without_scale"] = self.num_without_scale
        if self.num_without_past:
            found["num_without_past"] = self.num_without_past
        return found


class StepErrors:
    """Errors of each target at each step ahead, a batch at a time.

    Args:
        horizon: h, steps.
        num_targets: C.
    """

    def __init__(self, horizon: int, num_targets: int) -> None:
        self._count = np.zeros((horizon, num_targets), dtype=np.int64)
        self._absolute = np.zeros((horizon, num_targets))
        self._squared = np.zeros((horizon, num_targets))

    def add(self, forecast: Values, actual: Values) -> None:
        """Takes forecasts in, shape ``(B, h, C)`` like what came; NaN where missing."""
        error = np.abs(forecast.astype(np.float64) - actual)
        self._count += (~np.isnan(error)).sum(0)
        self._absolute += np.nansum(error, 0)
        self._squared += np.nansum(error**2, 0)

    def result(self, target: int, first: int = 1, last: int | None = None) -> dict[str, float]:
        """Returns num_values of one target, and mse and mae where there are any.

        Args:
            target: its number.
            first: step ahead; 1 is the first.
            last: step ahead, itself included; None is the last.
        """
        part = (slice(first - 1, last), target)
        count = int(self._count[part].sum())
        if not count:
            return {"num_values": 0}
        mse, mae = (float(sums[part].sum()) / count for sums in (self._squared, self._absolute))
        return {"num_values": count, "mse": mse, "mae": mae}


class QuantileScores:
    """Pinball losses of quantiles and coverage of central intervals, a batch at a time.

    Args:
        quantiles: levels whose pinball loss is asked for (Koenker & Bassett 1978).
        intervals: levels of central intervals, such as 0.8.
        has_crps: judge the whole distribution, too: the continuous ranked probability score, twice
            the integral of the pinball loss over all levels (Gneiting & Raftery 2007), by the
            trapezoidal rule on the levels 0, 0.01 … 1; the loss at 0 and 1 is 0.

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
        self._inner = [self.levels.index(p) for p in self._percentiles] or slice(None)
        self.num_values = 0
        self._losses = dict.fromkeys(self.levels, 0.0)
        self._inside = dict.fromkeys(self._intervals, 0)

    def add(self, forecast: Values, actual: Values, scale: Values | float = 1.0) -> None:
        """Takes quantiles in.

        Args:
            forecast: shape ``(…, len(levels))``, increasing. A quantile may be infinite: its
                interval holds every value, and its loss is that of the outermost finite percentile.
            actual: shape ``(…)``; NaN where missing.
            scale: by which errors are multiplied; broadcast to ``actual``.
        """
        is_there = ~np.isnan(actual)
        self.num_values += int(is_there.sum())
        if self._quantiles or self._percentiles:
            self._add_losses(forecast, actual, scale)
        for interval in self._intervals:
            low, high = (forecast[..., self.levels.index(end)] for end in _ends(interval))
            self._inside[interval] += int(((low <= actual) & (actual <= high)).sum())

    def _add_losses(self, forecast: Values, actual: Values, scale: Values | float) -> None:
        error = actual[..., None] - _finite(forecast, self._inner)
        error *= np.asarray(scale, dtype=error.dtype)[..., None]
        if np.isnan(actual).any():
            error[np.isnan(actual)] = 0.0
        error = error.reshape(-1, len(self.levels))
        # max(level * e, (level - 1) * e) is level * e - min(e, 0)
        above = error.sum(0, dtype=np.float64)
        below = np.minimum(error, 0.0).sum(0, dtype=np.float64)
        for number, level in enumerate(self.levels):
            self._losses[level] += float(level * above[number] - below[number])

    def coverage(self) -> dict[float, float]:
        """Returns the share of values within their interval, ends included, by its level."""
        n = max(self.num_values, 1)
        return {interval: inside / n for interval, inside in self._inside.items()}

    def result(self) -> dict[str, float]:
        """Returns crps where asked for, ``pinball_0.1`` …, ``coverage_80`` …."""
        n = max(self.num_values, 1)
        found = {}
        if self._percentiles:
            found["crps"] = 2 * sum(self._losses[p] for p in self._percentiles) / (n * 100)
        found |= {f"pinball_{level:g}": self._losses[level] / n for level in self._quantiles}
        return found | {f"coverage_{100 * v:g}": share for v, share in self.coverage().items()}


def _finite(quantiles: Values, known: slice | list[int]) -> Values:
    """Returns quantiles ``(…, levels)``, infinite ones as the outermost finite ones of `known`."""
    is_finite = np.isfinite(quantiles)
    if is_finite.all():
        return quantiles
    some, is_known = quantiles[..., known], is_finite[..., known]
    low = np.where(is_known, some, np.inf).min(-1, keepdims=True)
    high = np.where(is_known, some, -np.inf).max(-1, keepdims=True)
    ends = np.where(np.isneginf(quantiles), low, np.where(np.isposinf(quantiles), high, quantiles))
    return np.asarray(ends)


def _ends(interval: float) -> tuple[float, float]:
    return round((1 - interval) / 2, 9), round((1 + interval) / 2, 9)
