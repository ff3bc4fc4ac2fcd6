"""Windows as the network reads them: scaled, with the static values of their series."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.forecast.data.splits import Scaler
from fastlstm.forecast.data.table import Table
from fastlstm.forecast.data.window_index import read_windows


@dataclass(frozen=True)
class ScaledWindows:
    """A table and the scaling of its windows.

    Attributes:
        table: the rows.
        scaler: of its columns.
        statics: scaled static values per series, shape ``(S, K)``; or None.
        renumbered: number at fit by number in this table, by position of a categorical column.
    """

    table: Table
    scaler: Scaler
    statics: NDArray[np.float32] | None = None
    renumbered: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)

    def prepare(self, values: Tensor, segments: NDArray[np.int64]) -> tuple[Tensor, Tensor | None]:
        """Returns scaled windows ``(B, length, columns)`` and static values ``(B, K)`` or None."""
        for place, numbers in self.renumbered.items():
            codes = values[..., place]
            at_fit = torch.from_numpy(numbers)[codes.nan_to_num(0.0).long()]
            values[..., place] = torch.where(codes.isnan(), codes, at_fit)
        mean = torch.from_numpy(self.scaler.mean - self.table.origin).float()
        scaled = (values - mean) / torch.from_numpy(self.scaler.std).float()
        if self.statics is None:
            return scaled, None
        return scaled, torch.from_numpy(self.statics[self.table.segments.series[segments]])

    def read(
        self, rows: NDArray[np.int64], length: int, size: int = 256
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yields the windows that begin at `rows`, in that order, `size` at a time."""
        for first in range(0, len(rows), size):
            part = rows[first : first + size]
            values = read_windows(self.table, part, length)
            yield self.prepare(values, self.table.segments.of_rows(part))
