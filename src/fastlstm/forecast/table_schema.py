"""The schema of the table a forecaster was fitted on, applied to other tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import DataError, counted
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.names import canonical
from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.data.timeline import Timeline

if TYPE_CHECKING:
    from fastlstm.forecast.files import StoredForecaster


@dataclass(frozen=True)
class TableSchema:
    """Properties that other tables must match; `categories` has names by number, by column."""

    columns: tuple[str, ...]
    timeline: Timeline
    categories: dict[str, list[Any]]


def apply_schema(dataset: SeriesDataset, stored: StoredForecaster) -> ScaledWindows:
    """Returns a table's windows, scaled and with categories numbered as at fit.

    Raises:
        DataError: other columns, frequency or time zone, unknown categories, or missing values if
            there were none at fit.
    """
    name, columns, schema = dataset.name, dataset.table.columns, stored.schema
    at_fit = schema.timeline
    if columns != schema.columns:
        raise DataError(
            f"{name} has the columns {', '.join(columns)}, this forecaster was fitted on"
            f" {', '.join(schema.columns)}"
        )
    if dataset.roles.time is None and at_fit.frequency.unit != "rows":
        raise DataError(f"{name} has no time column, the table at fit had one")
    if (dataset.time_zone is None) != (at_fit.time_zone is None):
        raise DataError(
            f"{name} has the time zone {dataset.time_zone}, the table at fit had"
            f" {at_fit.time_zone}; convert the times"
        )
    if dataset.frequency != at_fit.frequency:
        raise DataError(
            f"{name} has the frequency {dataset.frequency}, the table at fit had {at_fit.frequency}"
        )
    if dataset.has_missing and not at_fit.may_miss:
        raise DataError(
            f"{name} has missing values, the table at fit had none: fill them, or fit on a table"
            " with missing values"
        )
    numbers = {
        name: numbers_at_fit(name, dataset, schema.categories) for name in dataset.categories
    }
    renumbered = {
        columns.index(name): known
        for name, known in numbers.items()
        if name in columns and (known != np.arange(len(known))).any()
    }
    return ScaledWindows(
        dataset.table,
        stored.scaler,
        statics_of(dataset, stored.static_scale, numbers),
        renumbered,
        None if stored.series is None else stored.series.of(dataset.table, dataset.series),
    )


def numbers_at_fit(
    name: str, dataset: SeriesDataset, categories: Mapping[str, list[Any]]
) -> NDArray[np.float32]:
    """Returns the number at fit of every name of a categorical column, by its number here."""
    known = {canonical(value): number for number, value in enumerate(categories[name])}
    names = [canonical(value) for value in dataset.categories[name]]
    for value in names:
        if value not in known:
            raise DataError(
                f"column '{name}' has the unknown category '{value}'; the table at fit had"
                f" {counted(len(known), 'other')}"
            )
    return np.array([known[value] for value in names], dtype=np.float32)


def renumbered(codes: NDArray[np.floating], numbers: NDArray[np.float32]) -> NDArray[np.floating]:
    """Returns the `numbers_at_fit` of codes; NaN stays."""
    at_fit = numbers[np.nan_to_num(codes).astype(np.int64)]
    return np.where(np.isnan(codes), codes, at_fit)


def static_scale(dataset: SeriesDataset) -> NDArray[np.float64]:
    """Returns mean and standard deviation of every static column, ``(K, 2)``; 0, 1 for names."""
    scales = []
    for name in dataset.roles.static:
        values = dataset.statics[name]
        is_name = name in dataset.roles.categorical or np.isnan(values).all()
        spread = 0.0 if is_name else float(np.nanstd(values))
        scales.append((0.0 if is_name else float(np.nanmean(values)), spread or 1.0))
    return np.array(scales, dtype=np.float64).reshape(-1, 2)


def statics_of(
    dataset: SeriesDataset,
    scale: NDArray[np.float64],
    numbers: dict[str, NDArray[np.float32]],
) -> NDArray[np.float32] | None:
    """Returns scaled static values per series, shape ``(S, K)``, or None without any.

    `scale` is that of `static_scale` at fit, `numbers` are those of `numbers_at_fit`, by column.
    """
    columns = []
    for (mean, spread), name in zip(scale, dataset.roles.static, strict=True):
        values: NDArray[np.floating] = dataset.statics[name]
        if name in numbers:
            values = renumbered(values, numbers[name])
        columns.append((values - mean) / spread)
    return np.stack(columns, 1).astype(np.float32) if columns else None
