"""Forecasts as files: the same rows for any block size."""

from __future__ import annotations

import io

import pyarrow as pa
import pytest
from pyarrow import csv, ipc
from pyarrow import parquet as pq

from fastlstm.forecast import forecast_table
from fastlstm.forecast.forecast_table import FILE_SUFFIXES, CsvForm, write_rows

ROWS = pa.table(
    {
        "unique_id": [f"s{n // 4}" for n in range(40)],
        "ds": pa.array([n * 3_600_000_000 for n in range(40)], pa.timestamp("us", "Europe/Berlin")),
        "y": [n / 3 for n in range(40)],
    }
)


SECONDS = CsvForm("s")


def written(suffix: str, sizes: list[int], form: CsvForm = SECONDS, rows: pa.Table = ROWS) -> bytes:
    file, tables, begin = io.BytesIO(), [], 0
    for size in sizes:
        tables.append(rows.slice(begin, size))
        begin += size
    write_rows(file, suffix, rows.schema, tables, form)
    return file.getvalue()


@pytest.mark.parametrize("suffix", FILE_SUFFIXES)
def test_the_size_of_blocks_changes_no_row(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast_table, "_GROUP_ROWS", 7)
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
    found = csv.read_csv(io.BytesIO(written(".csv", [2], SECONDS, rows)))
    assert found["time"].type == pa.timestamp("s", zone and "UTC")
    assert found["time"].cast(times.type).equals(rows["time"])
    finer = pa.table({"time": pa.array([0, 500_000], pa.timestamp("us", zone))})
    assert b".5" in written(".csv", [2], CsvForm(), finer)
    assert b"." not in written(".csv", [2], SECONDS, rows).replace(b"2.", b"").replace(b"1.", b"")


def test_a_csv_has_the_digits_of_float32_and_dates_without_hours() -> None:
    days = pa.array([0, 86_400_000_000] * 4, pa.timestamp("us"))
    values = [103.14461146791918, -1 / 3, 0.0, 1.0, 12345678.9, 2e-7 / 3, float("inf"), None]
    rows = pa.table({"ds": days, "y": pa.array(values, pa.float64())})
    lines = written(".csv", [8], CsvForm("D", is_short=True), rows).decode().splitlines()
    assert lines[1:4] == ["1970-01-01,103.1446", "1970-01-02,-0.3333333", "1970-01-01,0"]
    found = [line.partition(",")[2] for line in lines[4:]]
    assert [float(text) for text in found[:3]] == [1, 12345680, 6.666667e-08]
    assert found[3:] == ["inf", "nan"]
    whole = written(".csv", [8], CsvForm("D"), rows).decode()
    assert "103.14461146791918" in whole
