"""Whether targets are counts."""

from __future__ import annotations

import numpy as np

from fastlstm.errors import DataError, Setting
from fastlstm.forecast.data.dataset import SeriesDataset

_STRETCH = 1 << 18


def require_counts(dataset: SeriesDataset) -> None:
    """Reads the targets once; missing values pass.

    Raises:
        DataError: a negative number or a fraction; its series, its row and the number are named.
    """
    table, names = dataset.table, dataset.roles.target
    for begin in range(0, table.num_rows, _STRETCH):
        rows = table.rows(begin, min(begin + _STRETCH, table.num_rows)) + table.origin
        rows = rows[:, : len(names)]
        bad = np.argwhere((rows < 0) | (rows != np.floor(rows)) & ~np.isnan(rows))
        if len(bad):
            row, column = bad[0]
            segment = table.segments.of_rows(np.array([begin + row]))[0]
            series = dataset.series[int(table.segments.series[segment])]
            place = begin + int(row) - int(table.segments.first_rows[segment])
            raise DataError(
                f"target '{names[column]}' is {rows[row, column]:g} in row {place} of series"
                f" '{series}', expected whole numbers of 0 or more for ",
                Setting("output", "negative_binomial"),
                "; take ",
                Setting("output", "student_t"),
                " or quantiles",
            )
