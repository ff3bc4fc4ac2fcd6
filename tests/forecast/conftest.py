"""A small table on disk for the tests of runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyarrow import parquet as pq

from series_frames import long_table


@pytest.fixture
def path(tmp_path: Path) -> str:
    found = tmp_path / "table.parquet"
    pq.write_table(long_table(120), found)
    return str(found)
