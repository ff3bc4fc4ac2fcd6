"""Error measures of forecasts: errors, relative and scaled errors, quantile losses, coverage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.floating]
_SUMMED = ("mae", "mse", "smape", "mase")


class Scores:
    """Errors of point forecasts, summed over batches; missing values are skipped.

    Attributes:
        num_without_past: values whose series has no earlier value, so that the naive forecast is
            the mean of the training rows.
        num_without_scale: values without a MASE; see `add`.
    """

    def __init__(self, num_targets: int = 1) -> None:
        self.num_values, self.num_without_past, self.num_without_scale = 0, 0, 0
        self._sums = dict.fromkeys(_SUMMED, 0.0)
        self._relative = np.zeros((2, num_targets))  # errors that rel_mae compares

    def add(
        self,
        forecast: Values,
        actual: Values,
        naive: Values,
        scale: Values | None = None,
        unit: Values | float = 1.0,
        level: Values | float = 0.0,
    ) -> None:
        """Adds a batch.

        Args:
            forecast: shape ``(…, C)``.
            actual: same shape; NaN where missing.
            naive: naive forecast, same shape.
            scale: for MASE: mean absolute error of the seasonal naive forecast on the training
                rows of each value's series; broadcast to `actual`. Values with a scale of 0 or NaN
                have no MASE and are counted.
            unit: of the values, for rel_mae; broadcast to `actual`.
            level: added to the values for smape, whose figure depends on where 0 is.
        """
        is_there = ~np.isnan(actual)
        f, a = forecast[is_there].astype(np.float64), actual[is_there].astype(np.float64)
        error = np.abs(f - a)
        self.num_values += len(error)
        zero = np.broadcast_to(level, actual.shape)[is_there]
        size = np.abs(f + zero) + np.abs(a + zero)
        self._sums["mae"] += float(error.sum())
        self._sums["mse"] += float((error**2).sum())
        self._sums["smape"] += float((2 * error / np.where(size > 0, size, 1)).sum())
        for totals, values in zip(self._relative, (forecast, naive), strict=True):
            errors = np.abs(values.astype(np.float64) - actual) / unit
            totals += np.nansum(errors.reshape(-1, len(totals)), 0)
        divisor = np.broadcast_to(np.nan if scale is None else scale, actual.shape)[is_there]
        has_scale = divisor > 0
        self._sums["mase"] += float((error[has_scale] / divisor[has_scale]).sum())
        self.num_without_scale += int((~has_scale).sum())

    def result(self) -> dict[str, float]:
        """Returns num_values, mse, mae, rmse, smape (0 to 2), rel_mae and mase.

        rel_mae is the mean absolute error over the naive forecast's, both in the deviation of
        each series, and the mean of this over the targets; below 1 is better than naive. mase is
        the mean of absolute errors, each over the seasonal naive error on the training rows of its
        series (Hyndman & Koehler 2006). Either is omitted if undefined;
        num_without_past and num_without_scale are omitted if 0.
        """
        n, sums = max(self.num_values, 1), self._sums
        measures: dict[str, float] = {"num_values": self.num_values}
        measures |= {name: sums[name] / n for name in ("mse", "mae", "smape")}
        measures["rmse"] = measures["mse"] ** 0.5
        if ratios := [own / naive for own, naive in self._relative.T.tolist() if naive > 0]:
            measures["rel_mae"] = sum(ratios) / len(ratios)
        if num_scaled := self.num_values - self.num_without_scale:
            measures["mase"] = sums["mase"] / num_scaled
            if self.num_without_scale:
                measures["num_without_scale"] = self.num_without_scale
        if self.num_without_past:
            measures["num_without_past"] = self.num_without_past
        return measures


class StepErrors:
    """Errors of each of C targets at each of h steps ahead, summed over batches."""

    def __init__(self, horizon: int, num_targets: int) -> None:
        self._sums = np.zeros((3, horizon, num_targets))  # values, absolute and squared errors

    def add(self, forecast: Values, actual: Values) -> None:
        """Adds a batch; both have shape ``(B, h, C)``, NaN where missing."""
        error = np.abs(forecast.astype(np.float64) - actual)
        self._sums += [(~np.isnan(error)).sum(0), np.nansum(error, 0), np.nansum(error**2, 0)]

    def result(self, target: int, first: int = 1, last: int | None = None) -> dict[str, float]:
        """Returns num_values of a target, by its number, and mse and mae if there are values, from
        the step `first` to `last` ahead, inclusive; default the horizon.
        """
        count, absolute, squared = self._sums[:, first - 1 : last, target].sum(1).tolist()
        if not count:
            return {"num_values": 0}
        return {"num_values": int(count), "mse": squared / count, "mae": absolute / count}


class SeriesErrors:
    """Errors of each of C targets of S series, and of another forecast of the same values."""

    def __init__(self, num_series: int, num_targets: int) -> None:
        self._sums = np.zeros((3, num_series, num_targets))  # values, own and other errors

    def add(
        self, series: NDArray[np.int64], forecast: Values, other: Values, actual: Values
    ) -> None:
        """Adds a batch: numbers of series ``(B,)``, the others ``(B, h, C)``; NaN if missing."""
        own, others = (np.abs(values.astype(np.float64) - actual) for values in (forecast, other))
        sums = [(~np.isnan(own)).sum(1), np.nansum(own, 1), np.nansum(others, 1)]
        for total, part in zip(self._sums, sums, strict=True):
            np.add.at(total, series, part)

    def result(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Returns numbers of values, mean absolute errors, and the other forecast's, each
        ``(S, C)``; NaN without values."""
        count, own, other = self._sums
        with np.errstate(invalid="ignore"):
            return count, own / count, other / count


class QuantileScores:
    """Pinball losses of quantiles and coverage of central intervals, summed over batches.

    Args:
        quantiles: levels to report the pinball loss of (Koenker & Bassett 1978).
        intervals: levels of central intervals, such as 0.8.
        has_crps: also report the continuous ranked probability score: twice the integral of the
            pinball loss over all levels (Gneiting & Raftery 2007), by the trapezoidal rule on the
            levels 0, 0.01 … 1.

    Attributes:
        levels: quantiles that `add` expects, increasing.
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
        self._losses = np.zeros(len(self.levels))
        self._inside = dict.fromkeys(self._intervals, 0)

    def add(self, forecast: Values, actual: Values, scale: Values | float = 1.0) -> None:
        """Adds a batch of quantiles ``(…, len(levels))``, increasing, and values ``(…)``, NaN where
        missing.

        An infinite quantile has the loss of the outermost finite percentile, and its interval
        contains every value. Errors are multiplied by `scale`, broadcast to ``actual``.
        """
        is_there = ~np.isnan(actual)
        self.num_values += int(is_there.sum())
        for interval in self._intervals:
            low, high = (forecast[..., self.levels.index(end)] for end in _ends(interval))
            self._inside[interval] += int(((low <= actual) & (actual <= high)).sum())
        if not (self._quantiles or self._percentiles):
            return
        error = actual[..., None] - _finite(forecast, self._inner)
        error *= np.asarray(scale, dtype=error.dtype)[..., None]
        error[~is_there] = 0.0
        error = error.reshape(-1, len(self.levels))
        # max(level * e, (level - 1) * e) is level * e - min(e, 0)
        above = error.sum(0, dtype=np.float64)
        below = np.minimum(error, 0.0).sum(0, dtype=np.float64)
        self._losses += np.asarray(self.levels) * above - below

    def coverage(self) -> dict[float, float]:
        """Returns the share of values within the interval, ends included, by its level."""
        n = max(self.num_values, 1)
        return {interval: inside / n for interval, inside in self._inside.items()}

    def result(self) -> dict[str, float]:
        """Returns crps if requested, ``pinball_0.1`` …, ``coverage_80`` …."""
        n = max(self.num_values, 1)
        measures = {}
        if self._percentiles:
            measures["crps"] = 2 * sum(self._losses[self._inner].tolist()) / (n * 100)
        for level in self._quantiles:
            measures[f"pinball_{level:g}"] = float(self._losses[self.levels.index(level)]) / n
        return measures | {f"coverage_{100 * v:g}": share for v, share in self.coverage().items()}


def _finite(quantiles: Values, inner: slice | list[int]) -> Values:
    """Returns quantiles ``(…, levels)``, infinite ones clipped to the finite ones of `inner`."""
    is_finite = np.isfinite(quantiles)
    if is_finite.all():
        return quantiles
    some, is_inside = quantiles[..., inner], is_finite[..., inner]
    low = np.where(is_inside, some, np.inf).min(-1, keepdims=True)
    high = np.where(is_inside, some, -np.inf).max(-1, keepdims=True)
    ends = np.where(np.isneginf(quantiles), low, np.where(np.isposinf(quantiles), high, quantiles))
    return np.asarray(ends)


def _ends(interval: float) -> tuple[float, float]:
    return round((1 - interval) / 2, 9), round((1 + interval) / 2, 9)
