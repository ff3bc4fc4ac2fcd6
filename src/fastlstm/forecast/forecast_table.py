"""Forecasts as a table of the input's kind: series, time, a column per target and quantile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.errors import DataError, Setting, counted
from fastlstm.forecast.calibration import answer
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.data.window_index import read_windows
from fastlstm.forecast.files import StoredForecaster
from fastlstm.forecast.future_covariates import future_covariates

_SERIES_AT_ONCE = 256


@torch.no_grad()
def predict_table(
    stored: StoredForecaster,
    dataset: SeriesDataset,
    inputs: ScaledWindows,
    quantiles: Sequence[float] = (),
    future: SeriesDataset | None = None,
) -> pa.Table:
    """Forecasts the steps after the end of every series.

    Args:
        stored: the forecaster.
        dataset: the past of the series.
        inputs: its scaled windows.
        quantiles: levels, a column each; none for point forecasts.
        future: future covariates, if any.

    Raises:
        DataError: a series is too short, or future covariates are missing.
        ConfigError: a level outside those calibrated.
    """
    table, sizes = dataset.table, stored.network.config
    last = np.flatnonzero(np.diff(table.segments.series, append=-1))
    rows = table.segments.num_rows[last]
    _refuse_short(dataset, last, rows, sizes.input_size)
    series = table.segments.series[last]
    times = _times_ahead(dataset, last, sizes.horizon)
    known = None
    if future is not None:
        known = future_covariates(future, dataset, stored.schema, series, times)
    starts = table.segments.first_rows[last] + rows - sizes.input_size
    answers = []
    for first in range(0, len(last), _SERIES_AT_ONCE):
        part = slice(first, first + _SERIES_AT_ONCE)
        past = read_windows(table, starts[part], sizes.input_size)
        empty = past.new_full((len(past), sizes.horizon, past.shape[2]), float("nan"))
        values, statics = inputs.prepare(torch.cat([past, empty], 1), last[part])
        if known is not None:
            place = sizes.num_targets + sizes.num_past
            scaled = (known[part] - stored.scaler.mean[place:]) / stored.scaler.std[place:]
            values[:, sizes.input_size :, place:] = torch.from_numpy(scaled).float()
        answers.append(answer(stored.network, values, statics, stored.calibration, quantiles))
    columns = _columns(stored, torch.cat(answers), dataset.roles.target, quantiles)
    return _table(dataset, series, times, columns)


def _refuse_short(
    dataset: SeriesDataset, last: NDArray[np.int64], rows: NDArray[np.int64], input_size: int
) -> None:
    short = np.flatnonzero(rows < input_size)
    if len(short):
        name = dataset.series[int(dataset.table.segments.series[last[short[0]]])]
        which = f"series '{name}' ends in" if name else "the table has"
        more = f" ({len(short)} series are too short)" if len(short) > 1 else ""
        raise DataError(
            f"{which} {counted(rows[short[0]], 'row')} without gaps{more}, a forecast reads the"
            f" last {input_size}; give more rows of the past, or train with a smaller ",
            Setting("input_size"),
        )


def _times_ahead(
    dataset: SeriesDataset, last: NDArray[np.int64], horizon: int
) -> NDArray[np.int64]:
    """Returns the times of the steps after the end of the segments `last`, ``(N, h)``."""
    segments, frequency = dataset.table.segments, dataset.frequency
    times = []
    for segment in last.tolist():
        count = int(segments.num_rows[segment])
        end = frequency.after(int(segments.start_times[segment]), count)[-1]
        times.append(frequency.after(int(end), horizon + 1)[1:])
    return np.array(times, dtype=np.int64).reshape(-1, horizon)


def _columns(
    stored: StoredForecaster, answers: Tensor, targets: Sequence[str], quantiles: Sequence[float]
) -> dict[str, NDArray[np.float64]]:
    """Returns forecasts or their quantiles in the table's units, by column name."""
    num = len(targets)
    scaler = stored.scaler
    columns: dict[str, NDArray[np.float64]] = {}
    for number, name in enumerate([f"-q{level:g}" for level in quantiles] or [""]):
        values = answers[..., number].numpy() * scaler.std[:num] + scaler.mean[:num]
        columns |= {f"{target}{name}": values[..., c] for c, target in enumerate(targets)}
    return columns


def _table(
    dataset: SeriesDataset,
    series: NDArray[np.int64],
    times: NDArray[np.int64],
    columns: Mapping[str, NDArray[np.float64]],
) -> pa.Table:
    """Returns a row per series ``(N,)`` and step: times and values are ``(N, h)`` each."""
    table: dict[str, Any] = {}
    roles = dataset.roles
    if roles.series is not None:
        names = pa.array(list(dataset.series))
        table[roles.series] = names.take(pa.array(np.repeat(series, times.shape[1])))
    steps = pa.array(times.reshape(-1))
    if dataset.has_clock:
        steps = steps.cast(pa.timestamp("us", None if dataset.is_wall else dataset.time_zone))
        if dataset.is_wall:
            steps = pc.assume_timezone(
                steps, dataset.time_zone, ambiguous="earliest", nonexistent="latest"
            )
    table["step" if roles.time is None else roles.time] = steps
    for column, values in columns.items():
        table[column] = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.table(table)


def kind_of(frame: Any) -> str:
    """Returns the kind of a table: "array", "pandas", "polars", or "arrow" for anything else."""
    if isinstance(frame, np.ndarray):
        return "array"
    module = type(frame).__module__.split(".")[0]
    return module if module in ("pandas", "polars") else "arrow"


def as_kind(table: pa.Table, kind: str) -> Any:
    """Returns the table as a frame of a kind of `kind_of`; an array is ``(h, columns)``."""
    if kind == "array":
        columns = [table[name].to_numpy() for name in table.column_names if name != "step"]
        return np.stack(columns, 1)
    if kind == "pandas":
        return table.to_pandas()
    if kind == "polars":
        import polars

        return polars.from_arrow(table)
    return table
