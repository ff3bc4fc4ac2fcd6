"""Forecasts as files: the same rows for any block size."""

from __future__ import annotations

import io

import pyarrow as pa
import pytest
from pyarrow import csv, ipc
from pyarrow import parquet as pq

from fastlstm.forecast import forecast_file
from fastlstm.forecast.forecast_file import SUFFIXES, write_rows

ROWS = pa.table(
    {
        "unique_id": [f"s{n // 4}" for n in range(40)],
        "ds": pa.array([n * 3_600_000_000 for n in range(40)], pa.timestamp("us", "Europe/Berlin")),
        "y": [n / 3 for n in range(40)],
    }
)


def written(suffix: str, sizes: list[int], whole: bool = True, rows: pa.Table = ROWS) -> bytes:
    file, tables, begin = io.BytesIO(), [], 0
    for size in sizes:
        tables.append(rows.slice(begin, size))
        begin += size
    write_rows(file, suffix, rows.schema, tables, whole)
    return file.getvalue()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_size_of_blocks_changes_no_row(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast_file, "_GROUP_ROWS", 7)
    read = {
        ".parquet": pq.read_table,
        ".csv": csv.read_csv,
        ".arrow": lambda file: ipc.open_file(file).read_all(),
    }[suffix]
    whole = read(io.BytesIO(written(suffix, [40])))
    assert whole["y"].to_pylist() == pytest.approx(ROWS["y"].to_pylist())
    for sizes in ([7, 7, 7, 7, 7, 5], [1] * 40, [0, 39, 0, 1], [20, 20]):
        assert read(io.BytesIO(written(suffix, sizes))).equals(whole)


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_times_of_a_csv_have_fractions_only_where_one_has(zone: str | None) -> None:
    times = pa.array([0, 3_600_000_000], pa.timestamp("us", zone))
    rows = pa.table({"time": times, "y": [1.0, 2.0]})
    found = csv.read_csv(io.BytesIO(written(".csv", [2], True, rows)))
    assert found["time"].type == pa.timestamp("s", zone and "UTC")
    assert found["time"].cast(times.type).equals(rows["time"])
    finer = pa.table({"time": pa.array([0, 500_000], pa.timestamp("us", zone))})
    assert b".5" in written(".csv", [2], False, finer)
    assert b"." not in written(".csv", [2], True, rows).replace(b"2.", b"").replace(b"1.", b"")
