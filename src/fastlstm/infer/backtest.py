"""Forecasts judged from every origin of a part of a table, beside naive ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fastlstm.infer.forecasts import LEVELS, Calibration, forecast
from fastlstm.nn.forecaster import ForecastNetwork
from fastlstm.series.dataset import SeriesDataset
from fastlstm.series.inputs import Inputs
from fastlstm.series.metrics import QuantileScores, Scores
from fastlstm.series.window_index import read_windows

_DAY_US = 86_400_000_000
_MAX_NUMBERS = 1 << 24


def backtest(
    network: ForecastNetwork,
    inputs: Inputs,
    rows: NDArray[np.int64],
    season: int,
    is_scaled: bool = False,
) -> dict[str, Scores]:
    """Judges the forecasts of the windows that begin at `rows`.

    Args:
        network: trained.
        inputs: the table.
        rows: first rows of windows of input and horizon.
        season: steps that the seasonal naive forecast repeats; left out where the input is shorter.
        is_scaled: in standard deviations of the training rows.

    Returns:
        Scores of "forecaster", "naive" (the last value) and "seasonal_naive".
    """
    config = network.config
    L, h, C = config.input_size, config.horizon, config.num_targets
    mean, std = inputs.scaler.mean[:C], inputs.scaler.std[:C]
    scores = {name: Scores() for name in ("forecaster", "naive", "seasonal_naive")}
    done = 0
    for found, target in forecast(network, inputs, rows):
        past = (
            read_windows(inputs.table, rows[done : done + len(found)], L)[..., :C].numpy()
            + inputs.table.origin[:C]
        )
        done += len(found)
        answer, actual = found[..., 0].numpy(), target.numpy()
        if is_scaled:
            past = (past - mean) / std
        else:
            answer, actual = answer * std + mean, actual * std + mean
        naive = np.repeat(past[:, -1:], h, axis=1)
        scores["forecaster"].add(answer, actual, naive)
        scores["naive"].add(naive, actual, naive)
        if season <= L:
            again = np.tile(past[:, L - season :], (1, -(-h // season), 1))[:, :h]
            judged = np.where(np.isnan(again), np.nan, actual)
            scores["seasonal_naive"].add(again, judged, naive)
    return scores


def judge_quantiles(
    network: ForecastNetwork,
    inputs: Inputs,
    rows: NDArray[np.int64],
    calibration: Calibration,
    scores: QuantileScores,
    is_scaled: bool = False,
) -> QuantileScores:
    """Takes the quantiles of the windows that begin at `rows` into `scores`, and returns these.

    Memory: 64 MB of quantiles at once, or those of one window.
    """
    config = network.config
    std = np.ones(1) if is_scaled else inputs.scaler.std[: config.num_targets]
    numbers = config.horizon * config.num_targets * max(len(scores.levels), len(LEVELS))
    size = min(256, max(1, _MAX_NUMBERS // numbers))
    for found, target in forecast(network, inputs, rows, calibration, scores.levels, size):
        scores.add(found.numpy(), target.numpy(), std)
    return scores


def season_of(dataset: SeriesDataset) -> int:
    """Returns the steps of a day, of a week of days, of a year of months; 1 for what is longer."""
    frequency = dataset.frequency
    if frequency.unit == "business_days":
        return 5
    if frequency.unit == "months":
        return max(1, 12 // frequency.step)
    if frequency.unit == "us" and frequency.step < _DAY_US and _DAY_US % frequency.step == 0:
        return _DAY_US // frequency.step
    return 7 if frequency.unit == "us" and frequency.step == _DAY_US else 1
