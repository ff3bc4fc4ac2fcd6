"""Tables that tests are made of."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pyarrow as pa

from fastlstm.forecast.config import ReadOptions
from fastlstm.forecast.data.dataset import SeriesDataset, prepare_table
from fastlstm.forecast.data.roles import RoleRequest
from fastlstm.forecast.data.timeline import Timeline

START = datetime.datetime(2020, 1, 1)


QUICK_RUN: dict[str, Any] = {
    "horizon": 6, "input_size": 24, "patch": 6, "hidden_size": 16, "steps": 30, "dropout": 0.3,
    "split": "60/20/20", "batch_size": 16, "checkpoint_every": 7, "tensorboard": False,
    "evaluations": 5, "threads": 1,
}  # fmt: skip
"""Options of a run with checkpoints on a table of 120 rows."""


def long_table(num_rows: int = 50, num_series: int = 3, **columns: Any) -> pa.Table:
    """Hourly rows of several series: unique_id, ds, y, temp; more columns or others by name."""
    rng = np.random.default_rng(0)
    total = num_rows * num_series
    hours = np.arange(num_rows).astype("timedelta64[h]") + np.datetime64(START, "us")
    found = {
        "unique_id": np.repeat([f"s{k}" for k in range(num_series)], num_rows),
        "ds": np.tile(hours, num_series),
        "y": rng.normal(size=total).astype(np.float32),
        "temp": rng.normal(size=total).astype(np.float32),
        **columns,
    }
    return pa.table({name: values for name, values in found.items() if values is not None})


def replaced(table: pa.Table, name: str, row: int, value: Any) -> pa.Table:
    """Returns a table with one value changed; its column keeps its type where it can."""
    column = table.column(name).to_pylist()
    column[row] = value
    if isinstance(value, str):
        column = [None if cell is None else str(cell) for cell in column]
        array = pa.array(column)
    else:
        array = pa.array(column, table.schema.field(name).type)
    return table.set_column(table.column_names.index(name), name, array)


def prepared(
    source: Any, roles: RoleRequest | None = None, like: Timeline | None = None, **options: Any
) -> SeriesDataset:
    """Reads a table with options of `ReadOptions`."""
    return prepare_table(source, ReadOptions(**options), roles, like)
