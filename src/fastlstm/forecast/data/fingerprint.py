"""What tells one prepared table from another, whatever file or machine it came from."""

from __future__ import annotations

import hashlib
import json

import numpy as np

from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.table import row_blocks
from fastlstm.system.cache import release_pages


def fingerprint(dataset: SeriesDataset) -> str:
    """Returns the SHA-256 of a table's values, names, times and roles.

    Cost: reads the prepared values once, some 1.5 GB/s.
    """
    table, sha = dataset.table, hashlib.sha256()
    described = {
        "columns": table.columns,
        "target": dataset.roles.target,
        "time": dataset.roles.time,
        "series": dataset.roles.series,
        "frequency": dataset.frequency.to_json(),
        "time_zone": dataset.time_zone,
        "clock": [dataset.has_clock, dataset.is_wall],
        "names": dataset.series,
        "categories": dataset.categories,
        "statics": {name: values.tolist() for name, values in dataset.statics.items()},
        "dtype": table.values.dtype.name,
    }
    sha.update(json.dumps(described, sort_keys=True).encode("ascii"))
    segments = table.segments
    for array in (
        segments.series, segments.first_rows, segments.num_rows, segments.start_times,
        table.scale, table.offset, table.origin,
    ):  # fmt: skip
        sha.update(np.ascontiguousarray(array).data.cast("B"))
    for begin, end in row_blocks(0, table.num_rows, len(table.columns)):
        sha.update(np.ascontiguousarray(table.values[begin:end]).data.cast("B"))
        release_pages(table.values)
    return sha.hexdigest()
