from __future__ import annotations

import numpy as np
import pytest
import torch

from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.data.splits import Scaler
from fastlstm.forecast.data.table import Segments, Table, table_from_array
from fastlstm.forecast.model.network import ForecasterConfig

ORIGIN = np.array([[1e9, 0.0]])
MEAN, STD = np.array([1e9 + 3, 0.0]), np.array([2.0, 1.0])


def table() -> Table:
    """Ten rows of a number, stored minus its origin, and a category; series 1 begins in row 6."""
    rows = np.stack([np.arange(10), np.arange(10) % 3], 1).astype(np.float32)
    first, lengths = np.array([0, 4, 6]), np.array([4, 2, 4])
    segments = Segments(np.array([0, 0, 1]), first, lengths, np.zeros(3, dtype=np.int64))
    plain = table_from_array(rows)
    return Table(rows, plain.columns, segments, ORIGIN)


@pytest.mark.parametrize(("size", "sizes"), [(1, [1, 1, 1]), (2, [2, 1]), (256, [3])])
def test_windows_are_read_in_the_given_order(size: int, sizes: list[int]) -> None:
    statics = np.array([[0.0], [1.0]], dtype=np.float32)
    windows = ScaledWindows(table(), Scaler(MEAN, STD), statics)
    parts = list(windows.read(np.array([8, 0, 4]), ForecasterConfig(1, 1, patch=1), size))
    assert [len(values) for values, _ in parts] == sizes
    values = torch.cat([values for values, _ in parts])
    assert (2 * values[..., 0] + 3).tolist() == [[8, 9], [0, 1], [4, 5]]
    static = torch.cat([static for _, static in parts if static is not None])
    assert static[:, 0].tolist() == [1, 0, 0]
