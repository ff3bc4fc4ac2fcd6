"""Tables in object stores are read as those on a disk."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, ipc
from pyarrow import parquet as pq

from fastlstm import Forecaster
from fastlstm.cli.main import main
from fastlstm.errors import DataError
from fastlstm.forecast.data.dataset import prepare_table
from fastlstm.forecast.data.roles import RoleRequest
from forecast_server import QUICK, waves
from series_frames import long_table

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def store() -> Iterator[Any]:
    """fsspec's store in memory, empty."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    yield memory
    memory.store.clear()


def packed(table: pa.Table, suffix: str) -> bytes:
    file = io.BytesIO()
    if suffix == ".npy":
        np.save(file, np.stack([table["y"], table["temp"]], 1))
    elif suffix == ".parquet":
        pq.write_table(table, file)
    elif suffix in (".arrow", ".feather"):
        with ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    else:
        csv.write_csv(table, file)
        if kind := {".csv.gz": "gzip", ".csv.zst": "zstd"}.get(suffix):
            return bytes(pa.compress(file.getvalue(), kind, asbytes=True))
    return file.getvalue()


def content(dataset: Any) -> tuple[Any, ...]:
    table = dataset.table
    arrays = (table.values, *vars(table.segments).values(), table.origin)
    return table.columns, dataset.series, dataset.frequency, [a.tobytes() for a in arrays]


@pytest.mark.parametrize(
    "suffix", [".csv", ".csv.gz", ".csv.zst", ".parquet", ".arrow", ".feather", ".npy"]
)
def test_a_table_of_a_store_is_the_one_of_a_disk_and_of_a_frame(
    store: Any, suffix: str, tmp_path: Path
) -> None:
    data = packed(long_table(), suffix)
    (tmp_path / f"a{suffix}").write_bytes(data)
    store.pipe(f"/shop/a{suffix}", data)
    local = prepare_table(tmp_path / f"a{suffix}", cache_dir=tmp_path)
    remote = prepare_table(f"memory://shop/a{suffix}", cache_dir=tmp_path)
    assert content(remote) == content(local)
    if suffix != ".npy":
        assert content(local) == content(prepare_table(long_table(), cache_dir=tmp_path))
    assert prepare_table(f"memory://shop/a{suffix}", cache_dir=tmp_path).from_cache
    store.pipe(f"/shop/a{suffix}", packed(long_table(60), suffix))
    changed = prepare_table(f"memory://shop/a{suffix}", cache_dir=tmp_path)
    assert (changed.from_cache, changed.table.num_rows) == (False, 180)


def test_a_directory_of_a_store_is_one_table(store: Any, tmp_path: Path) -> None:
    table = long_table()
    for number in range(3):
        store.pipe(f"/shop/t/{number}.csv", packed(table.slice(50 * number, 50), ".csv"))
    store.pipe("/shop/t/notes.txt", b"no table")
    whole = content(prepare_table(table, cache_dir=tmp_path))
    for source in ("memory://shop/t", "memory://shop/t/*.csv"):
        assert content(prepare_table(source, cache_dir=tmp_path)) == whole


@pytest.fixture(params=["disk", "store"])
def folder(request: Any, store: Any, tmp_path: Path) -> tuple[str, Callable[[str, bytes], Any]]:
    """The place of a directory, and what writes a file into it."""
    if request.param == "store":
        return "memory://shop/t", lambda name, data: store.pipe(f"/shop/t/{name}", data)

    def write(name: str, data: bytes) -> None:
        (tmp_path / "t" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "t" / name).write_bytes(data)

    return str(tmp_path / "t"), write


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_directories_of_keys_are_columns_as_spark_and_duckdb_write_them(
    suffix: str, folder: Any, tmp_path: Path
) -> None:
    place, write = folder
    table = long_table(num_series=2)
    names = ["unique_id", *table.column_names[1:]]
    for number in range(0, 100, 5):  # hive sorts texts: month=10 before month=2
        shop = "K%C3%B6ln" if number < 50 else "7"
        part = packed(table.slice(number, 5).select(names[1:]), suffix)
        write(f"unique_id={shop}/month={1 + number % 50 // 5}/part-0{suffix}", part)
    for hidden in ("._part-0", "_temporary/0/part-0", ".ipynb_checkpoints/part-0"):
        write(f"{hidden}{suffix}", b"no table")
    for other in ("_SUCCESS", "_metadata", f".part-0{suffix}.crc"):
        write(other, b"no table")
    found = prepare_table(place, cache_dir=tmp_path)
    assert found.series == ("7", "Köln")
    wanted = table["y"].to_numpy().reshape(2, 50)[::-1]
    np.testing.assert_array_equal(found.table.values[:, 0].reshape(2, 50), wanted)
    assert any("month" in note for note in found.repairs)
    asked = RoleRequest(past=("month",), ignore=("temp",))
    months = prepare_table(f"{place}/u*/*/*{suffix}", request=asked, cache_dir=tmp_path)
    np.testing.assert_array_equal(months.table.values[:, 1], np.tile(np.arange(50) // 5 + 1, 2))
    one = f"{place}/unique_id=7/month=1/part-0{suffix}"
    assert prepare_table(one, cache_dir=tmp_path).series == ("7",)


def test_days_that_only_directories_name_are_the_time(folder: Any, tmp_path: Path) -> None:
    place, write = folder
    for day in range(1, 31):
        write(f"date=2026-06-{day:02}/a.parquet", packed(pa.table({"y": [day * 0.5]}), ".parquet"))
    found = prepare_table(place, cache_dir=tmp_path)
    assert (found.roles.time, str(found.frequency)) == ("date", "1 day")
    np.testing.assert_array_equal(found.table.values[:, 0], np.arange(1, 31) * 0.5)


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ("_delta_log/0.json", r"Delta or Iceberg, which .*deltalake\.DeltaTable\(.*t.\)"),
        ("metadata/1.metadata.json", r"scan\(\)\.to_arrow\(\) of pyiceberg"),
    ],
)
def test_a_directory_that_keeps_deleted_rows_is_refused(
    beside: str, message: str, folder: Any, tmp_path: Path
) -> None:
    place, write = folder
    write("data/part-0.parquet", packed(long_table(), ".parquet"))
    write(beside, b"{}")
    with pytest.raises(DataError, match=message):
        prepare_table(place, cache_dir=tmp_path)


def test_a_stream_of_arrow_is_read_as_a_file_of_it(tmp_path: Path) -> None:
    table = long_table()
    with ipc.new_stream(tmp_path / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=40)
    found = prepare_table(tmp_path, cache_dir=tmp_path / "cache")
    assert content(found) == content(prepare_table(table, cache_dir=tmp_path / "cache"))


def test_a_file_that_changes_while_it_is_read_is_refused(store: Any, tmp_path: Path) -> None:
    store.pipe("/shop/a.csv", packed(long_table(), ".csv"))

    def changed(*_: Any) -> None:
        store.pipe("/shop/a.csv", packed(long_table(51), ".csv"))

    with pytest.raises(DataError, match=r"memory://shop/a\.csv changed while it was being read"):
        prepare_table("memory://shop/a.csv", cache_dir=tmp_path, on_progress=changed)


def test_the_command_line_reads_and_writes_urls(
    store: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.pipe("/shop/waves.parquet", packed(waves(), ".parquet"))
    run, url = str(tmp_path / "run"), "memory://shop/waves.parquet"
    Forecaster(**QUICK).fit(waves()).save(run)
    assert main(["prepare", url]) == 0
    for out in (str(tmp_path / "one.csv"), "memory://shop/one.csv"):
        assert main(["forecast", run, url, "--out", out]) == 0
    assert store.cat("/shop/one.csv") == (tmp_path / "one.csv").read_bytes()
    for argv, told in (
        (["forecast", run, "memory://shop/gone.csv"], "there is no file memory://shop/gone.csv"),
        (["prepare", "nosuch://a/b.csv"], "nosuch:// cannot be opened"),
        (["forecast", run, "memory://shop/a.txt"], "is a text, expected a table"),
        (["train", "memory://shop/waves.parquet", "--out", "r"], "--horizon is missing"),
    ):
        assert main(argv) == 2
        assert told in capsys.readouterr().err
