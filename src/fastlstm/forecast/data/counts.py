"""Checks that targets are counts."""

from __future__ import annotations

import numpy as np

from fastlstm.errors import DataError, Setting
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.table import row_blocks


def require_counts(dataset: SeriesDataset) -> None:
    """Checks that every target value is a count or missing; reads the targets once.

    Raises:
        DataError: a negative number or a fraction; names its series, row and value.
    """
    table, names = dataset.table, dataset.roles.target
    for begin, end in row_blocks(0, table.num_rows, len(table.columns)):
        rows = table.rows(begin, end) + table.origin
        rows = rows[:, : len(names)]
        bad = np.argwhere((rows < 0) | (rows != np.floor(rows)) & ~np.isnan(rows))
        if len(bad):
            row, column = bad[0]
            segment = table.segments.of_rows(np.array([begin + row]))[0]
            series = dataset.series[int(table.segments.series[segment])]
            place = begin + int(row) - int(table.segments.first_rows[segment])
            raise DataError(
                f"target '{names[column]}' is {rows[row, column]:g} in row {place} of series"
                f" '{series}', expected counts (0, 1, 2 …) for ",
                Setting("output", "negative_binomial"),
                "; use ",
                Setting("output", "student_t"),
                " or quantiles",
            )
