"""Tables read in parts: joined they are the cache entry of one process, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv
from pyarrow import parquet as pq

from fastlstm import Forecaster
from fastlstm.cli.main import main
from fastlstm.errors import DataError
from fastlstm.forecast import prepared_parts
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.ingest import TableIngest
from fastlstm.forecast.data.preparation import prepare
from fastlstm.forecast.data.records import CsvRecords
from fastlstm.forecast.prepared_parts import merge_prepared, prepare_part
from fastlstm.runs.parts import Part, PartDirectory
from forecast_server import QUICK, waves
from series_frames import replaced

NUM_FILES = 4


def sales(number: int, **columns: Any) -> pa.Table:
    """Days 5k … 5k + 4 of four shops, in another order in each file, without the day 5k + 2."""
    rng = np.random.default_rng(number)
    shops = rng.permutation(["north", "7", "west", "08"])
    days = np.delete(np.arange(5), 2 if number else []) + 5 * number
    times = days.astype("timedelta64[D]") + np.datetime64("2024-01-01", "us")
    num = len(shops) * len(days)
    units = rng.poisson(9, num).astype(np.float64)
    units[rng.random(num) < 0.2] = np.nan
    found = {
        "unique_id": np.repeat(shops, len(days)),
        "ds": np.tile(times, len(shops)),
        "y": pa.array(units, from_pandas=True),
        "price": rng.normal(size=num),
        **columns,
    }
    return pa.table(found)


def texts(values: Any, form: str) -> pa.Array:
    return pa.array([value.strftime(form) for value in values.to_pylist()])


def times_as(make: Callable[[Any], Any]) -> Callable[[int], pa.Table]:
    def table(number: int) -> pa.Table:
        return sales(number, ds=make(sales(number)["ds"]))

    return table


def empty(number: int) -> pa.Table:
    """The first file has no rows, the next no price."""
    table = sales(number)
    without = table.set_column(3, "price", pa.nulls(len(table), pa.float64()))
    return (table.slice(0, 0), without, table, table)[number]


def named(number: int) -> pa.Table:
    """Names as whole numbers here and with a fraction of zeros there, and columns of names."""
    table = sales(number)
    ids = np.repeat([3, 1, 2, 4] if number % 2 else [4, 3, 2, 1], len(table) // 4)
    ids = ids.astype(np.float64) if number == 2 else ids
    sky = np.array(["sun", "rain", "fog", "NA"])[np.arange(number, number + len(table)) % 4]
    return sales(number, unique_id=ids, sky=sky, floor=ids * 10.0)


TABLES: dict[str, tuple[Callable[[int], pa.Table], dict[str, Any]]] = {
    "gaps split": (sales, {"series": "unique_id"}),
    "gaps filled": (sales, {"gaps": "fill", "target": ("price", "y")}),
    "one after the other": (lambda n: sales(n, unique_id=[f"s{n}"] * len(sales(n))), {
        "disorder": "sort", "duplicates": "first",
    }),
    "far from zero": (lambda n: sales(n, y=1.7e9 + np.arange(len(sales(n)))), {}),
    "whole numbers": (lambda n: sales(n, price=np.arange(len(sales(n))) + n), {
        "missing_value": (3.0,),
    }),
    "names": (named, {"categorical": ("sky",), "static": ("floor",), "past": ("sky",)}),
    "empty files": (empty, {}),
    "times of a format": (times_as(lambda ds: texts(ds, "%d.%m.%Y")), {"time_format": "%d.%m.%Y"}),
    "texts of times": (times_as(lambda ds: texts(ds, "%Y/%m/%d %H:%M")), {}),
    "a time zone": (times_as(lambda ds: ds.cast(pa.timestamp("us", "UTC"))), {}),
    "seconds": (times_as(lambda ds: ds.cast(pa.timestamp("s")).cast(pa.int64())), {
        "time_format": "s",
    }),
    "numbers as times": (times_as(lambda ds: pa.array(np.arange(len(ds)))), {
        "duplicates": "last", "disorder": "sort",
    }),
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def write(folder: str, suffix: str, table: Callable[[int], pa.Table] = sales) -> str:
    Path(folder).mkdir()
    for number in range(NUM_FILES):
        path = Path(folder, f"f{number}{suffix}")
        (csv.write_csv if suffix == ".csv" else pq.write_table)(table(number), path)
    return folder


def entries(cache: str) -> dict[str, bytes]:
    """Returns the files of a cache by name; that of an entry is its key."""
    return {
        str(path.relative_to(cache)): path.read_bytes()
        for path in Path(cache, "series", "entries").rglob("*")
        if path.is_file()
    }


def merged(table: Any, count: int, options: dict[str, Any], cache: str = "merged") -> Any:
    """Prepares a table in parts, the last one first."""
    config = ForecastConfig(**options)
    for number in reversed(range(count)):
        assert prepare_part(table, config, Part(number, count), f"parts-{cache}") is not None
    parts = PartDirectory(f"parts-{cache}")
    return merge_prepared(parts, parts.collect(), cache)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("kind", TABLES)
def test_the_entry_is_that_of_one_process(
    kind: str, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nine parts of four files some are empty."""
    counts = (1, 3, 9) if "gaps" in kind else (3,)
    make, options = TABLES[kind]
    table = write("sales", suffix, make)
    one = prepare(table, ForecastConfig(**options, cache_dir="one"))
    for count in counts:
        dataset = merged(table, count, options, f"merged-{count}")
        assert (dataset.key, dataset.from_cache) == (one.key, False)
        assert entries(f"merged-{count}") == entries("one")
    monkeypatch.setattr(TableIngest, "run", None)
    assert prepare(table, ForecastConfig(**options, cache_dir="merged-3")).from_cache


def test_merge_does_not_parse_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    table = write("sales", ".csv")
    config = ForecastConfig()
    for number in range(2):
        prepare_part(table, config, Part(number, 2), "parts")
    monkeypatch.setattr(CsvRecords, "_open", None)
    parts = PartDirectory("parts")
    assert merge_prepared(parts, parts.collect(), "merged").table.num_rows == 68


def test_files_that_the_whole_table_reads_otherwise_are_read_again() -> None:
    """The columns of the first file have no type; only the second shows that 1 is a time."""
    tables = [
        sales(0, ds=pa.nulls(20)).slice(0, 0),
        sales(1, ds=texts(sales(1)["ds"], "%Y-%m-%d %H:%M")),
        sales(2, ds=texts(sales(2)["ds"], "%Y-%m-%d")),
        sales(3, ds=texts(sales(3)["ds"], "%Y-%m-%d")),
    ]
    table = write("sales", ".csv", lambda number: tables[number])
    prepare(table, ForecastConfig(cache_dir="one"))
    merged(table, 4, {})
    assert entries("merged") == entries("one")
    kinds = [part.facts["columns"].get("ds") for part in PartDirectory("parts-merged").collect()]
    assert len(set(kinds)) > 1


def test_files_may_be_of_several_kinds() -> None:
    """A part of CSV files reads names as texts; of a table with others they are numbers."""
    Path("sales").mkdir()
    for number in range(NUM_FILES):
        path = Path("sales", f"f{number}{'.parquet' if number % 2 else '.csv'}")
        (pq.write_table if number % 2 else csv.write_csv)(named(1), path)
    options = {"disorder": "sort", "duplicates": "last", "gaps": "fill"}
    prepare("sales", ForecastConfig(**options, cache_dir="one"))
    merged("sales", 4, options)
    assert entries("merged") == entries("one")


@pytest.mark.parametrize(
    ("column", "row", "value"),
    [("y", 6, "many"), ("ds", 6, "soon"), ("price", 3, "inf"), ("unique_id", 4, None)],
)
def test_a_bad_value_is_told_by_its_part(column: str, row: int, value: Any) -> None:
    """With its file, and its row there, where one process may count the rows of all files."""
    bad = replaced(sales(2), column, row, value)
    table = write("sales", ".csv", lambda n: bad if n == 2 else sales(n))
    with pytest.raises(DataError) as one:
        prepare(table, ForecastConfig(cache_dir="one"))
    with pytest.raises(DataError) as found:
        prepare_part(table, ForecastConfig(), Part(2, 4), "parts")
    in_all = f"row {20 + 16 + row + 1}"
    told = str(one.value).replace("f0.csv and 3 more", "f2.csv").replace(in_all, f"row {row + 1}")
    assert str(found.value) == told
    assert not list(Path("parts").glob("*"))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda n: sales(n % 2), "has the same time as the row"),
        (lambda n: sales(3 - n), "is earlier than the row before"),
        (lambda n: sales(n, size=[n] * len(sales(n))), "changes within series"),
        (lambda n: sales(n, y=np.where(np.arange(len(sales(n))) % 9, 2.5, -999)), "looks like a"),
        (lambda n: sales(n, ds=pa.array(20240101 + n + np.arange(len(sales(n))))), "look like da"),
        (lambda n: sales(n).slice(0, 0), "no rows"),
        (lambda n: sales(n) if n else sales(n).drop(["price"]), "differ in the columns price"),
    ],
)
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_what_needs_all_rows_is_told_when_they_are_joined(
    make: Callable[[int], pa.Table], told: str, suffix: str
) -> None:
    options = {
        "has the same time as the row": {"disorder": "sort"},
        "changes within series": {"static": ("size",)},
    }.get(told, {})
    table = str(Path(write("sales", suffix, make)).absolute())
    with pytest.raises(DataError, match=told) as one:
        prepare(table, ForecastConfig(**options, cache_dir="one"))
    with pytest.raises(DataError) as found:
        merged(table, 4, options)
    assert not Path("merged").exists() or not entries("merged")
    # The part of each file compares its columns with those of the first.
    assert str(found.value).replace("f3", "f1") == str(one.value)


def shard(part: str, *more: str, out: str = "parts", table: str = "sales") -> int:
    return main(["prepare", table, "--out", out, "--shard", part, *more])


def test_training_finds_the_joined_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command line, and with another directory than that of the parts to start in."""
    Path("waves").mkdir()
    for number in range(3):
        pq.write_table(waves().slice(120 * number, 120), f"waves/{number}.parquet")
    for number in range(3):
        assert shard(f"{number}/3", table="waves") == 0
    monkeypatch.chdir(Path("waves"))
    capsys.readouterr()
    assert main(["merge", "../parts", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    monkeypatch.chdir("..")
    monkeypatch.setattr(TableIngest, "run", None)
    assert main(["prepare", "waves", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    differing = {name for name in told if told[name] != again[name]}
    assert (differing, again["from_cache"]) == ({"seconds", "from_cache"}, True)
    Forecaster(**QUICK).fit("waves")


def test_changed_and_missing_parts_are_named_and_made_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write("sales", ".csv")
    for part in ("0/3", "2/3"):
        assert shard(part) == 0
    assert main(["merge", "parts"]) == 2
    assert "parts lacks 1 part of 3: 1; start them again" in capsys.readouterr().err
    assert shard("1/3") == 0
    csv.write_csv(sales(3).slice(0, 12), "sales/f3.csv")
    assert main(["merge", "parts"]) == 2
    path = Path("sales/f3.csv").absolute()
    told = f"parts: 1 file changed since the parts were computed ({path}); start again part 2 with"
    assert f"{told} the same --shard 2/3" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(CsvRecords, "_read_schema", None)
        assert shard("1/3") == 0
    assert "parts: part 1/3 is there already" in capsys.readouterr().out
    assert shard("2/3") == 0
    assert "is there already" not in capsys.readouterr().out
    assert main(["merge", "parts", "--cache-dir", "merged"]) == 0
    prepare("sales", ForecastConfig(cache_dir="one"))
    assert entries("merged") == entries("one")
    cut = Path("parts/part-00001-of-00003.batches")
    cut.write_bytes(cut.read_bytes()[:-9])
    assert main(["merge", "parts"]) == 1
    assert "part 1 of 3 is damaged; compute it again with --shard 1/3" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["table", "options", "version", "command"])
def test_parts_of_something_else_are_refused(
    what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write("sales", ".parquet")
    assert shard("0/2") == 0
    more: list[str] = []
    if what == "table":
        pq.write_table(sales(4), "sales/f4.parquet")
        assert shard("1/2", out="others") == 0
    elif what == "options":
        more = ["--dtype", "float16"]
    elif what == "version":
        monkeypatch.setattr(prepared_parts.fastlstm, "__version__", "99")
    else:
        work = prepared_parts._work
        changed = lambda *given: {**work(*given), "command": "forecast"}  # noqa: E731
        monkeypatch.setattr(prepared_parts, "_work", changed)
    assert shard("1/2", *more) == 2
    shown = capsys.readouterr().err
    assert f"part-00000-of-00002 was made of another {what}; give another --out" in shown


def test_files_that_came_later_and_other_versions_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write("sales", ".parquet")
    assert shard("0/1") == 0
    with monkeypatch.context() as patch:
        patch.setattr(prepared_parts.fastlstm, "__version__", "99")
        assert main(["merge", "parts"]) == 2
    assert "this is 99; join them with that version" in capsys.readouterr().err
    pq.write_table(sales(4), "sales/f4.parquet")
    assert main(["merge", "parts"]) == 2
    shown = capsys.readouterr().err
    assert "parts: the table has 5 files now, its parts have 4 (the first that differs: /" in shown
    assert "f4.parquet); compute the parts again" in shown


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["prepare", "sales", "--out", "p"], "--out is the directory of parts; give --shard I/N"),
        (["prepare", "sales", "--shard", "0/2"], "--shard needs --out DIR"),
        (["prepare", "sales", "--shard", "2/2", "--out", "p"], "--shard 2/2 is out of range"),
        (["prepare", "sales", "--shard", "0/2", "--out", "p", "--json"], "leave it out here"),
        (["prepare", "sales", "--shard", "0/2", "--out", "p", "--target", "z"], "f0.csv and 3 mo"),
        (
            ["merge", "parts", "--out", "a.csv"],
            "has parts of a table, for the cache; leave out --out",
        ),
    ],
)
def test_other_requests_are_refused(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write("sales", ".csv")
    assert shard("0/1") == 0
    assert main(argv) == 2
    assert told in capsys.readouterr().err
    assert not Path("p").exists() or not list(Path("p").iterdir())


def test_a_frame_has_no_parts() -> None:
    with pytest.raises(DataError, match="got a Table, expected files"):
        prepare_part(sales(0), ForecastConfig(), Part(0, 1), "parts")


def test_tables_and_parts_may_be_in_a_store() -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.store.clear()
    write("sales", ".parquet")
    for path in Path("sales").iterdir():
        memory.pipe(f"/shop/{path.name}", path.read_bytes())
    config, table = ForecastConfig(), "memory://shop"
    for number in range(2):
        assert prepare_part(table, config, Part(number, 2), "memory://parts") is not None
        assert prepare_part(table, config, Part(number, 2), "memory://parts") is None
    parts = PartDirectory("memory://parts")
    merge_prepared(parts, parts.collect(), "merged")
    prepare(table, ForecastConfig(cache_dir="one"))
    assert entries("merged") == entries("one")
    memory.store.clear()
