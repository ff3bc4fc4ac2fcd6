"""Conformal calibration of the quantiles of a forecaster."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.errors import ConfigError
from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.data.window_index import WindowIndex, spread_out, windows_apart
from fastlstm.forecast.model.network import ForecasterConfig, ForecastNetwork
from fastlstm.forecast.model.outputs import Output, Point
from fastlstm.system.fields import is_number

LEVELS = (0.005, 0.01, 0.025, *(k / 20 for k in range(1, 20)), 0.975, 0.99, 0.995)
"""Levels of the calibrated quantiles; quantiles in between are interpolated linearly."""
_MEDIAN = LEVELS.index(0.5)
_INNER = LEVELS.index(0.25) + 1, LEVELS.index(0.75)
"""Levels of the intervals of less than 50 %."""
MIN_CALIBRATED = 256
"""Least validation windows for calibration, however long it takes: a level needs up to 199."""
_MAX_WINDOWS = 5_000
_MAX_VALUES = 1 << 24
"""Most network outputs held in memory: 64 MB."""
_PRIOR_WINDOWS = 2
_FEW_APART = 2
"""The sign of the offset of so few windows without common steps says nothing about the next."""
_LEAST_NOISE = 1e-3
_LARGE = 1e30
"""Stands for an infinite quantile in arithmetic."""
MIN_SPREAD = 0.05
"""Least spread, in standard deviations; a constant window may start to move."""


@dataclass(frozen=True)
class Calibration:
    """Conformal residual quantiles, normalised by the spread of each window.

    Conformalised quantile regression (Romano et al. 2019) at every level: each quantile of the
    network is shifted by its error on validation windows. For a point output this gives split
    conformal intervals. Residuals are normalised (Lei et al. 2018, section 5.2), so intervals keep
    their level when a series calms down. Series with equal spread may be smooth or noisy, so
    residuals are also in units of the mean error of each series, if it is known.

    From n validation values the order statistic (n + 1) p is used, rounded away from the median.
    Thus a central interval covers a further exchangeable value with at least its level for any n.
    If n is too small for a level, the quantile is infinite.

    Attributes:
        residuals: shape ``(25, h, C)``, float32, at `LEVELS`, in units of `width`.
        noise: mean error of each series over the mean of all, ``(S, C)``; None means 1.
    """

    residuals: Tensor
    noise: Tensor | None = None

    @staticmethod
    def none(config: ForecasterConfig) -> Calibration:
        """Returns a calibration without shifts."""
        return Calibration(torch.zeros(len(LEVELS), config.horizon, config.num_targets))

    def width(
        self, values: Tensor, config: ForecasterConfig, places: NDArray[np.int64] | Tensor | None
    ) -> Tensor:
        """Returns the unit of the errors of each window, ``(B, C)``; `values` are scaled, `places`
        the number at fit of each window's series, -1 if unknown.
        """
        wide = spread(values, config)
        if self.noise is None or places is None:
            return wide
        return wide * _of_windows(self.noise, places)

    def quantiles(
        self, output: Output, parameters: Tensor, width: Tensor, levels: Sequence[float]
    ) -> Tensor:
        """Returns quantiles ``(B, h, C, len(levels))`` that do not cross.

        A distribution of counts keeps its own quantiles. `parameters` of the output have shape
        ``(B, h, C, num_parameters)``, units of the errors ``(B, C)``; see `width`. Raises
        ConfigError: a level outside the calibrated ones.
        """
        require_known(levels)
        if not output.is_calibrated:
            return output.quantiles(parameters, levels)
        base = output.quantiles(parameters, LEVELS)
        known = base + self.residuals.permute(1, 2, 0) * width[:, None, :, None]
        known = _around(known, output.center(parameters)[..., None], output.is_median)
        known = known.sort(-1).values  # Chernozhukov et al. 2010: no worse, and monotone
        wanted, grid = np.asarray(levels, dtype=np.float64).round(9), np.asarray(LEVELS)
        above = np.searchsorted(grid, wanted)
        below = np.where(grid[above] == wanted, above, above - 1)
        gap = np.where(above > below, grid[above] - grid[below], 1.0)
        share = torch.from_numpy((wanted - grid[below]) / gap).to(known)
        low, high = known[..., below], known[..., above]
        between = torch.lerp(low.clamp(-_LARGE, _LARGE), high.clamp(-_LARGE, _LARGE), share)
        if not self.residuals.isinf().any():
            return between
        return torch.where(low.isinf(), low, torch.where(high.isinf(), high, between))

    def infinite(self, levels: Sequence[float]) -> list[float]:
        """Returns the levels with an infinite quantile for some step and target."""
        zeros = self.residuals.new_zeros(1, *self.residuals.shape[1:], 1)
        is_infinite = (
            self.quantiles(Point(), zeros, zeros[:, 0, :, 0] + 1, levels).isinf().flatten(0, 2)
        )
        return [level for level, is_so in zip(levels, is_infinite.any(0), strict=True) if is_so]

    def unsupported(self, levels: Sequence[float]) -> str | None:
        """Returns a warning if some quantiles are infinite, else None."""
        infinite = self.infinite(levels)
        if not infinite:
            return None
        tails = [round(min(level, 1 - level), 9) for level in infinite]
        outer = max(k for k in LEVELS if k <= min(tails))
        return (
            f"quantiles {', '.join(f'{level:g}' for level in infinite)} are infinite: validation"
            f" has too few values to calibrate them ({math.ceil(round(1 / outer - 1, 6))} per step"
            " and target are needed); use more validation rows, or levels nearer to 0.5"
        )


@torch.no_grad()
def calibrate(
    network: ForecastNetwork,
    inputs: ScaledWindows,
    valid: WindowIndex,
    show: Callable[[int, int], None] | None = None,
    limit_s: float | None = None,
    noise_before: Tensor | None = None,
) -> Calibration:
    """Calibrates on up to 5,000 evenly spread windows, fewer for long horizons.

    A distribution of counts is not calibrated. `show` is called with the number of windows done and
    of all. After `limit_s` seconds, but at least `MIN_CALIBRATED` windows, the rest is skipped.
    `noise_before` is the `noise` of an earlier calibration, for series with few or no windows.
    """
    config, output = network.config, network.output
    h, C = config.horizon, config.num_targets
    if not output.is_calibrated:
        return Calibration.none(config)
    limit = min(_MAX_WINDOWS, max(1, _MAX_VALUES // (h * C * output.num_parameters)))
    answers, targets, spreads = [], [], []
    rows, done, size, started = valid.rows(limit), 0, 256, time.perf_counter()
    if limit_s is not None:
        rows, size = spread_out(rows), 64
    segments = inputs.table.segments.of_rows(rows)
    for values, statics in inputs.read(rows, config, size):
        answers.append(network(values, statics))
        targets.append(values[:, config.input_size :, :C].clone())
        spreads.append(spread(values, config))
        done += len(values)
        if show is not None:
            show(done, len(rows))
        is_late = limit_s is not None and time.perf_counter() - started >= limit_s
        if is_late and done >= MIN_CALIBRATED:
            break
    answer, target, wide = torch.cat(answers), torch.cat(targets), torch.cat(spreads)
    noise, at = None, inputs.places(segments[:done])
    if inputs.series is not None and at is not None:
        error = (output.center(answer) - target).abs() / wide[:, None]
        if noise_before is None:
            noise_before = torch.ones(inputs.series.num_at_fit, C)
        noise = _noise(error[at >= 0], at[at >= 0], noise_before)
        wide = wide * _of_windows(noise, at)
    residuals = []
    for t in range(h):  # one step at a time bounds the memory
        base = output.quantiles(answer[:, t], LEVELS)
        residuals.append(conformal((target[:, t, :, None] - base) / wide[..., None]))
    shifts = torch.stack(residuals, 1)
    # All series may rise or fall together, so the median error of few windows apart may have the
    # other sign in the next ones. Intervals then hold errors around both offsets.
    num_apart = int(windows_apart(rows, inputs.table.segments.series[segments], h).max())
    offset = 2 * shifts[_MEDIAN] * min(1.0, _FEW_APART / num_apart)
    shifts[:_MEDIAN] -= offset.clamp(min=0)
    shifts[_MEDIAN + 1 :] -= offset.clamp(max=0)
    return Calibration(shifts, noise)


def _around(quantiles: Tensor, point: Tensor, is_median: bool) -> Tensor:
    """Returns quantiles ``(…, 25)`` at `LEVELS` around the point forecast ``(…, 1)``.

    The point replaces the median if it is one; else intervals of 50 % and more contain it.
    """
    low, high = (_MEDIAN, _MEDIAN + 1) if is_median else _INNER
    middle = point if is_median else quantiles[..., low:high]
    below, above = quantiles[..., :low], quantiles[..., high:]
    return torch.cat([torch.minimum(below, point), middle, torch.maximum(above, point)], -1)


def _of_windows(noise: Tensor, places: NDArray[np.int64] | Tensor) -> Tensor:
    """Returns the noise of each window's series, ``(B, C)``; 1 for unknown series (number -1)."""
    at = torch.from_numpy(places) if isinstance(places, np.ndarray) else places
    return torch.where((at > -1)[:, None], F.embedding(at.clamp(min=0), noise), 1.0)


def _noise(errors: Tensor, places: NDArray[np.int64], before: Tensor) -> Tensor:
    """Returns the mean error of each series over the mean of all, ``(S, C)``.

    `before`, ``(S, C)``, are expected ratios: each counts as `_PRIOR_WINDOWS` windows of its
    series. `errors`, ``(N, h, C)``, are NaN if missing; `places`, ``(N,)``, number the series.
    """
    is_there = ~errors.isnan()
    count, total = (
        torch.zeros(before.shape, dtype=torch.float64).index_add_(
            0, torch.from_numpy(places), values.double().sum(1)
        )
        for values in (is_there, errors.nan_to_num(0.0))
    )
    num = count.sum(0).clamp(min=1)
    mean = total.sum(0) / num
    of_mean = (count * before).sum(0) / num  # perhaps only the quiet series have windows
    expected = mean * before / torch.where(of_mean > 0, of_mean, 1.0)
    prior = _PRIOR_WINDOWS * errors.shape[1]
    of_series = (total + prior * expected) / (count + prior)
    noise = torch.where(mean > 0, of_series / mean.clamp(min=1e-300), 1.0)
    return noise.clamp(min=_LEAST_NOISE).float()


def conformal(errors: Tensor) -> Tensor:
    """Returns the order statistics for conformal prediction at `LEVELS`, ``(25, C)``: the error at
    place (n + 1) p of n, rounded down below the median and up above it; infinite at places 0 and
    n + 1. Errors of every level's quantile are ``(N, C, 25)``, or ``(N, C, 1)``; NaN if missing.
    """
    count = (~errors[..., 0].isnan()).sum(0)
    place = torch.tensor(LEVELS, dtype=torch.float64)[:, None] * (count + 1)
    place = (place * 1e6).round() / 1e6  # 0.9 * 10 is 9
    is_upper = torch.tensor(LEVELS)[:, None] > 0.5
    is_lower = torch.tensor(LEVELS)[:, None] < 0.5
    first = torch.where(is_upper, place.ceil(), place.floor()).long()
    second = torch.where(is_lower, place.floor(), place.ceil()).long()
    ends = torch.full_like(errors[:1], math.inf)
    ordered = torch.cat([-ends, errors.sort(0).values, ends])  # NaN sorts last
    ordered = torch.where(ordered.isnan(), math.inf, ordered).expand(-1, -1, len(LEVELS))
    low, high = (ordered.gather(0, at.T[None])[0].T for at in (first, second))
    return ((low + high) / 2).nan_to_num(0.0, math.inf, -math.inf)  # the median without errors is 0


def spread(values: Tensor, config: ForecasterConfig) -> Tensor:
    """Returns the spread of the targets in each window's input, ``(B, C)``, above 0: the standard
    deviation if the network divides by it, else its square root.

    Without that division errors grow more slowly than the deviation: the root has the least pinball
    loss between halves of the validation part (docs/series.md).
    """
    past = values[:, : config.input_size, : config.num_targets]
    mean = past.nanmean(1, keepdim=True)
    deviation = torch.sqrt(((past - mean) ** 2).nanmean(1)).nan_to_num(1.0) + MIN_SPREAD
    return deviation if config.normalize == "standard" else torch.sqrt(deviation)


def require_known(levels: Sequence[float]) -> None:
    """Raises ConfigError unless `levels` is a list of numbers within the calibrated range."""
    is_list = isinstance(levels, Sequence | np.ndarray)
    if not is_list or not all(map(is_number, levels)):
        raise ConfigError(f"`quantiles` is {levels!r}, expected a list of numbers: [0.1, 0.9]")
    for level in levels:
        if not LEVELS[0] <= level <= LEVELS[-1]:
            raise ConfigError(f"quantile {level} is outside {LEVELS[0]} to {LEVELS[-1]}")
