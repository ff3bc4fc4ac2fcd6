"""Forecasts as a table of the kind that came: series, time, a column per target and quantile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastlstm.series.dataset import SeriesDataset


def forecast_table(
    dataset: SeriesDataset,
    series: NDArray[np.int64],
    starts: NDArray[np.int64],
    columns: Mapping[str, NDArray[np.float32]],
) -> pa.Table:
    """Returns one row per series and step.

    Args:
        dataset: that was forecast.
        series: number of the series of each forecast, shape ``(N,)``.
        starts: time before the first forecast step of each, shape ``(N,)``.
        columns: names and values, shape ``(N, h)`` each.
    """
    horizon = next(iter(columns.values())).shape[1]
    found: dict[str, Any] = {}
    roles = dataset.roles
    if roles.series is not None:
        names = pa.array(list(dataset.series))
        found[roles.series] = names.take(pa.array(np.repeat(series, horizon)))
    steps = [dataset.frequency.after(int(start), horizon + 1)[1:] for start in starts]
    times = np.concatenate(steps) if steps else np.zeros(0, dtype=np.int64)
    name = roles.time if roles.time is not None else "step"
    found[name] = pa.array(times)
    if dataset.has_clock:
        is_shown = dataset.is_wall or dataset.time_zone is None
        found[name] = found[name].cast(pa.timestamp("us", None if is_shown else dataset.time_zone))
        if dataset.is_wall:
            found[name] = pc.assume_timezone(
                found[name], dataset.time_zone, ambiguous="earliest", nonexistent="latest"
            )
    for column, values in columns.items():
        found[column] = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.table(found)


def as_came(table: pa.Table, frame: Any) -> Any:
    """Returns the table as the kind of frame that `frame` is; an Arrow table for files."""
    module = type(frame).__module__.split(".")[0]
    if module == "pandas":
        return table.to_pandas()
    if module == "polars":
        import polars

        return polars.from_arrow(table)
    return table
