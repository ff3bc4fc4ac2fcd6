"""Windows as the network reads them: scaled, with the static values of their series."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.forecast.data.naive import last_present
from fastlstm.forecast.data.series_scale import SeriesOfTable
from fastlstm.forecast.data.splits import Scaler
from fastlstm.forecast.data.table import Table
from fastlstm.forecast.data.window_index import read_windows

if TYPE_CHECKING:
    from fastlstm.forecast.model.config import ForecasterConfig


@dataclass(frozen=True)
class ScaledWindows:
    """A table and the scaling of its windows.

    Attributes:
        table: the rows.
        scaler: of its columns.
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
        """Yields the windows that begin at `rows`, in that order, `size` at a time.

        Args:
            rows: first rows of windows of input and horizon.
            sizes: of the network.
            size: windows at a time.
        """
        for first in range(0, len(rows), size):
            part = rows[first : first + size]
            values = read_windows(self.table, part, sizes.input_size + sizes.horizon)
            self.add_level(values, part, sizes)
            yield self.prepare(values, self.table.segments.of_rows(part))

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
