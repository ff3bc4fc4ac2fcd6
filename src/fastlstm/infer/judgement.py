"""A trained forecaster on its test part: scores, coverage, and forecasts to look at, as events."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import DataError
from fastlstm.infer.backtest import backtest, coverage, season_of
from fastlstm.infer.forecaster_files import StoredForecaster
from fastlstm.infer.forecasts import forecast
from fastlstm.series.dataset import SeriesDataset
from fastlstm.series.inputs import Inputs
from fastlstm.series.splits import Split
from fastlstm.series.windows import read_windows

MAX_WINDOWS = 20_000
"""Test windows that a run judges itself by, evenly spread."""
_INTERVALS = (0.8, 0.95)
_CURVE = (*(round(0.1 * n, 1) for n in range(1, 10)), 0.95, 0.99)
_CURVE_WINDOWS = 2_000
_PICTURES = 4


def judge(
    stored: StoredForecaster, dataset: SeriesDataset, split: Split, inputs: Inputs
) -> list[dict[str, Any]]:
    """Returns events of kind test, calibration and forecast; docs/architecture.md lists their keys.

    Args:
        stored: the forecaster.
        dataset: the table.
        split: its parts.
        inputs: its windows as the network takes them.
    """
    sizes = stored.network.config
    try:
        index = split.windows(dataset.table, "test", sizes.input_size, sizes.horizon)
    except DataError as error:
        text = f"no test scores: {error}"
        return [{"event": "message", "level": "info", "text": text}]
    rows, season = index.rows(MAX_WINDOWS), season_of(dataset)
    scores = backtest(stored.network, inputs, rows, season)
    found = coverage(stored.network, inputs, rows, stored.calibration, _INTERVALS)
    few = index.rows(_CURVE_WINDOWS)
    curve = coverage(stored.network, inputs, few, stored.calibration, _CURVE)
    return [
        {
            "event": "test",
            "scores": {name: s.result() for name, s in scores.items() if s.num_values},
            "coverage": {f"{level:g}": share for level, share in found.items()},
            "windows": len(rows),
            "of_windows": len(index),
            "season": season,
        },
        {"event": "calibration", "levels": list(_CURVE), "observed": list(curve.values())},
        *_pictures(stored, dataset, inputs, index.rows(_PICTURES)),
    ]


def _pictures(
    stored: StoredForecaster, dataset: SeriesDataset, inputs: Inputs, rows: NDArray[np.int64]
) -> list[dict[str, Any]]:
    """Returns some forecasts with what came, of one target each, in units of the table."""
    sizes, scaler = stored.network.config, stored.scaler
    low, high = stored.calibration.at([0.1, 0.9])
    shown = min(sizes.input_size, 2 * sizes.horizon)
    center, target, wide = next(forecast(stored.network, inputs, rows))
    past = read_windows(dataset.table, rows, sizes.input_size)[:, -shown:].numpy()
    series = dataset.table.segments.series[dataset.table.segments.of_rows(rows)]
    events = []
    for n in range(len(rows)):
        c = n % sizes.num_targets
        curves = {
            "center": center[n, :, c],
            "low": (center + low * wide)[n, :, c],
            "high": (center + high * wide)[n, :, c],
            "actual": target[n, :, c],
        }
        plain = {k: (v * scaler.std[c] + scaler.mean[c]).tolist() for k, v in curves.items()}
        events.append(
            {
                "event": "forecast",
                "series": str(dataset.series[int(series[n])]) if len(dataset.series) > 1 else None,
                "target": dataset.roles.target[c],
                "past": past[n, :, c].tolist(),
                **plain,
            }
        )
    return events
