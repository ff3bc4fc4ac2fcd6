"""Empty rows before each series, so that series shorter than the input have whole windows too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.table import MISSING_INT16, Segments, Table
from fastlstm.forecast.data.timeline import Frequency


def padded(dataset: SeriesDataset, num: int) -> SeriesDataset:
    """Returns a table with `num` rows without values before the first row of each series, copied
    into memory."""
    if num == 0:
        return dataset
    table, segments = dataset.table, dataset.table.segments
    is_first = segments.are_first
    added = num * np.cumsum(is_first)
    shape = table.num_rows + int(added[-1]), len(table.columns)
    empty = MISSING_INT16 if table.values.dtype == np.int16 else np.nan
    values = np.full(shape, empty, dtype=table.values.dtype)
    is_own = np.ones(len(values), dtype=np.bool_)
    first_rows = segments.first_rows + added - num * is_first
    is_own[(first_rows[is_first][:, None] + np.arange(num)).reshape(-1)] = False
    values[is_own] = table.values
    frequency = dataset.frequency
    starts = segments.start_times - num * frequency.step * is_first
    if frequency.unit not in ("us", "rows"):
        before = [frequency.after(int(start), 1, -num)[0] for start in segments.start_times]
        starts = np.where(is_first, before, segments.start_times)
    moved = Segments(segments.series, first_rows, segments.num_rows + num * is_first, starts)
    wider = Table(values, table.columns, moved, table.origin, padding=num)
    return replace(dataset, table=wider, has_missing=True)


def own_rows(table: Table, frequency: Frequency) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the tick of the first row and the number of rows of each segment, without padding."""
    segments, added = table.segments, table.padded_rows
    return frequency.ticks(segments.start_times) + added, segments.num_rows - added
