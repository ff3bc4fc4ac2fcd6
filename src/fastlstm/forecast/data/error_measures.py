"""Error measures of forecasts: errors, relative and scaled errors, quantile losses, coverage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.forecast.data.exact_sum import ExactSum

Values = NDArray[np.floating]
_SUMMED = ("mae", "mse", "smape", "naive", "mase")
_COUNTED = ("num_values", "num_without_past", "num_without_scale")


@dataclass
class Scores:
    """Errors of point forecasts, summed over batches; missing values are skipped.

    The sums of batches are added exactly: their order does not matter.

    Attributes:
        num_values: values evaluated.
        num_without_past: values whose series has no earlier value, so that the naive forecast is
            the mean of the training rows.
        num_without_scale: values without a MASE; see `add`.
    """

    num_values: int = 0
    num_without_past: int = 0
    num_without_scale: int = 0
    _sums: dict[str, ExactSum] = field(
        default_factory=lambda: {name: ExactSum() for name in _SUMMED}
    )

    def add(
        self, forecast: Values, actual: Values, naive: Values, scale: Values | None = None
    ) -> None:
        """Adds a batch.

        Args:
            forecast: any shape.
            actual: same shape; NaN where missing.
            naive: naive forecast, same shape.
            scale: for MASE: mean absolute error of the seasonal naive forecast on the training
                rows of each value's series; broadcast to `actual`. Values with a scale of 0 or NaN
                have no MASE and are counted.
        """
        is_there = ~np.isnan(actual)
        f, a = forecast[is_there].astype(np.float64), actual[is_there].astype(np.float64)
        error = np.abs(f - a)
        self.num_values += len(error)
        size = np.abs(f) + np.abs(a)
        self._sums["mae"] += float(error.sum())
        self._sums["mse"] += float((error**2).sum())
        self._sums["smape"] += float((2 * error / np.where(size > 0, size, 1)).sum())
        self._sums["naive"] += float(np.abs(naive[is_there].astype(np.float64) - a).sum())
        divisor = np.broadcast_to(np.nan if scale is None else scale, actual.shape)[is_there]
        has_scale = divisor > 0
        self._sums["mase"] += float((error[has_scale] / divisor[has_scale]).sum())
        self.num_without_scale += int((~has_scale).sum())

    def result(self) -> dict[str, float]:
        """Returns num_values, mse, mae, rmse, smape (0 to 2), rel_mae and mase.

        rel_mae is the mean absolute error over that of the naive forecast; below 1 is better than
        naive. mase is the mean of absolute errors, each over the seasonal naive error on the
        training rows of its series (Hyndman & Koehler 2006). Either is omitted if undefined;
        num_without_past and num_without_scale are omitted if 0.
        """
        n, sums = max(self.num_values, 1), {name: float(s) for name, s in self._sums.items()}
        measures: dict[str, float] = {"num_values": self.num_values}
        measures |= {name: sums[name] / n for name in ("mse", "mae", "smape")}
        measures["rmse"] = measures["mse"] ** 0.5
        if sums["naive"] > 0:
            measures["rel_mae"] = sums["mae"] / sums["naive"]
        if num_scaled := self.num_values - self.num_without_scale:
            measures["mase"] = sums["mase"] / num_scaled
            if self.num_without_scale:
                measures["num_without_scale"] = self.num_without_scale
        if self.num_without_past:
            measures["num_without_past"] = self.num_without_past
        return measures

    def to_json(self) -> dict[str, Any]:
        """Returns counts and sums as JSON values."""
        sums = {name: total.to_json() for name, total in self._sums.items()}
        return {**{name: getattr(self, name) for name in _COUNTED}, "sums": sums}

    def add_json(self, values: Mapping[str, Any]) -> None:
        """Adds what `to_json` of another returned."""
        for name in _COUNTED:
            setattr(self, name, getattr(self, name) + _count_of(values[name]))
        for name in _SUMMED:
            self._sums[name] += _sum_of(values["sums"][name])


class StepErrors:
    """Errors of each of C targets at each of h steps ahead, summed over batches."""

    def __init__(self, horizon: int, num_targets: int) -> None:
        self._sums = np.zeros((3, horizon, num_targets))  # values, absolute and squared errors

    def add(self, forecast: Values, actual: Values) -> None:
        """Adds a batch; both have shape ``(B, h, C)``, NaN where missing."""
        error = np.abs(forecast.astype(np.float64) - actual)
        self._sums += [(~np.isnan(error)).sum(0), np.nansum(error, 0), np.nansum(error**2, 0)]

    def result(self, target: int, first: int = 1, last: int | None = None) -> dict[str, float]:
        """Returns num_values of one target, and mse and mae if there are values.

        Args:
            target: its number.
            first: first step ahead, from 1.
            last: last step ahead, inclusive; None for the horizon.
        """
        count, absolute, squared = self._sums[:, first - 1 : last, target].sum(1).tolist()
        if not count:
            return {"num_values": 0}
        return {"num_values": int(count), "mse": squared / count, "mae": absolute / count}


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
        num_values: values evaluated.
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
        self._losses = {level: ExactSum() for level in self.levels}
        self._inside = dict.fromkeys(self._intervals, 0)

    def add(self, forecast: Values, actual: Values, scale: Values | float = 1.0) -> None:
        """Adds a batch.

        Args:
            forecast: shape ``(…, len(levels))``, increasing. An infinite quantile has the loss of
                the outermost finite percentile, and its interval contains every value.
            actual: shape ``(…)``; NaN where missing.
            scale: factor of the errors; broadcast to ``actual``.
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
        """Returns the share of values within the interval, ends included, by its level."""
        n = max(self.num_values, 1)
        return {interval: inside / n for interval, inside in self._inside.items()}

    def result(self) -> dict[str, float]:
        """Returns crps if requested, ``pinball_0.1`` …, ``coverage_80`` …."""
        n = max(self.num_values, 1)
        measures = {}
        if self._percentiles:
            losses = sum(float(self._losses[p]) for p in self._percentiles)
            measures["crps"] = 2 * losses / (n * 100)
        for level in self._quantiles:
            measures[f"pinball_{level:g}"] = float(self._losses[level]) / n
        return measures | {f"coverage_{100 * v:g}": share for v, share in self.coverage().items()}

    def to_json(self) -> dict[str, Any]:
        """Returns counts and sums as JSON values, in the order of levels and intervals."""
        losses = [loss.to_json() for loss in self._losses.values()]
        inside = list(self._inside.values())
        return {"num_values": self.num_values, "losses": losses, "inside": inside}

    def add_json(self, values: Mapping[str, Any]) -> None:
        """Adds what `to_json` of one with the same levels and intervals returned."""
        self.num_values += _count_of(values["num_values"])
        for level, loss in zip(self.levels, values["losses"], strict=True):
            self._losses[level] += _sum_of(loss)
        for interval, inside in zip(self._intervals, values["inside"], strict=True):
            self._inside[interval] += _count_of(inside)


def _count_of(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} is not a count")
    return value


def _sum_of(value: Any) -> ExactSum:
    found = ExactSum.from_json(value)
    if float(found) < 0:
        raise ValueError(f"{value!r:.40} is not a sum of errors")
    return found


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
