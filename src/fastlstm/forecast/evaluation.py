"""Evaluation of a trained forecaster on the test part: errors, coverage, example forecasts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import ConfigError, DataError, nearest_hint
from fastlstm.forecast.backtest import backtest, season_of
from fastlstm.forecast.calibration import forecast
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.error_measures import (
    QuantileScores,
    SeriesErrors,
    StepErrors,
)
from fastlstm.forecast.data.naive import seasonal_error
from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.data.splits import Split
from fastlstm.forecast.data.window_index import WindowIndex, read_windows, spread_out
from fastlstm.forecast.files import StoredForecaster
from fastlstm.forecast.model.config import ForecasterConfig
from fastlstm.forecast.ridge import RidgeForecast
from fastlstm.system.fields import is_whole

MAX_WINDOWS = 20_000
"""Limit of test windows that a run evaluates, evenly spread."""
INTERVALS = (0.8, 0.95)
FAN = (95, 80, 50)
"""Percent of the intervals of a picture."""
FAN_LEVELS = tuple(sorted((100 + sign * level) / 200 for level in FAN for sign in (-1, 1)))
_CURVE = (*(round(0.1 * n, 1) for n in range(1, 10)), 0.95, 0.99)
_EXAMPLES = 6
"""Windows shown; of several series one each, and of several targets in turn."""
_MAX_SERIES = 20
_MIN_PAST = 48
"""Least number of past steps shown with a forecast, if the network reads so many."""


def evaluate_forecasts(
    stored: StoredForecaster,
    inputs: ScaledWindows,
    split: Split,
    rows: NDArray[np.int64],
    season: int,
    quantiles: QuantileScores,
    is_scaled: bool = False,
    by_step: Mapping[str, StepErrors] | None = None,
    by_series: SeriesErrors | None = None,
    should_continue: Callable[[int], bool] | None = None,
) -> dict[str, dict[str, float]]:
    """Returns the figures of `backtest` by forecast, quantiles' with the forecaster's."""
    num_targets = stored.network.config.num_targets
    naive_error = seasonal_error(inputs.table, split.train_ends, num_targets, season)
    ridge = None
    with suppress(DataError):  # a part is too short
        ridge = RidgeForecast(stored.network, inputs, split)
    errors = backtest(
        stored, inputs, rows, season, quantiles, naive_error, is_scaled, by_step=by_step,
        by_series=by_series, should_continue=should_continue, ridge=ridge,
    )  # fmt: skip
    figures = {name: score.result() for name, score in errors.items()}
    if quantiles.num_values:
        figures["forecaster"] |= quantiles.result()
    return figures


def num_test_windows(dataset: SeriesDataset, split: Split, sizes: ForecasterConfig) -> int:
    """Returns how many windows `evaluation_events` evaluates; 0 if the part is too short."""
    try:
        index = split.windows(dataset.table, "test", sizes.input_size, sizes.horizon)
    except DataError:
        return 0
    return min(len(index), MAX_WINDOWS)


def evaluation_events(
    stored: StoredForecaster,
    dataset: SeriesDataset,
    split: Split,
    inputs: ScaledWindows,
    should_continue: Callable[[int, int], bool],
) -> list[dict[str, Any]]:
    """Returns events test, calibration and forecast; docs/runs.md lists their keys.

    `should_continue` is called with the windows evaluated so far and in all; False skips the rest.
    """
    sizes = stored.network.config
    try:
        index = split.windows(dataset.table, "test", sizes.input_size, sizes.horizon)
    except DataError as error:
        return [{"event": "message", "level": "info", "text": f"no test scores: {error}"}]
    rows, season = index.rows(MAX_WINDOWS), season_of(dataset)
    num_done = 0

    def count(done: int) -> bool:
        nonlocal num_done
        num_done = done
        return should_continue(done, len(rows))

    curve = QuantileScores((), _CURVE)
    compared = ("forecaster", "seasonal_naive")
    by_step = {name: StepErrors(sizes.horizon, sizes.num_targets) for name in compared}
    by_series = SeriesErrors(len(dataset.series), sizes.num_targets)
    scores = evaluate_forecasts(
        stored, inputs, split, spread_out(rows), season, curve, by_step=by_step,
        by_series=by_series, should_continue=count,
    )  # fmt: skip
    for interval in set(_CURVE) - set(INTERVALS):  # for the curve only
        scores["forecaster"].pop(f"coverage_{100 * interval:g}", None)
    test = {
        "event": "test",
        "scores": scores,
        "targets": _target_errors(dataset.roles.target, by_step, sizes.horizon),
        "series": TableEvaluation(scores, season, by_series, dataset).worst_series(),
        "windows": num_done,
        "of_windows": len(index),
        "season": season,
    }
    observed = list(curve.coverage().values())
    calibration = {"event": "calibration", "levels": list(_CURVE), "observed": observed}
    return [
        test,
        calibration,
        *examples(stored, dataset, inputs, example_rows(dataset, index, _EXAMPLES)),
    ]


def _quarters(horizon: int) -> list[tuple[int, int]]:
    """Returns first and last steps of the quarters of a horizon; fewer if it is short."""
    ends = sorted({horizon * quarter // 4 for quarter in range(5)})
    return [(first + 1, last) for first, last in itertools.pairwise(ends)]


def _target_errors(
    names: Sequence[str], by_step: Mapping[str, StepErrors], horizon: int
) -> list[dict[str, Any]]:
    """Returns the errors of each target in its unit, overall and by steps ahead."""
    ours, naive = by_step["forecaster"], by_step["seasonal_naive"]
    return [
        {
            "target": name,
            **ours.result(number),
            "seasonal_naive_mae": naive.result(number).get("mae"),
            "by_step": [
                {"first": first, "last": last, "mae": ours.result(number, first, last).get("mae")}
                for first, last in _quarters(horizon)
            ],
        }
        for number, name in enumerate(names)
    ]


@dataclass(frozen=True)
class TableEvaluation:
    """The errors of forecasts of a part of a table.

    Attributes:
        figures: by forecast, of all series; see `Forecaster.backtest`.
        season: of the seasonal naive forecast, in steps.
    """

    figures: dict[str, dict[str, float]]
    season: int
    _errors: SeriesErrors
    _dataset: SeriesDataset

    def by_series(self) -> list[dict[str, Any]]:
        """Returns series, target, num_values, mae, seasonal_naive_mae and ratio (mae over it; None
        beside 0) of every series and target with values, the largest ratio first."""
        count, own, naive = self._errors.result()
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(own == naive, 1.0, own / naive)
        places = np.argwhere(count > 0)
        order = np.argsort(-ratio[tuple(places.T)], kind="stable")
        return [
            {
                "series": self._dataset.series[series],
                "target": self._dataset.roles.target[target],
                "num_values": int(count[series, target]),
                "mae": float(own[series, target]),
                "seasonal_naive_mae": float(naive[series, target]),
                "ratio": float(ratio[series, target]) if naive[series, target] else None,
            }
            for series, target in places[order].tolist()
        ]

    def worst_series(self) -> dict[str, Any]:
        """Returns the first rows of `by_series`, how many rows there are, and of how many the ratio
        is above 1; {} for a table of one series."""
        if len(self._dataset.series) == 1:
            return {}
        rows = self.by_series()
        num_worse = sum(row["mae"] > row["seasonal_naive_mae"] for row in rows)
        return {"num_compared": len(rows), "num_worse": num_worse, "worst": rows[:_MAX_SERIES]}


def shown_past(horizon: int) -> int:
    """Returns how many past steps are shown with a forecast."""
    return max(_MIN_PAST, 2 * horizon)


def require_counts(**values: Any) -> None:
    """Raises ConfigError for a value that is not a whole number of 1 or more."""
    for name, value in values.items():
        if not (is_whole(value) and value >= 1):
            raise ConfigError(f"`{name}` is {value!r}, expected 1 or more, a whole number")


def series_numbers(dataset: SeriesDataset, names: Sequence[Any] | None) -> list[int] | None:
    """Returns the numbers of series by name; None for None.

    Raises:
        ConfigError: a name is unknown, or there is none.
    """
    if names is None:
        return None
    if len(names) == 0:
        raise ConfigError("series is empty, expected names of series; leave it out for all")
    known = {str(name): number for number, name in enumerate(dataset.series)}
    wanted = [names] if isinstance(names, str) else list(names)
    for name in wanted:
        if str(name) not in known:
            raise ConfigError(f"there is no series '{name}'{nearest_hint(str(name), list(known))}")
    return [known[str(name)] for name in wanted]


def times_of(dataset: SeriesDataset, rows: range, ahead: int = 0) -> list[str] | None:
    """Returns the times of consecutive rows and of steps ahead of them as ISO 8601; None if rows
    are counted."""
    if not dataset.has_clock:
        return None
    segments = dataset.table.segments
    segment = int(segments.of_rows(np.array([rows[0]]))[0])
    first = rows[0] - int(segments.first_rows[segment])
    start = int(segments.start_times[segment])
    times = dataset.frequency.after(start, first + len(rows) + ahead)[first:]
    unit: Literal["s", "us"] = "us" if (times % 1_000_000).any() else "s"
    return [str(time) for time in np.datetime_as_string(times.astype("datetime64[us]"), unit=unit)]


def example_rows(
    dataset: SeriesDataset, index: WindowIndex, count: int, of: Sequence[int] | None = None
) -> NDArray[np.int64]:
    """Returns first rows of `count` windows at most: as many of every series, evenly spread;
    of evenly spread series where there are more. `of` are numbers of the series to take.

    Raises:
        DataError: none of them has a window.
    """
    rows = index.rows(MAX_WINDOWS)
    series = dataset.table.segments.series[dataset.table.segments.of_rows(rows)]
    names = np.unique(series) if of is None else np.intersect1d(series, of)
    if len(names) == 0:
        raise DataError("none of the series asked for has a window in this part; name others")
    names = names[np.linspace(0, len(names) - 1, min(count, len(names))).astype(np.int64)]
    share = max(1, count // max(1, len(names)))
    chosen = [
        own[(np.arange(1, share + 1) * len(own) // (share + 1))]
        for own in (rows[series == name] for name in names)
    ]
    return np.unique(np.concatenate(chosen))


def fan(center: NDArray[np.float64], ends: Mapping[float, NDArray[np.float64]]) -> dict[str, Any]:
    """Returns the point forecast and the intervals of an event `forecast`, by level of `FAN`."""
    intervals = [
        {
            "level": level,
            "low": ends[(100 - level) / 200].tolist(),
            "high": ends[(100 + level) / 200].tolist(),
        }
        for level in FAN
    ]
    main = intervals.pop(FAN.index(80))
    return {"center": center.tolist(), "low": main["low"], "high": main["high"], "bands": intervals}


def examples(
    stored: StoredForecaster, dataset: SeriesDataset, inputs: ScaledWindows, rows: NDArray[np.int64]
) -> list[dict[str, Any]]:
    """Returns an event per window: its past, forecast and actual values of one target."""
    sizes = stored.network.config
    shown = min(sizes.input_size, shown_past(sizes.horizon))
    past = read_windows(dataset.table, rows, sizes.input_size)[:, -shown:].numpy()
    segments = dataset.table.segments.of_rows(rows)
    series = dataset.table.segments.series[segments]
    past = past + dataset.table.origins(series)[:, None]  # as float64
    shape = len(rows), len(dataset.table.columns)
    mean, std = (np.broadcast_to(scale, shape) for scale in inputs.scales(segments))
    center, actual = next(forecast(stored.network, inputs, rows))
    ends, _ = next(forecast(stored.network, inputs, rows, stored.calibration, FAN_LEVELS))
    zone = dataset.time_zone if dataset.is_wall or not dataset.time_zone else "UTC"
    events = []
    for n, row in enumerate(rows.tolist()):
        c, first = n % sizes.num_targets, row + sizes.input_size
        unit, shift = float(std[n, c]), float(mean[n, c])
        curves = ends[n, :, c].double().numpy() * unit + shift
        events.append(
            {
                "event": "forecast",
                "series": str(dataset.series[int(series[n])]) if len(dataset.series) > 1 else None,
                "target": dataset.roles.target[c],
                "times": times_of(dataset, range(first - shown, first + sizes.horizon)),
                "time_zone": zone,
                "past": past[n, :, c].tolist(),
                "actual": (actual[n, :, c].double() * unit + shift).tolist(),
                **fan(
                    center[n, :, c, 0].double().numpy() * unit + shift,
                    dict(zip(FAN_LEVELS, curves.T, strict=True)),
                ),
            }
        )
    return events
