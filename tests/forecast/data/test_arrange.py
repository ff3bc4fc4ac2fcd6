"""Rows in any order, with duplicates and gaps, against the plain way of arranging them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fastlstm.forecast.config import ReadOptions
from fastlstm.forecast.data.dataset import prepare_table


def plainly(
    series: np.ndarray, times: np.ndarray, values: np.ndarray, kept: str, fill: bool
) -> tuple[list[int], list[tuple[int, int]], list[float]]:
    """Returns series, (start, rows) of every segment, and all values, one row at a time."""
    order_of_series = list(dict.fromkeys(series.tolist()))
    which: list[int] = []
    segments: list[tuple[int, int]] = []
    found: list[float] = []
    for number, name in enumerate(order_of_series):
        rows: dict[int, float] = {}
        for time, value in zip(times[series == name], values[series == name], strict=True):
            if kept == "last" or int(time) not in rows:
                rows[int(time)] = float(value)
        steps = sorted(rows)
        if fill:
            steps = list(range(steps[0], steps[-1] + 1))
        for step in steps:
            if not which or which[-1] != number or step != segments[-1][0] + segments[-1][1]:
                which.append(number)
                segments.append((step, 0))
            start, length = segments[-1]
            segments[-1] = (start, length + 1)
            found.append(rows.get(step, float("nan")))
    return which, segments, found


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("kept", ["first", "last"])
@pytest.mark.parametrize("gaps", ["split", "fill"])
def test_any_rows(seed: int, kept: Any, gaps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    monkeypatch.setattr("fastlstm.forecast.data.arrange._BLOCK_ROWS", int(rng.integers(3, 60)))
    monkeypatch.setattr("fastlstm.forecast.data.records._BATCH_ROWS", int(rng.integers(3, 60)))
    parts = []
    for name in range(int(rng.integers(1, 5))):
        length = int(rng.integers(15, 60))
        times = np.arange(length)[rng.random(length) > 0.1 * (seed % 2)]
        times = np.concatenate([times, rng.choice(times, int(rng.integers(0, 5)))])
        parts.append(np.stack([np.full(len(times), name), times + int(rng.integers(0, 9))], 1))
    rows = np.concatenate(parts)
    if seed % 3:
        rows = rows[rng.permutation(len(rows))]
    else:
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    values = rng.normal(size=len(rows)).astype(np.float32)
    names = np.array([f"n{k}" for k in rows[:, 0]])
    table = pa.table({"unique_id": names, "ds": rows[:, 1], "y": values})
    policy = ReadOptions(disorder="sort", duplicates=kept, gaps=gaps)
    found = prepare_table(table, policy)
    which, segments, wanted = plainly(names, rows[:, 1], values, kept, gaps == "fill")
    assert found.table.segments.series.tolist() == which
    assert found.table.segments.start_times.tolist() == [start for start, _ in segments]
    assert found.table.segments.num_rows.tolist() == [length for _, length in segments]
    np.testing.assert_array_equal(found.table.values[:, 0], np.array(wanted, dtype=np.float32))
