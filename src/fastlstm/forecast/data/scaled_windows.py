"""Windows as the network reads them: scaled, with the static values of their series.

Targets are scaled by level and spread of each series: series of very different sizes then count
alike, and a small one keeps its digits beside a large one, as level and spread are taken off in
float64, before anything is float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.forecast.data.naive import last_present
from fastlstm.forecast.data.names import canonical
from fastlstm.forecast.data.splits import Scaler, moments
from fastlstm.forecast.data.table import Statistics, Table, row_blocks
from fastlstm.forecast.data.window_index import read_windows

if TYPE_CHECKING:
    from fastlstm.forecast.model.network import ForecasterConfig


CONSTANT = 1e-12
"""Spread over level of a series without any."""


@dataclass(frozen=True)
class SeriesScale:
    """Level and spread of the targets of series, float64.

    Attributes:
        names: of the series, as `canonical` has them.
        mean: shape ``(S, C)``, in the table's units.
        std: same shape, above 0.
        is_centered: the mean is not 0 for all series.
    """

    names: tuple[str, ...]
    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    is_centered: bool = True

    @staticmethod
    def fit(
        table: Table,
        series: Sequence[Any],
        ends: NDArray[np.int64],
        default: tuple[NDArray[np.float64], NDArray[np.float64]],
        is_centered: bool = True,
        keeps_empty: bool = True,
    ) -> SeriesScale:
        """Returns means and standard deviations over the training rows of every series.

        The rows of each segment end at `ends` (exclusive). A series that is constant there has the
        spread of all its rows; one that is constant in all of them as good as none; one without
        values the `default`, mean and spread ``(C,)``, or with `keeps_empty` False none: it is as
        new as a series of another table.
        """
        firsts, num = table.segments.first_rows, len(default[0])
        what = f"{num} targets of {len(series)} series"

        def found(ends: NDArray[np.int64]) -> Statistics:
            of, count = table.segments.series, len(series)
            return table.statistics(what, ends, lambda: moments(table, of, count, num, ends))

        mean, variance = found(ends)
        is_empty, is_flat = np.isnan(mean), variance <= (CONSTANT * mean) ** 2
        if is_flat.any():
            variance = np.where(is_flat, found(firsts + table.segments.num_rows)[1], variance)
        level = np.where(mean == 0, 1.0, np.abs(mean))
        std = np.maximum(np.sqrt(variance), CONSTANT * level)
        mean, std = np.where(is_empty, default[0], mean), np.where(is_empty, default[1], std)
        mean = mean if is_centered else np.zeros_like(mean)
        kept = np.flatnonzero(~is_empty.all(1) | keeps_empty)
        names = tuple(canonical(series[number]) for number in kept.tolist())
        return SeriesScale(names, mean[kept], std[kept], is_centered)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        own = {} if self.is_centered else {"is_centered": False}
        return {"names": self.names, "mean": self.mean.tolist(), "std": self.std.tolist(), **own}

    @staticmethod
    def from_json(values: Any, num_targets: int) -> SeriesScale:
        """Returns what `to_json` described; raises ValueError if it is invalid."""
        names = values["names"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("the names of the series are expected to be texts")
        shape = len(names), num_targets
        mean, std = (np.asarray(values[name], dtype=np.float64) for name in ("mean", "std"))
        is_finite = np.isfinite(mean).all() and np.isfinite(std).all()
        if mean.shape != shape or std.shape != shape or not is_finite or (std <= 0).any():
            raise ValueError(f"the scales of the series are expected to be {shape} numbers")
        return SeriesScale(tuple(names), mean, std, values.get("is_centered") is not False)

    def of_windows(self, targets: Tensor, places: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns mean and spread, ``(B, C)``, of windows of targets ``(B, L, C)``, float64.

        A window of an unknown series, of place -1 or without `places`, is scaled by itself.
        """
        mean = targets.nanmean(1).nan_to_num(0.0)
        variance = ((targets - mean[:, None]) ** 2).nanmean(1).nan_to_num(0.0)
        level = torch.where(mean == 0, 1.0, mean.abs())
        std = torch.maximum(variance.sqrt(), CONSTANT * level)
        mean = mean if self.is_centered else mean * 0.0
        if places is None:
            return mean, std
        known, at = (places > -1)[:, None], places.clamp(min=0)
        of_fit = (F.embedding(at, torch.from_numpy(scale)) for scale in (self.mean, self.std))
        mean, std = (torch.where(known, *pair) for pair in zip(of_fit, (mean, std), strict=True))
        return mean, std

    def of(self, table: Table, series: Sequence[Any]) -> SeriesOfTable:
        """Returns mean and spread of the series of another table.

        Those of series that are not known are of all their rows.
        """
        numbers = {name: number for number, name in enumerate(self.names)}
        places = np.array([numbers.get(canonical(name), -1) for name in series], dtype=np.int64)
        mean, std = self.mean[places], self.std[places]
        if (is_new := places < 0).any():
            ends = table.segments.first_rows + table.segments.num_rows
            default = self.mean.mean(0), self.std.mean(0)
            own = SeriesScale.fit(table, series, ends, default, self.is_centered)
            mean[is_new], std[is_new] = own.mean[is_new], own.std[is_new]
        return SeriesOfTable(mean, std, places, len(self.names))


class SeriesOfTable(NamedTuple):
    """The scale of the series of a table.

    Attributes:
        mean, std: level and spread of the targets, shape ``(S, C)``.
        places: number of each series at fit; -1 of one that was not there.
        num_at_fit: number of series at fit.
    """

    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    places: NDArray[np.int64]
    num_at_fit: int


@dataclass(frozen=True)
class ScaledWindows:
    """A table and the scaling of its windows.

    Attributes:
        statics: scaled static values per series, shape ``(S, K)``; or None.
        renumbered: number at fit by number in this table, by position of a categorical column.
        series: scale of the targets of every series; None: `scaler`'s.
    """

    table: Table
    scaler: Scaler
    statics: NDArray[np.float32] | None = None
    renumbered: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)
    series: SeriesOfTable | None = None

    def scales(self, segments: NDArray[np.int64]) -> tuple[NDArray[np.float64], ...]:
        """Returns mean and spread of the columns of windows of `segments`, ``(B or 1, C)``."""
        scales = self.scaler.mean[None], self.scaler.std[None]
        if self.series is None:
            return scales
        numbers = self.table.segments.series[segments]
        own = [np.repeat(scale, len(numbers), 0) for scale in scales]
        for scale, of_series in zip(own, self.series[:2], strict=True):
            scale[:, : of_series.shape[1]] = of_series[numbers]
        return tuple(own)

    def places(self, segments: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Returns the numbers at fit of the series of segments, -1 of unknown ones; or None."""
        if self.series is None:
            return None
        return self.series.places[self.table.segments.series[segments]]

    def prepare(self, values: Tensor, segments: NDArray[np.int64]) -> tuple[Tensor, Tensor | None]:
        """Returns scaled windows ``(B, length, columns)`` and static values ``(B, K)`` or None."""
        for place, numbers in self.renumbered.items():
            codes = values[..., place]
            at_fit = torch.from_numpy(numbers)[codes.nan_to_num(0.0).long()]
            values[..., place] = torch.where(codes.isnan(), codes, at_fit)
        mean, std = self.scales(segments)
        mean = mean - self.table.origins(self.table.segments.series[segments])
        center, unit = (torch.from_numpy(scale).float()[:, None] for scale in (mean, std))
        scaled = (values - center) / unit
        if self.statics is None:
            return scaled, None
        return scaled, torch.from_numpy(self.statics[self.table.segments.series[segments]])

    def read(
        self, rows: NDArray[np.int64], sizes: ForecasterConfig, size: int = 256
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yields the windows of input and horizon that begin at `rows`, in that order, `size` at a
        time."""
        for first in range(0, len(rows), size):
            part = rows[first : first + size]
            values = read_windows(self.table, part, sizes.input_size + sizes.horizon)
            self.add_level(values, part, sizes)
            yield self.prepare(values, self.table.segments.of_rows(part))

    def known(self, sizes: ForecasterConfig) -> Iterator[Tensor]:
        """Yields the future covariates of all rows in order, ``(rows, F)``."""
        for first, last in row_blocks(0, self.table.num_rows, len(self.table.columns)):
            values = torch.from_numpy(self.table.rows(first, last).copy())[:, None]
            scaled = self.prepare(values, self.table.segments.of_rows(np.arange(first, last)))[0]
            yield scaled[:, 0, sizes.num_targets + sizes.num_past :]

    def add_level(self, values: Tensor, rows: NDArray[np.int64], sizes: ForecasterConfig) -> None:
        """Gives windows ``(B, L or more, C)`` as stored, of which a target has no input value, the
        last value before them.

        Without it such a window has no level, and its forecast is the mean of the training rows.
        """
        if not sizes.has_missing:
            return
        C = sizes.num_targets
        is_empty = values[:, : sizes.input_size, :C].isnan().all(1)
        for window in torch.nonzero(is_empty.any(1))[:, 0].tolist():
            last = torch.from_numpy(last_present(self.table, int(rows[window]), C))
            values[window, 0, :C] = torch.where(is_empty[window], last, values[window, 0, :C])
