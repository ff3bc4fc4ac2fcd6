"""Errors of forecasts from many origins, compared with simple forecasts; example forecasts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fastlstm.errors import ConfigError, DataError, counted, nearest_hint
from fastlstm.forecast.calibration import LEVELS
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.error_measures import QuantileScores, Scores, SeriesErrors, StepErrors
from fastlstm.forecast.data.naive import naive_forecast, seasonal_error
from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.data.splits import Split
from fastlstm.forecast.data.timeline import DAY_US
from fastlstm.forecast.data.window_index import WindowIndex, read_windows, spread_out, windows_apart
from fastlstm.forecast.files import StoredForecaster
from fastlstm.forecast.model.network import ForecasterConfig
from fastlstm.forecast.ridge import Ridge, compared_ridge, ridge_forecast
from fastlstm.report.html import output, scores_table
from fastlstm.system.fields import is_whole

MAX_WINDOWS = 20_000
"""Most test windows that a run evaluates; they are evenly spread."""
INTERVALS = (0.8, 0.95)
FAN = (95, 80, 50)
"""Intervals of a picture, in percent."""
FAN_LEVELS = tuple(sorted((100 + sign * level) / 200 for level in FAN for sign in (-1, 1)))
_CURVE = (*(round(0.1 * n, 1) for n in range(1, 10)), 0.95, 0.99)
_LEAST_DIFFERENCE = 0.05
"""Least difference of a coverage from its level that is told."""
_EXAMPLES = 6
"""Most windows shown: equally many of each series, with the targets in turn."""
_MAX_SERIES = 20
_MIN_PAST = 48
"""Least past steps shown with a forecast, if the network reads as many."""
_MAX_NUMBERS = 1 << 24
"""Most quantiles of a batch: 64 MB."""
Floats = NDArray[np.float64]


@torch.no_grad()
def evaluate_forecasts(
    stored: StoredForecaster,
    inputs: ScaledWindows,
    rows: NDArray[np.int64],
    season: int,
    quantiles: QuantileScores,
    split: Split | None = None,
    is_scaled: bool = False,
    by_step: Mapping[str, StepErrors] = MappingProxyType({}),
    by_series: SeriesErrors | None = None,
    should_continue: Callable[[int], bool] | None = None,
) -> dict[str, dict[str, float]]:
    """Returns the figures of every forecast of the windows that begin at `rows`.

    All figures are over the same values: every target present in the horizon of every window.

    The windows are of input and horizon; `season` is the period of the seasonal naive forecast, in
    steps. `quantiles` receives the quantiles, and its figures are added to the forecaster's;
    `by_step` receives the errors by name of the forecast, `by_series` those of the forecaster and
    of the seasonal naive forecast. Without `split` there is no mase and no "ridge". `is_scaled`
    reports errors in standard deviations of the training rows. `should_continue` is called with the
    number of windows done; False skips the rest.

    Returns:
        Figures of "forecaster", "ridge" (unless a part is too short to fit it), "seasonal_naive"
        (see `naive_forecast`) and "naive" (the last value). Without earlier values, both naive
        forecasts are the mean of the training rows (0 for counts).
    """
    network, config, table = stored.network, stored.network.config, inputs.table
    L, h, C = config.input_size, config.horizon, config.num_targets
    naive_error, ridge = (None, None) if split is None else _compared(stored, inputs, split, season)
    names = ("forecaster", *(() if ridge is None else ("ridge",)), "seasonal_naive", "naive")
    scores, done = {name: Scores(C) for name in names}, 0
    size = _windows_at_once(config, quantiles) if should_continue is None else 64
    for values, statics in inputs.read(rows, config, size):
        origins = rows[done : done + len(values)] + L
        done += len(values)
        parts = table.segments.of_rows(origins - 1)
        series = table.segments.series[parts]
        mean, std = (scale[:, None, :C] for scale in inputs.scales(parts))
        unit, shift, level = _units(mean, std, is_scaled)
        center = mean - table.origins(series)[:, None, :C]
        parameters, target = network.answers(values, statics), values[:, L:, :C].numpy()
        found = stored.quantiles(parameters, values, inputs.places(parts), quantiles.levels)
        quantiles.add(found.numpy(), target, unit)
        scale = None if naive_error is None else naive_error[series][:, None] * (unit / std)
        naive, of_season = (naive_forecast(table, C, n, origins, h) for n in (1, season))
        answers: dict[str, Any] = {"forecaster": network.output.center(parameters).numpy()}
        answers["seasonal_naive"] = np.nan_to_num((of_season - center) / std)
        answers["naive"] = np.nan_to_num((naive - center) / std)
        if ridge is not None:
            answers["ridge"] = ridge_forecast(network, ridge, values)
        base = _base(inputs, series, np.isnan(naive), (stored.scaler.mean[:C] - mean) / std)
        plain = {name: (answer + base) * unit + shift for name, answer in answers.items()}
        actual = target * unit + shift
        for name, of_steps in by_step.items():
            of_steps.add(plain[name], actual)
        if by_series is not None:
            by_series.add(series, plain["forecaster"], plain["seasonal_naive"], actual)
        for name, score in scores.items():
            score.add(plain[name], actual, plain["naive"], scale, unit, level)
            score.num_without_past += int((np.isnan(naive) & ~np.isnan(target)).sum())
        if should_continue is not None and not should_continue(done):
            break
    of_quantiles = {"forecaster": quantiles.result()} if quantiles.num_values else {}
    return {name: score.result() | of_quantiles.get(name, {}) for name, score in scores.items()}


def _compared(
    stored: StoredForecaster, inputs: ScaledWindows, split: Split, season: int
) -> tuple[NDArray[np.float64], Ridge | None]:
    """Returns the seasonal naive errors on the training rows, and ridge regression."""
    num_targets = stored.network.config.num_targets
    naive_error = seasonal_error(inputs.table, split.train_ends, num_targets, season)
    try:
        return naive_error, compared_ridge(stored.network, inputs, split)
    except DataError:  # a part is too short
        return naive_error, None


def _base(
    inputs: ScaledWindows, series: NDArray[np.int64], is_first: NDArray[np.bool_], start: Floats
) -> Floats | float:
    """Returns the level of values without a past: `start`, the mean of the training rows, for
    series that are scaled by all their rows, which no forecast of the first ones knows."""
    if inputs.series is None:
        return 0.0
    is_new = (inputs.series.places[series] < 0)[:, None, None]
    return np.where(is_first & is_new, start, 0.0)


def _units(mean: Floats, std: Floats, is_scaled: bool) -> tuple[Floats, Floats, Floats]:
    """Returns unit and shift of the reported values, and the level of their 0 for smape."""
    if is_scaled:
        return np.ones_like(std), np.zeros_like(mean), mean / std
    return std, mean, np.zeros_like(mean)


def _windows_at_once(config: ForecasterConfig, quantiles: QuantileScores) -> int:
    """Returns the windows of a batch: 256, fewer if they have many quantiles."""
    num_levels = max(len(quantiles.levels), len(LEVELS))
    return min(256, max(1, _MAX_NUMBERS // (config.horizon * config.num_targets * num_levels)))


def season_of(dataset: SeriesDataset) -> int:
    """Returns the steps of a day; for days the steps of a week, for months of a year, else 1."""
    frequency = dataset.frequency
    if frequency.unit == "business_days":
        return 5
    if frequency.unit == "months":
        return max(1, 12 // frequency.step)
    if frequency.unit == "us" and frequency.step < DAY_US and DAY_US % frequency.step == 0:
        return DAY_US // frequency.step
    return 7 if frequency.unit == "us" and frequency.step == DAY_US else 1


def num_test_windows(dataset: SeriesDataset, split: Split, sizes: ForecasterConfig) -> int:
    """Returns the number of windows that `evaluation_events` evaluates; 0 for a short part."""
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
    """Returns the events test, calibration and forecast; docs/runs.md lists their keys.

    `should_continue` is called with the number of windows done and of all; False skips the rest.
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
    compared = ("forecaster", "naive", "seasonal_naive")
    by_step = {name: StepErrors(sizes.horizon, sizes.num_targets) for name in compared}
    by_series = SeriesErrors(len(dataset.series), sizes.num_targets)
    scores = evaluate_forecasts(
        stored, inputs, spread_out(rows), season, curve, split,
        by_step=by_step, by_series=by_series, should_continue=count,
    )  # fmt: skip
    for interval in set(_CURVE) - set(INTERVALS):  # only for the curve
        scores["forecaster"].pop(f"coverage_{100 * interval:g}", None)
    test = {
        "event": "test",
        "scores": scores,
        "targets": _target_errors(dataset.roles.target, by_step, sizes.horizon),
        "series": TableEvaluation(Figures(scores), season, by_series, dataset).worst_series(),
        "windows": num_done,
        "of_windows": len(index),
        "season": season,
    }
    observed = list(curve.coverage().values())
    calibration = {"event": "calibration", "levels": list(_CURVE), "observed": observed}
    tested = spread_out(rows)[:num_done]
    note = coverage_note(stored, inputs, tested, scores["forecaster"])
    return [
        test,
        *([{"event": "message", "level": "warning", "text": note}] if note else []),
        calibration,
        *examples(stored, dataset, inputs, example_rows(dataset, index, _EXAMPLES)),
    ]


def coverage_note(
    stored: StoredForecaster,
    inputs: ScaledWindows,
    rows: NDArray[np.int64],
    figures: Mapping[str, float],
) -> str | None:
    """Returns a line about 80 % intervals whose coverage, in the `figures` of windows that begin at
    `rows`, is off by more than chance explains, and by five points; else None.

    Independent windows have no step of their horizons in common, and count as one value each.
    """
    coverage = figures.get("coverage_80")
    if coverage is None or stored.unsupported((0.1, 0.9)) is not None:  # infinite: told elsewhere
        return None
    segments = inputs.table.segments.of_rows(rows)
    num = int(windows_apart(rows, segments, stored.network.config.horizon).sum())
    chance = max(_LEAST_DIFFERENCE, 2 * (0.8 * 0.2 / num) ** 0.5)
    is_calibrated = stored.network.output.is_calibrated
    is_wide = coverage > 0.8 and not is_calibrated  # as intervals of few counts are
    if is_wide or abs(coverage - 0.8) <= chance:
        return None
    cure = "`recalibrate` fits them to the newest rows"
    if not is_calibrated:
        cure = "`output='quantiles'` and `output='student_t'` have calibrated ones"
    return (
        f"80 % intervals cover {100 * coverage:.0f} % of the values; with"
        f" {counted(num, 'independent window')}, chance explains {100 * max(0, 0.8 - chance):.0f}"
        f" to {100 * min(1, 0.8 + chance):.0f} %: {cure}"
    )


def _target_errors(
    names: Sequence[str], by_step: Mapping[str, StepErrors], horizon: int
) -> list[dict[str, Any]]:
    """Returns the errors of each target in its unit, in all and by quarter of the horizon."""
    ours = by_step["forecaster"]
    ends = sorted({horizon * quarter // 4 for quarter in range(5)})  # fewer if it is short
    return [
        {
            "target": name,
            **ours.result(number),
            **{
                f"{name}_mae": by_step[name].result(number).get("mae")
                for name in ("naive", "seasonal_naive")
            },
            "by_step": [
                {"first": n + 1, "last": last, "mae": ours.result(number, n + 1, last).get("mae")}
                for n, last in itertools.pairwise(ends)
            ],
        }
        for number, name in enumerate(names)
    ]


class Figures(dict[str, dict[str, float]]):
    """Figures by forecast and measure; a notebook shows a table."""

    def _repr_html_(self) -> str:
        return output(scores_table(self, self.get("seasonal_naive", {})))


@dataclass(frozen=True)
class TableEvaluation:
    """The errors of forecasts of a part of a table; a notebook shows those of all series.

    Attributes:
        figures: figures of all series, by forecast; see `Forecaster.backtest`.
        season: period of the seasonal naive forecast, in steps.
    """

    figures: Figures
    season: int
    _errors: SeriesErrors
    _dataset: SeriesDataset

    def __repr__(self) -> str:
        rows = self.by_series()
        shown = [
            f"{row['series']} {row['target']}: mae {row['mae']:.4g}, seasonal naive"
            f" {row['seasonal_naive_mae']:.4g}, {row['num_values']:,} values"
            for row in rows[:_MAX_SERIES]
        ]
        more = [f"… {len(rows) - _MAX_SERIES:,} more in by_series()"] * (len(rows) > _MAX_SERIES)
        return "\n".join([f"TableEvaluation, season {self.season}", *shown, *more])

    def _repr_html_(self) -> str:
        return self.figures._repr_html_()

    def by_series(self) -> list[dict[str, Any]]:
        """Returns series, target, num_values, mae, seasonal_naive_mae and ratio (mae over
        seasonal_naive_mae; None if that is 0) of every series and target with values, the largest
        ratio first."""
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
        """Returns the first rows of `by_series`, the number of rows, and the number of ratios above
        1; {} for a table of one series."""
        if len(self._dataset.series) == 1:
            return {}
        rows = self.by_series()
        num_worse = sum(row["mae"] > row["seasonal_naive_mae"] for row in rows)
        return {"num_compared": len(rows), "num_worse": num_worse, "worst": rows[:_MAX_SERIES]}


def shown_past(horizon: int) -> int:
    """Returns the number of past steps shown with a forecast."""
    return max(_MIN_PAST, 2 * horizon)


def require_counts(**values: Any) -> None:
    """Raises ConfigError for a value that is not a whole number of 1 or more."""
    for name, value in values.items():
        if not (is_whole(value) and value >= 1):
            raise ConfigError(f"`{name}` is {value!r}, expected 1 or more, a whole number")


def series_numbers(dataset: SeriesDataset, names: Sequence[Any] | None) -> list[int] | None:
    """Returns the numbers of the named series; None for None. Raises ConfigError: an unknown name,
    or no name."""
    if names is None:
        return None
    if len(names) == 0:
        raise ConfigError("`series` is empty, expected names of series; leave it out for all")
    known = {str(name): number for number, name in enumerate(dataset.series)}
    wanted = [names] if isinstance(names, str) else list(names)
    for name in wanted:
        if str(name) not in known:
            raise ConfigError(f"there is no series '{name}'{nearest_hint(str(name), list(known))}")
    return [known[str(name)] for name in wanted]


def _times_of(dataset: SeriesDataset, row: int, count: int) -> list[str] | None:
    """Returns the times of `count` steps from a row on as ISO 8601, also of steps after its
    segment; None if the table has no times."""
    if not dataset.has_clock:
        return None
    segments = dataset.table.segments
    segment = int(segments.of_rows(np.array([row]))[0])
    first, start = row - int(segments.first_rows[segment]), int(segments.start_times[segment])
    times = dataset.frequency.after(start, first + count)[first:]
    unit: Literal["s", "us"] = "us" if (times % 1_000_000).any() else "s"
    return [str(time) for time in np.datetime_as_string(times.astype("datetime64[us]"), unit=unit)]


def example_rows(
    dataset: SeriesDataset, index: WindowIndex, count: int, of: Sequence[int] | None = None
) -> NDArray[np.int64]:
    """Returns the first rows of up to `count` evenly spread windows, equally many of each series
    and at other times in each; if there are more series, evenly spread series are taken. `of` are
    the numbers of the series to choose from. Raises DataError: none of the series has a window."""
    rows = index.rows(MAX_WINDOWS)
    series = dataset.table.segments.series[dataset.table.segments.of_rows(rows)]
    names = np.unique(series) if of is None else np.intersect1d(series, of)
    if len(names) == 0:
        raise DataError("none of these series has a window in this part; name other series")
    names = names[np.linspace(0, len(names) - 1, min(count, len(names))).astype(np.int64)]
    share = max(1, count // max(1, len(names)))
    places = np.arange(len(names) * share).reshape(share, -1).T + 1  # (series, windows of each)
    chosen = [
        own[own_places * len(own) // (places.size + 1)]
        for own_places, own in zip(places, (rows[series == name] for name in names), strict=True)
    ]
    return np.unique(np.concatenate(chosen))


def shown_forecasts(
    dataset: SeriesDataset,
    rows: NDArray[np.int64],
    shown: int,
    picks: Iterable[tuple[int, int]],
    center: Floats,
    ends: Floats,
) -> list[dict[str, Any]]:
    """Returns the keys of an event `forecast` that need no actual values, for each of `picks`: a
    window and the number of a target.

    The windows begin at `rows`, with `shown` steps before the forecasts; `center` are the forecasts
    ``(N, h, C, 1)``, `ends` their quantiles ``(N, h, C, 6)`` at `FAN_LEVELS`.
    """
    series = dataset.table.segments.series[dataset.table.segments.of_rows(rows)]
    past = read_windows(dataset.table, rows, shown).double().numpy()
    past += dataset.table.origins(series)[:, None]
    events = []
    for n, c in picks:
        curves = dict(zip(FAN_LEVELS, ends[n, :, c].T.tolist(), strict=True))
        low, high = ([curves[(100 + sign * level) / 200] for level in FAN] for sign in (-1, 1))
        bands = [
            {"level": level, "low": low, "high": high}
            for level, low, high in zip(FAN, low, high, strict=True)
        ]
        main = bands.pop(FAN.index(80))
        events.append({
            "series": str(dataset.series[series[n]]) if len(dataset.series) > 1 else None,
            "target": dataset.roles.target[c],
            "times": _times_of(dataset, int(rows[n]), shown + center.shape[1]),
            "past": past[n, :, c].tolist(),
            "center": center[n, :, c, 0].tolist(),
            "low": main["low"],
            "high": main["high"],
            "bands": bands,
        })  # fmt: skip
    return events


def examples(
    stored: StoredForecaster, dataset: SeriesDataset, inputs: ScaledWindows, rows: NDArray[np.int64]
) -> list[dict[str, Any]]:
    """Returns an event `forecast` per window, each about one target."""
    sizes = stored.network.config
    shown = min(sizes.input_size, shown_past(sizes.horizon))
    center, actual = stored.forecast(inputs, rows)
    ends, _ = stored.forecast(inputs, rows, FAN_LEVELS)
    picks = [(n, n % sizes.num_targets) for n in range(len(rows))]
    first = rows + sizes.input_size - shown
    events = shown_forecasts(dataset, first, shown, picks, center, ends)
    zone = dataset.time_zone if dataset.is_wall or not dataset.time_zone else "UTC"
    return [
        {"event": "forecast", **event, "time_zone": zone, "actual": actual[n, :, c].tolist()}
        for event, (n, c) in zip(events, picks, strict=True)
    ]
