"""Cross-validation of a forecaster: forecasts from rolling origins at the end of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from fastlstm.errors import DataError
from fastlstm.forecast.calibration import forecast
from fastlstm.forecast.config import split_of
from fastlstm.forecast.data.splits import split_table
from fastlstm.forecast.forecast_table import as_times, times_from

if TYPE_CHECKING:
    from fastlstm.forecast.data.dataset import SeriesDataset
    from fastlstm.forecast.forecaster import Forecaster


def cross_validated(
    dataset: SeriesDataset,
    fit: Callable[[str], Forecaster],
    horizon: int,
    n_windows: int,
    step_size: int,
    refit: bool,
    split: str,
) -> pa.Table:
    """Returns the forecasts of the last `n_windows` origins; see `Forecaster.cross_validation`.

    `fit` trains on the table with a split in counts; the first two parts of `split` divide the rows
    before an origin.
    """
    segments, frequency = dataset.table.segments, dataset.frequency
    starts = frequency.ticks(segments.start_times)
    total = int((starts + segments.num_rows).max() - starts.min())
    first = total - horizon - (n_windows - 1) * step_size
    train, valid, *_ = split_of(split)
    least = valid if isinstance(valid, int) else 1
    if first <= least:
        raise DataError(
            f"the table has {total} steps, {n_windows} windows of {horizon} steps leave {first},"
            f" expected more than {least}, for validation; take a smaller `n_windows`"
        )
    tables, model = [], None
    for window in range(n_windows):
        origin = first + window * step_size
        held_out = valid
        if not isinstance(valid, int):
            held_out = min(origin - 1, round(origin * valid / (train + valid)))
        cuts = f"{origin - held_out},{held_out},{horizon}"
        if refit or model is None:
            model = fit(cuts)
        tables.append(_window(model, dataset, cuts))
    return pa.concat_tables(tables)


def _window(model: Forecaster, dataset: SeriesDataset, cuts: str) -> pa.Table:
    """Returns the forecasts of one origin: a row per series and step."""
    stored, inputs = model.stored_, model._inputs
    sizes, roles = stored.network.config, dataset.roles
    split = split_table(dataset.table, dataset.frequency, cuts)
    windows = split.windows(dataset.table, "test", sizes.input_size, sizes.horizon)
    rows = windows.rows()
    segments = dataset.table.segments.of_rows(rows)
    series = dataset.table.segments.series[segments]
    answers = list(forecast(stored.network, inputs, rows))
    center, actual = (
        np.concatenate([a.double().numpy() for a in part]) for part in zip(*answers, strict=True)
    )
    mean, std = (scale[:, None, : sizes.num_targets] for scale in inputs.scales(segments))
    last = rows + sizes.input_size - 1 - dataset.table.segments.first_rows[segments]
    times = times_from(dataset, segments, last, sizes.horizon + 1)
    table: dict[str, Any] = {}
    if roles.series is not None:
        table[roles.series] = pa.array(list(dataset.series)).take(
            pa.array(np.repeat(series, sizes.horizon))
        )
    table["step" if roles.time is None else roles.time] = as_times(dataset, times[:, 1:])
    table["cutoff"] = as_times(dataset, np.repeat(times[:, :1], sizes.horizon, 1))
    for c, name in enumerate(roles.target):
        for column, values in ((name, actual), (f"{name}-forecast", center[..., 0])):
            scaled = values[..., c] * std[..., c] + mean[..., c]
            table[column] = pa.array(scaled.reshape(-1), from_pandas=True)
    return pa.table(table)
