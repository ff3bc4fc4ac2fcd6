"""A trained forecaster on its test part: scores, coverage, and forecasts to look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import DataError
from fastlstm.infer.backtest import backtest, season_of
from fastlstm.infer.forecaster_files import StoredForecaster
from fastlstm.infer.forecasts import forecast
from fastlstm.nn.forecaster_config import ForecasterConfig
from fastlstm.series.dataset import SeriesDataset
from fastlstm.series.inputs import Inputs
from fastlstm.series.metrics import QuantileScores
from fastlstm.series.naive import seasonal_error
from fastlstm.series.splits import Split
from fastlstm.series.window_index import read_windows, spread_out

MAX_WINDOWS = 20_000
"""Test windows that a run judges itself by, evenly spread."""
_INTERVALS = (0.8, 0.95)
_CURVE = (*(round(0.1 * n, 1) for n in range(1, 10)), 0.95, 0.99)
_PICTURES = 4


def judge(
    stored: StoredForecaster,
    inputs: Inputs,
    split: Split,
    rows: NDArray[np.int64],
    season: int,
    quantiles: Sequence[float] = (),
    is_scaled: bool = False,
) -> dict[str, dict[str, float]]:
    """Returns the errors of the windows that begin at `rows` by who made them; see `backtest`."""
    scores = QuantileScores(quantiles, _INTERVALS)
    return _report(stored, inputs, split, rows, season, scores, is_scaled)


def _report(
    stored: StoredForecaster,
    inputs: Inputs,
    split: Split,
    rows: NDArray[np.int64],
    season: int,
    scores: QuantileScores,
    is_scaled: bool = False,
    goes_on: Callable[[int], bool] | None = None,
) -> dict[str, dict[str, float]]:
    """Returns what `judge` does; `scores` hold all of the quantiles. See `backtest`."""
    num_targets = stored.network.config.num_targets
    error = seasonal_error(inputs.table, split.train_ends, num_targets, season)
    found = backtest(
        stored.network, inputs, rows, season, error, is_scaled, stored.calibration, scores,
        goes_on,
    )  # fmt: skip
    report = {name: one.result() for name, one in found.items()}
    if scores.num_values:
        report["forecaster"] |= scores.result()
    return report


def num_test_windows(dataset: SeriesDataset, split: Split, sizes: ForecasterConfig) -> int:
    """Returns how many windows `test_events` judges: 0 where the test part is too short for one."""
    try:
        index = split.windows(dataset.table, "test", sizes.input_size, sizes.horizon)
    except DataError:
        return 0
    return min(len(index), MAX_WINDOWS)


def test_events(
    stored: StoredForecaster,
    dataset: SeriesDataset,
    split: Split,
    inputs: Inputs,
    goes_on: Callable[[int, int], bool],
) -> list[dict[str, Any]]:
    """Returns events of kind test, calibration and forecast; docs/architecture.md lists their keys.

    Args:
        stored: the forecaster.
        dataset: the table.
        split: its parts.
        inputs: its windows as the network takes them.
        goes_on: called with the windows judged so far and in all after every batch; False leaves
            the rest out.
    """
    sizes = stored.network.config
    try:
        index = split.windows(dataset.table, "test", sizes.input_size, sizes.horizon)
    except DataError as error:
        text = f"no test scores: {error}"
        return [{"event": "message", "level": "info", "text": text}]
    rows, season = index.rows(MAX_WINDOWS), season_of(dataset)
    judged = 0

    def watched(done: int) -> bool:
        nonlocal judged
        judged = done
        return goes_on(done, len(rows))

    curve = QuantileScores((), _CURVE)
    scores = _report(stored, inputs, split, spread_out(rows), season, curve, goes_on=watched)
    for interval in set(_CURVE) - set(_INTERVALS):  # these are for the curve alone
        scores["forecaster"].pop(f"coverage_{100 * interval:g}", None)
    about = {"windows": judged, "of_windows": len(index), "season": season}
    observed = list(curve.coverage().values())
    return [
        {"event": "test", "scores": scores, **about},
        {"event": "calibration", "levels": list(_CURVE), "observed": observed},
        *_pictures(stored, dataset, inputs, index.rows(_PICTURES)),
    ]


def _pictures(
    stored: StoredForecaster, dataset: SeriesDataset, inputs: Inputs, rows: NDArray[np.int64]
) -> list[dict[str, Any]]:
    """Returns some forecasts with what came, of one target each, in units of the table."""
    sizes, scaler = stored.network.config, stored.scaler
    shown = min(sizes.input_size, 2 * sizes.horizon)
    levels = (0.1, 0.9)
    ends, target = next(forecast(stored.network, inputs, rows, stored.calibration, levels))
    center, _ = next(forecast(stored.network, inputs, rows))
    past = read_windows(dataset.table, rows, sizes.input_size)[:, -shown:].numpy()
    series = dataset.table.segments.series[dataset.table.segments.of_rows(rows)]
    events = []
    for n in range(len(rows)):
        c = n % sizes.num_targets
        curves = {
            "center": center[n, :, c, 0],
            "low": ends[n, :, c, 0],
            "high": ends[n, :, c, 1],
            "actual": target[n, :, c],
        }
        std, mean = float(scaler.std[c]), float(scaler.mean[c])
        plain = {name: (curve.double() * std + mean).tolist() for name, curve in curves.items()}
        events.append(
            {
                "event": "forecast",
                "series": str(dataset.series[int(series[n])]) if len(dataset.series) > 1 else None,
                "target": dataset.roles.target[c],
                "past": (past[n, :, c] + dataset.table.origin[c]).tolist(),
                **plain,
            }
        )
    return events
