"""What a forecaster remembers of the table it was fitted on, and another table made like it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import DataError, counted, nearest_hint
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.names import canonical
from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.data.splits import Scaler
from fastlstm.forecast.data.timeline import Frequency, Timeline


@dataclass(frozen=True)
class TableSchema:
    """What another table must be like.

    Attributes:
        columns: names, in order.
        frequency: of the rows.
        time_zone: of the times, or None.
        categories: names of every categorical column's numbers.
        may_miss: values may be missing.
        is_wall: times are as the clocks of the zone show them; None where that was not stored.
    """

    columns: tuple[str, ...]
    frequency: Frequency
    time_zone: str | None
    categories: dict[str, list[Any]]
    may_miss: bool
    is_wall: bool | None = None

    @property
    def timeline(self) -> Timeline:
        """How times must be."""
        return Timeline(self.frequency, self.time_zone, self.is_wall)

    @staticmethod
    def of(dataset: SeriesDataset, may_miss: bool) -> TableSchema:
        """Returns what is to be remembered of a table."""
        columns = dataset.table.columns
        return TableSchema(
            columns, dataset.frequency, dataset.time_zone, dataset.categories, may_miss,
            dataset.is_wall,
        )  # fmt: skip


def apply_schema(
    dataset: SeriesDataset, schema: TableSchema, scaler: Scaler, scale: NDArray[np.float64]
) -> ScaledWindows:
    """Returns a table's windows as those of `fit`: scaled by its numbers, names numbered as there.

    Raises:
        DataError: other columns, another step or time zone, a name or a gap that fit has not seen.
    """
    name, found = dataset.name, dataset.table.columns
    if missing := [column for column in schema.columns if column not in found]:
        raise DataError(
            f"{name} has no column '{missing[0]}', which this forecaster was fitted on"
            f" ({', '.join(schema.columns)}){nearest_hint(missing[0], found)}"
        )
    if found != schema.columns:
        raise DataError(
            f"{name} has the columns {', '.join(found)}, this forecaster was fitted on"
            f" {', '.join(schema.columns)}"
        )
    if dataset.roles.time is None and schema.frequency.unit != "rows":
        raise DataError(f"{name} has no column of times, the table at fit had one")
    if (dataset.time_zone is None) != (schema.time_zone is None):
        raise DataError(
            f"the times of {name} have the time zone {dataset.time_zone}, those at fit"
            f" {schema.time_zone}; convert them"
        )
    if dataset.frequency != schema.frequency:
        raise DataError(
            f"the rows of {name} step by {dataset.frequency}, those at fit by {schema.frequency}"
        )
    if dataset.has_missing and not schema.may_miss:
        raise DataError(
            "values are missing, and none were at fit: fill them, or fit on a table in which some"
            " are missing"
        )
    numbers = {name: numbers_at_fit(name, dataset, schema) for name in dataset.categories}
    columns = dataset.table.columns
    changed = {
        columns.index(name): found
        for name, found in numbers.items()
        if name in columns and (found != np.arange(len(found))).any()
    }
    return ScaledWindows(dataset.table, scaler, statics_of(dataset, scale, numbers), changed)


def numbers_at_fit(name: str, dataset: SeriesDataset, schema: TableSchema) -> NDArray[np.float32]:
    """Returns, by a name's number in this table, its number at schema."""
    known = {canonical(value): number for number, value in enumerate(schema.categories[name])}
    names = [canonical(value) for value in dataset.categories[name]]
    for value in names:
        if value not in known:
            raise DataError(
                f"column '{name}' holds the name '{value}', which fit has not seen; it knows"
                f" {counted(len(known), 'name')}"
            )
    return np.array([known[value] for value in names], dtype=np.float32)


def static_scale(dataset: SeriesDataset) -> NDArray[np.float64]:
    """Returns mean and deviation of every static number, ``(K, 2)``; 0 and 1 of names."""
    found = []
    for name in dataset.roles.static:
        values = dataset.statics[name]
        is_name = name in dataset.roles.categorical or np.isnan(values).all()
        spread = 0.0 if is_name else float(np.nanstd(values))
        found.append((0.0 if is_name else float(np.nanmean(values)), spread or 1.0))
    return np.array(found, dtype=np.float64).reshape(-1, 2)


def statics_of(
    dataset: SeriesDataset,
    scale: NDArray[np.float64],
    numbers: dict[str, NDArray[np.float32]] | None = None,
) -> NDArray[np.float32] | None:
    """Returns what is static per series, shape ``(S, K)``, or None where nothing is.

    Args:
        dataset: the table.
        scale: of `static_scale`, at schema.
        numbers: by column, what its names' numbers were at schema.
    """
    columns = []
    for (mean, spread), name in zip(scale, dataset.roles.static, strict=True):
        values = dataset.statics[name]
        if numbers is not None and name in numbers:
            known = numbers[name][np.nan_to_num(values).astype(np.int64)]
            values = np.where(np.isnan(values), values, known)
        columns.append((values - mean) / spread)
    return np.stack(columns, 1).astype(np.float32) if columns else None
