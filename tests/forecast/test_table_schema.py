"""Other tables must be like the one at fit; names keep their numbers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fastlstm.errors import DataError
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.preparation import prepare
from fastlstm.forecast.data.splits import Scaler
from fastlstm.forecast.table_schema import (
    TableSchema,
    apply_schema,
    static_scale,
    statics_of,
)
from series_frames import long_table, replaced

ROWS = 12


def table(names: tuple[str, ...] = ("a", "b", "c"), **columns: Any) -> pa.Table:
    rows = np.arange(ROWS * 3)
    size = np.repeat([2.0, 4.0, 9.0], ROWS)
    return long_table(ROWS, 3, sky=np.array(names)[rows % len(names)], size=size, **columns)


def dataset(frame: pa.Table) -> SeriesDataset:
    config = ForecastConfig(
        target=("y",), past=("temp", "sky"), static=("size",), categorical=("sky",)
    )
    return prepare(frame, config)


def applied(frame: pa.Table | SeriesDataset, may_miss: bool = False) -> Any:
    fitted = dataset(table())
    other = frame if isinstance(frame, SeriesDataset) else dataset(frame)
    scaler = Scaler(np.array([1.0, 2.0, 0.0]), np.array([2.0, 4.0, 1.0]))
    stored = SimpleNamespace(
        schema=TableSchema.of(fitted, may_miss), scaler=scaler,
        static_scale=static_scale(fitted), series=None,
    )  # fmt: skip
    return apply_schema(other, stored)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: replaced(t, "temp", 3, None), "has missing values, the table at fit had none"),
        (lambda _: table(("a", "b", "d")), "'sky' has the unknown category 'd'; .* 3 others"),
    ],
)
def test_a_table_of_another_schema_is_refused(
    change: Callable[[pa.Table], pa.Table], message: str
) -> None:
    applied(table())
    with pytest.raises(DataError, match=message):
        applied(change(table()))


def test_a_missing_column_is_named_with_the_nearest() -> None:
    config = ForecastConfig(target=("y",), past=("tempo",), static=())
    other = prepare(table(tempo=np.zeros(ROWS * 3) + np.arange(ROWS * 3)), config)
    with pytest.raises(DataError, match=r"no column 'temp', which .* \(y, temp, sky\).*'tempo'"):
        applied(other)


def test_missing_values_are_taken_if_some_were_missing_at_fit() -> None:
    applied(replaced(table(), "temp", 3, None), may_miss=True)


def test_static_names_and_constants_are_not_scaled() -> None:
    config = ForecastConfig(
        target=("y",), past=(), static=("size", "same", "place"), categorical=("place",)
    )
    place = np.repeat(["n", "s", "n"], ROWS)
    data = prepare(table(same=np.full(ROWS * 3, 7.0), place=place, temp=None), config)
    scale = static_scale(data)
    assert scale[1].tolist() == [7.0, 1.0]
    assert scale[2].tolist() == [0.0, 1.0]
    statics = statics_of(data, scale, {})
    assert statics is not None
    assert statics[:, 1:].tolist() == [[0.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    assert statics.dtype == np.float32
    renumbered = statics_of(data, scale, {"place": np.array([5.0, 4.0], np.float32)})
    assert renumbered is not None
    assert renumbered[:, 2].tolist() == [5.0, 4.0, 5.0]
