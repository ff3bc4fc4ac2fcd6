"""Backtests: the errors of forecasts from many origins, compared with naive forecasts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from fastlstm.forecast.calibration import LEVELS, quantiles_of, spread
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.error_measures import QuantileScores, Scores, StepErrors
from fastlstm.forecast.data.naive import SeasonalNaive
from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.files import StoredForecaster
from fastlstm.forecast.model.config import ForecasterConfig

_DAY_US = 86_400_000_000
_MAX_NUMBERS = 1 << 24


@torch.no_grad()
def backtest(
    stored: StoredForecaster,
    inputs: ScaledWindows,
    rows: NDArray[np.int64],
    season: int,
    quantiles: QuantileScores,
    naive_error: NDArray[np.float64] | None = None,
    is_scaled: bool = False,
    by_step: Mapping[str, StepErrors] | None = None,
    should_continue: Callable[[int], bool] | None = None,
) -> dict[str, Scores]:
    """Returns the errors of the forecasts of the windows that begin at `rows`.

    All errors are over the same values: every target present in the horizon of every window.

    Args:
        stored: the forecaster.
        inputs: the table.
        rows: first rows of windows of input and horizon.
        season: period of the seasonal naive forecast, in steps.
        quantiles: receives the quantiles.
        naive_error: of `seasonal_error`, for MASE.
        is_scaled: report errors in standard deviations of the training rows.
        by_step: also receives the errors, by name of the forecasts.
        should_continue: called with the windows evaluated so far; False skips the rest.

    Returns:
        Scores of "forecaster", "naive" (the last value) and "seasonal_naive" (see
        `SeasonalNaive`). Without earlier values both naive forecasts are the mean of the training
        rows (0 for counts).

    Memory: 64 MB of quantiles, or those of one window.
    """
    network, config = stored.network, stored.network.config
    L, h, C = config.input_size, config.horizon, config.num_targets
    mean, std = inputs.scaler.mean[:C], inputs.scaler.std[:C]
    unit, shift = (np.ones_like(std), 0.0) if is_scaled else (std, mean)
    center = mean - inputs.table.origin[:C]  # mean of rows without their origin
    scores = {name: Scores() for name in ("forecaster", "naive", "seasonal_naive")}
    last, seasonal = (SeasonalNaive(inputs.table, C, steps) for steps in (1, season))
    segments, done = inputs.table.segments, 0
    size = windows_at_once(config, quantiles)
    if should_continue is not None:
        size = min(size, 64)
    for values, statics in inputs.read(rows, L + h, size):
        origins = rows[done : done + len(values)] + L
        done += len(values)
        parameters, target = network.answers(values, statics), values[:, L:, :C].numpy()
        at_levels = quantiles_of(
            network.output, parameters, spread(values, config), stored.calibration, quantiles.levels
        )
        quantiles.add(at_levels.numpy(), target, unit)
        scale = None
        if naive_error is not None:
            series = segments.series[segments.of_rows(origins - 1)]
            scale = naive_error[series][:, None] * (unit / std)
        naive = (last.forecast(origins, h) - center) / std
        answers = {
            "forecaster": network.output.center(parameters).numpy(),
            "naive": np.nan_to_num(naive),
            "seasonal_naive": np.nan_to_num((seasonal.forecast(origins, h) - center) / std),
        }
        plain = {name: answer * unit + shift for name, answer in answers.items()}
        for name, errors in (by_step or {}).items():
            errors.add(plain[name], target * unit + shift)
        for name, score in scores.items():
            score.add(plain[name], target * unit + shift, plain["naive"], scale)
            score.num_without_past += int((np.isnan(naive) & ~np.isnan(target)).sum())
        if should_continue is not None and not should_continue(done):
            break
    return scores


def windows_at_once(config: ForecasterConfig, quantiles: QuantileScores) -> int:
    """Returns the windows of a batch of `backtest`: 256, fewer where they have many quantiles."""
    num_levels = max(len(quantiles.levels), len(LEVELS))
    return min(256, max(1, _MAX_NUMBERS // (config.horizon * config.num_targets * num_levels)))


def season_of(dataset: SeriesDataset) -> int:
    """Returns the steps per day, per week of days or per year of months; 1 for longer steps."""
    frequency = dataset.frequency
    if frequency.unit == "business_days":
        return 5
    if frequency.unit == "months":
        return max(1, 12 // frequency.step)
    if frequency.unit == "us" and frequency.step < _DAY_US and _DAY_US % frequency.step == 0:
        return _DAY_US // frequency.step
    return 7 if frequency.unit == "us" and frequency.step == _DAY_US else 1
