"""Backtests: the errors of forecasts from many origins, compared with simple forecasts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastlstm.forecast.calibration import LEVELS, quantiles_of
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.error_measures import QuantileScores, Scores, SeriesErrors, StepErrors
from fastlstm.forecast.data.naive import SeasonalNaive
from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.files import StoredForecaster
from fastlstm.forecast.model.config import ForecasterConfig
from fastlstm.forecast.ridge import RidgeForecast

Floats = NDArray[np.float64]
_DAY_US = 86_400_000_000
_MAX_NUMBERS = 1 << 24
_COMPARED = ("forecaster", "ridge", "seasonal_naive", "naive")


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
    by_series: SeriesErrors | None = None,
    should_continue: Callable[[int], bool] | None = None,
    ridge: RidgeForecast | None = None,
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
        by_series: also receives the errors of the forecaster and of the seasonal naive forecast.
        should_continue: called with the windows evaluated so far; False skips the rest.
        ridge: a regression to compare with.

    Returns:
        Scores of "forecaster", "ridge" if given, "seasonal_naive" (see `SeasonalNaive`) and "naive"
        (the last value). Without earlier values both naive forecasts are the mean of the training
        rows (0 for counts).

    Memory: 64 MB of quantiles, or the quantiles of one window.
    """
    network, config = stored.network, stored.network.config
    L, h, C = config.input_size, config.horizon, config.num_targets
    scores = {name: Scores(C) for name in _COMPARED if name != "ridge" or ridge is not None}
    last, seasonal = (SeasonalNaive(inputs.table, C, steps) for steps in (1, season))
    segments, calibration, done = inputs.table.segments, stored.calibration, 0
    size = windows_at_once(config, quantiles) if should_continue is None else 64
    for values, statics in inputs.read(rows, config, size):
        origins = rows[done : done + len(values)] + L
        parts = segments.of_rows(origins - 1)
        series = segments.series[parts]
        mean, std = (scale[:, None, :C] for scale in inputs.scales(parts))
        unit, shift, level = _units(mean, std, is_scaled)
        center = mean - inputs.table.origins(series)[:, None, :C]
        done += len(values)
        parameters, target = network.answers(values, statics), values[:, L:, :C].numpy()
        wide = calibration.width(values, config, inputs.places(parts))
        found = quantiles_of(network.output, parameters, wide, calibration, quantiles.levels)
        quantiles.add(found.numpy(), target, unit)
        scale = None if naive_error is None else naive_error[series][:, None] * (unit / std)
        naive, of_season = ((n.forecast(origins, h) - center) / std for n in (last, seasonal))
        answers: dict[str, NDArray[Any]]
        answers = {"seasonal_naive": np.nan_to_num(of_season), "naive": np.nan_to_num(naive)}
        answers["forecaster"] = network.output.center(parameters).numpy()
        if ridge is not None:
            answers["ridge"] = ridge.forecast(values)
        plain = {name: answer * unit + shift for name, answer in answers.items()}
        actual = target * unit + shift
        for name, of_steps in (by_step or {}).items():
            of_steps.add(plain[name], actual)
        if by_series is not None:
            by_series.add(series, plain["forecaster"], plain["seasonal_naive"], actual)
        for name, score in scores.items():
            score.add(plain[name], actual, plain["naive"], scale, unit, level)
            score.num_without_past += int((np.isnan(naive) & ~np.isnan(target)).sum())
        if should_continue is not None and not should_continue(done):
            break
    return scores


def _units(mean: Floats, std: Floats, is_scaled: bool) -> tuple[Floats, Floats, Floats]:
    """Returns the unit of the figures, what is added to values in it, and where their 0 is."""
    if is_scaled:
        return np.ones_like(std), np.zeros_like(mean), mean / std
    return std, mean, np.zeros_like(mean)


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
