"""Tables of every kind become the same mapped rows; what is wrong with them is said."""

from __future__ import annotations

import datetime
import gzip
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, feather
from pyarrow import parquet as pq

from fastlstm.errors import DataError
from fastlstm.forecast.config import ReadOptions
from fastlstm.forecast.data.dataset import SeriesDataset, prepare_table
from fastlstm.forecast.data.roles import RoleRequest
from fastlstm.forecast.data.timeline import Frequency, show_time
from series_frames import START, long_table, prepared, replaced

START_S = np.datetime64(START, "s")
REGIONS = ["north", "south", "north"]
ENTRY = ["origins.npy", "schema.json", "segments.npy", "series.json", "sums.json", "values.bin"]
ASKED = RoleRequest(static=("region",), categorical=("region", "kind"), future=("kind",))


def full_table() -> pa.Table:
    kinds = np.array(["work", "rest"])[np.arange(150) % 7 // 5]
    return long_table(region=np.repeat(REGIONS, 50), kind=kinds)


def same_rows(a: SeriesDataset, b: SeriesDataset) -> bool:
    order = [a.series.index(name) for name in b.series]
    first = a.table.values.reshape(len(a.series), -1, a.table.values.shape[1])
    second = b.table.values.reshape(len(b.series), -1, b.table.values.shape[1])
    return np.array_equal(first[order], second, equal_nan=True)


@pytest.fixture
def entry(tmp_path: Path) -> tuple[Callable[[], SeriesDataset], Path]:
    """What reads a file again, and its entry in the cache."""
    pq.write_table(full_table(), tmp_path / "a.parquet")

    def read() -> SeriesDataset:
        return prepare_table(tmp_path / "a.parquet", request=ASKED, cache_dir=tmp_path)

    return read, tmp_path / "series" / "entries" / read().key


def test_a_long_table() -> None:
    table = full_table()
    found = prepared(table, roles=ASKED)
    assert found.roles.target == ("y",)
    assert found.roles.past == ("temp",)
    assert found.table.columns == ("y", "temp", "kind")
    assert found.series == ("s0", "s1", "s2")
    assert found.frequency == Frequency(3_600_000_000)
    assert found.categories == {"region": ["north", "south"], "kind": ["work", "rest"]}
    assert found.statics["region"].tolist() == [0, 1, 0]
    np.testing.assert_array_equal(found.table.values[:, 0], table["y"].to_numpy())
    np.testing.assert_array_equal(found.table.values[:, 2], np.arange(150) % 7 // 5)
    assert found.table.segments.num_rows.tolist() == [50, 50, 50]
    assert [show_time(t) for t in found.table.segments.start_times] == ["2020-01-01"] * 3
    assert "150 rows, 3 series, one row every 1 hour" in found.notes


def test_a_wide_table_forecasts_every_number() -> None:
    hours = np.arange(20).astype("timedelta64[h]") + np.datetime64(START, "us")
    table = pa.table({"date": hours, "a": np.arange(20.0) / 3, "b": np.ones(20) * np.arange(20)})
    found = prepared(table)
    assert found.roles.target == ("a", "b")
    assert found.series == ("",)
    assert "target: all numbers, a, b" in found.notes


def test_directories_and_lists_are_one_table(tmp_path: Path) -> None:
    table = full_table()
    for number in range(3):
        pq.write_table(table.slice(number * 50, 50), tmp_path / f"part-{number}.parquet")
    wanted = prepared(table, roles=ASKED)
    for source in (tmp_path, sorted(tmp_path.glob("*.parquet"))):
        np.testing.assert_array_equal(
            prepared(source, roles=ASKED).table.values, wanted.table.values
        )


def test_frames_of_pandas_and_polars() -> None:
    table = full_table()
    wanted = prepared(table, roles=ASKED)
    pandas = pytest.importorskip("pandas")
    frame = table.to_pandas()
    assert same_rows(wanted, prepared(frame, roles=ASKED))
    by_time = frame.set_index(pandas.DatetimeIndex(frame.pop("ds"), name=None))
    assert same_rows(wanted, prepared(by_time, roles=ASKED))
    shuffled = frame.assign(ds=table["ds"].to_pandas()).sort_values(["unique_id", "ds"])
    assert same_rows(wanted, prepared(shuffled.set_index(["unique_id", "ds"]), roles=ASKED))
    polars = pytest.importorskip("polars")
    frame = polars.from_arrow(table)
    categorical = frame.with_columns(polars.col("kind").cast(polars.Categorical))
    assert same_rows(wanted, prepared(frame, roles=ASKED))
    assert same_rows(wanted, prepared(categorical, roles=ASKED))


def test_rows_by_time_are_stored_by_series() -> None:
    table = full_table()
    mixed = table.sort_by([("ds", "ascending"), ("unique_id", "descending")])
    found = prepared(mixed, roles=ASKED)
    assert found.series == ("s2", "s1", "s0")
    assert same_rows(prepared(table, roles=ASKED), found)
    assert any("rows of different series were interleaved" in note for note in found.notes)


def test_what_came_from_a_file_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(long_table(), path)
    first, second = prepared(path), prepared(path)
    assert not first.from_cache
    assert second.from_cache
    assert first.notes == second.notes
    np.testing.assert_array_equal(first.table.values, second.table.values)
    pq.write_table(long_table(num_rows=60), path)
    assert prepared(path).table.num_rows == 180
    assert not prepared(path, snap="1h").from_cache


def test_a_file_of_the_same_size_and_time_is_read_when_it_was_written_to(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("ds,y\n1,1.5\n2,2.5\n")
    prepared(path)
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_text("ds,y\n1,1.5\n2,7.5\n")
    os.utime(path, ns=times)
    assert prepared(path).table.rows(0, 2)[1, 0] == 7.5


@pytest.mark.parametrize("name", ENTRY)
@pytest.mark.parametrize("change", ["cut", "empty", "flipped"])
def test_a_damaged_entry_is_made_again(name: str, change: str, entry: Any) -> None:
    read, folder = entry
    content = (folder / name).read_bytes()
    flipped = bytes([*content[:-9], content[-9] ^ 1, *content[-8:]])
    changed = {"cut": content[:-4], "empty": b"", "flipped": flipped}[change]
    (folder / name).write_bytes(changed)
    again = read()
    assert not again.from_cache
    assert again.table.segments.first_rows.tolist() == [0, 50, 100]


def test_a_frame_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    found = prepare_table(long_table(), cache_dir=tmp_path)
    assert list((tmp_path / "series" / "entries").iterdir()) == []
    assert list((tmp_path / "series").glob("work-*")) == []
    assert float(found.table.values[149, 0]) == long_table()["y"][149].as_py()


def test_disorder_is_refused_or_sorted() -> None:
    table = long_table()
    order = np.r_[0:60, 61, 60, 62:150]
    with pytest.raises(DataError, match=r"series 's1': row 62, 2020-01-01 10:00:00, is earlier"):
        prepared(table.take(order))
    found = prepared(table.take(order), disorder="sort")
    np.testing.assert_array_equal(found.table.values, prepared(table).table.values)
    assert "2 rows out of order: sorted by time" in found.notes


def test_several_series_without_a_column_that_tells_them_apart_are_named_as_the_cause() -> None:
    table = long_table()
    hint = r"; each shop has its own times: give `series='shop'`"
    shops = table.rename_columns(
        ["shop" if name == "unique_id" else name for name in table.column_names]
    )
    with pytest.raises(DataError, match=r"is earlier than the row before" + hint + "; if they"):
        prepared(shops)
    by_time = shops.take(np.argsort(shops["ds"].to_numpy(), kind="stable"))
    with pytest.raises(DataError, match=r"has the same time as the row before" + hint + "$"):
        prepared(by_time)
    with pytest.raises(DataError, match="is earlier than the row before; correct it, or give `dis"):
        prepared(table.take(np.r_[0:60, 61, 60, 62:150]))


@pytest.mark.parametrize(("kept", "value"), [("first", 10), ("last", 100)])
def test_duplicates_are_refused_or_one_counts(kept: Any, value: float) -> None:
    table = long_table(y=np.arange(150, dtype=np.float32))
    doubled = replaced(table.take(np.r_[0:11, 10:150]), "y", 11, 100.0)
    with pytest.raises(DataError, match=r"series 's0': row 12, .* has the same time as the row be"):
        prepared(doubled)
    found = prepared(doubled, duplicates=kept)
    wanted = np.arange(150.0)
    wanted[10] = value
    np.testing.assert_array_equal(found.table.values[:, 0], wanted)
    assert f"duplicate timestamps: kept the {kept}, dropped 1 row" in found.notes


@pytest.mark.parametrize("kept", ["first", "last"])
def test_after_rows_were_dropped_a_row_has_the_number_of_the_file(kept: Any) -> None:
    table = long_table(temp=None)
    for row in (47, 48, 49, 98, 99):  # the ends of the first two series
        table = replaced(table, "y", row, None)
    off = replaced(table, "ds", 120, START.replace(hour=20, minute=7))
    with pytest.raises(DataError, match=r"series 's2': row 121, .* is not a whole number of steps"):
        prepared(off)
    doubled = off.take(np.r_[0:10, 9, 10:60, 59, 59, 59, 60:130, 129, 130:150])
    with pytest.raises(DataError, match=r"series 's2': row 125, .* is not a whole number of steps"):
        prepared(doubled, duplicates=kept)
    swapped = off.take(np.r_[1, 0, 2:150])
    with pytest.raises(DataError, match=r"series 's2': the row of 2020-01-01 20:07:00 is not a"):
        prepared(swapped, disorder="sort")


def test_gaps_split_or_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastlstm.forecast.data.arrange._BLOCK_ROWS", 13)
    table = long_table()
    with_gaps = table.take(np.r_[0:20, 23:60, 61:149])
    found = prepared(with_gaps, gaps="split")
    assert found.table.segments.series.tolist() == [0, 0, 1, 1, 2]
    assert found.table.segments.num_rows.tolist() == [20, 27, 10, 39, 49]
    assert "2 gaps in time: windows do not cross them" in found.notes
    filled = prepared(with_gaps, gaps="fill")
    assert filled.table.segments.num_rows.tolist() == [50, 50, 49]
    wanted = prepared(table).table.values[:149].copy()
    wanted[[20, 21, 22, 60]] = np.nan
    np.testing.assert_array_equal(filled.table.values, wanted)
    assert "2 gaps in time: filled with 4 empty rows" in filled.repairs
    chosen = prepared(with_gaps)
    np.testing.assert_array_equal(chosen.table.values, wanted)
    note = "2 gaps in time: filled with 4 empty rows; `gaps='split'` cuts there"
    assert note in chosen.repairs


@pytest.mark.parametrize(("missing", "is_filled"), [(20, True), (100, False)])
def test_a_gap_as_long_as_the_validation_part_is_not_filled(missing: int, is_filled: bool) -> None:
    rows = [row for row in range(1000) if not 700 <= row < 700 + missing]
    found = prepared(long_table(1000, 1).take(rows))
    assert found.table.num_rows == (1000 if is_filled else 1000 - missing)


@pytest.mark.parametrize(("kept", "is_filled"), [(6, True), (2, False)])
def test_gaps_are_filled_by_default_up_to_a_quarter_of_the_rows(kept: int, is_filled: bool) -> None:
    """A shop is closed on Sundays; a sensor that is off most days is not filled."""
    days = [day for day in range(700) if day % 7 < kept or (kept == 2 and day % 70 < 30)]
    found = prepared(long_table(700, 1).take(days))
    assert found.table.num_rows == (699 if is_filled else len(days))


def test_a_time_zone_is_kept_and_times_without_a_clock_are_counted() -> None:
    table = long_table()
    zoned = table.set_column(1, "ds", table["ds"].cast(pa.timestamp("us", "Europe/Berlin")))
    assert prepared(zoned).time_zone == "Europe/Berlin"
    counted = prepared(table.set_column(1, "ds", pa.array(np.tile(np.arange(50), 3))))
    assert str(counted.frequency) == "rows"
    assert not counted.has_clock


def test_the_smallest_safe_dtype() -> None:
    whole = np.tile(np.arange(50.0), 3)
    found = prepared(long_table(y=whole, temp=None))
    assert found.table.values.dtype == np.int16
    np.testing.assert_array_equal(found.table.rows(0, 150)[:, 0], whole)
    assert prepared(long_table(y=whole * 1000, temp=None)).table.values.dtype == np.float32
    assert prepared(long_table(y=whole + 0.5, temp=None)).table.values.dtype == np.float32


BAD: list[tuple[str, Callable[[], Any], dict[str, Any], str]] = [
    ("no target", lambda: long_table(y=None, load=list(range(150))), {},
     "no column 'y' to forecast; name one with `target`, such as `target='load'`"),
    ("no numbers", lambda: pa.table({"ds": ["2020-01-01"], "a": ["1,5"]}), {},
     r"no column of numbers to forecast \(its columns: ds, a\): numbers are digits with"),
    ("decimal commas", lambda: pa.table({"ds": ["2020-01-01"], "y": ["-1,5"]}), {},
     "'y' has the text '-1,5' in row 1, expected numbers with a decimal point, not a comma;"),
    ("misspelt", lambda: long_table(), {"roles": RoleRequest(target=("tmp",))},
     r"no column 'tmp' \(given as target\) \(did you mean 'temp'\?\)"),
    ("two roles", lambda: long_table(),
     {"roles": RoleRequest(target=("y",), past=("temp",), future=("temp",))},
     "'temp' cannot be both past and future"),
    ("a target of names", lambda: long_table(),
     {"roles": RoleRequest(target=("y",), categorical=("y",))}, "is categorical and target"),
    ("names left out", lambda: long_table(sky=["a"] * 150),
     {"roles": RoleRequest(past=(), categorical=("sky",), ignore=("sky",))}, "and left out"),
    ("one name twice", lambda: pa.table([[1.5], [2.5]], ["y", "y"]), {}, "columns called 'y'"),
    ("step", lambda: pa.table({"step": [0.5, 1.5]}), {}, "target name 'step' is reserved"),
    ("text", lambda: replaced(long_table(), "y", 60, "lots"),
     {"roles": RoleRequest(target=("y",))},
     r"column 'y' has the text 'lots' in row 61, expected numbers"),
    ("infinite", lambda: replaced(long_table(), "temp", 33, float("inf")), {},
     "column 'temp' is infinite, or beyond float32, in row 34"),
    ("beyond float32", lambda: long_table(temp=np.full(150, 1e300)), {},
     "column 'temp' is infinite, or beyond float32, in row 1"),
    ("empty column", lambda: long_table(temp=np.full(150, np.nan)), {},
     "column 'temp' has no values"),
    ("no series", lambda: replaced(long_table(), "unique_id", 9, None), {}, "row 10 has no series"),
    ("no time", lambda: replaced(long_table(), "ds", 9, None), {}, "row 10 has no time"),
    ("reserved", lambda: long_table(cutoff=np.arange(150.0)), {},
     "the column name 'cutoff' is reserved for tables of forecasts"),
    ("static that changes", lambda: long_table(region=np.arange(150.0)),
     {"roles": RoleRequest(static=("region",))},
     "static column 'region' changes within series 's0', in row 2"),
    ("no step", lambda: long_table(ds=np.cumsum(np.arange(150) ** 2 + 1)), {},
     "the times have no regular frequency"),
    ("two frequencies",
     lambda: long_table(ds=np.r_[0:100, 0:500:10] * np.timedelta64(3600, "s") + START_S),
     {}, "series 's2' does not have the frequency of the others, 1 hour"),
    ("off the grid",
     lambda: replaced(long_table(), "ds", 120, START.replace(hour=20, minute=7)), {},
     r"is not a whole number of steps \(1 hour\) after the row before"),
    ("no rows", lambda: long_table().slice(0, 0), {}, "has column names but no rows"),
    ("lists", lambda: pa.table({"y": [[1.0], [2.0]]}), {}, "'y' is list<.*, expected numbers"),
    ("a dictionary", lambda: {"y": [1]}, {}, "got a dict, expected a path"),
    ("three axes", lambda: np.zeros((2, 2, 2)), {}, r"shape \(2, 2, 2\)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "options", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD]
)
def test_what_cannot_be_used_is_refused(
    make: Callable[[], Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        prepared(make(), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.parquet", "a.feather", "a.csv.gz", "a.npy"])
def test_a_file_cut_in_half_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    table = long_table(num_rows=5000)
    if name.endswith(".parquet"):
        pq.write_table(table, path)
    elif name.endswith(".feather"):
        feather.write_feather(table, path)
    elif name.endswith(".gz"):
        csv.write_csv(table, tmp_path / "a.csv")
        path.write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    else:
        np.save(path, np.random.default_rng(0).normal(size=(5000, 2)))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=rf"{name} cannot be read \(.*\); is it complete\?"):
        prepared(path)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_csv_line_with_too_many_columns_is_named(
    threads: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(partial(pa.set_cpu_count, pa.cpu_count()))
    pa.set_cpu_count(threads)
    path = tmp_path / "a.csv"
    path.write_text("ds,y\n1,2.5\n2,3.5,9\n3,1\n")
    with pytest.raises(DataError, match=r"line 3 has 3 columns, expected 2: '2,3.5,9'"):
        prepared(path)


def test_nothing_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        prepared(tmp_path / "none.csv")
    with pytest.raises(DataError, match="has no table"):
        prepared(tmp_path)
    (tmp_path / "a.xlsx").write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.xlsx is not a table; expected a name ending in \.csv"):
        prepared(tmp_path / "a.xlsx")
    with pytest.raises(
        DataError, match=r"pandas\.read_excel\('.*a\.xlsx'\)\.to_parquet\('.*a\.parq"
    ):
        prepared(tmp_path / "a.xlsx")
    for name, reader in (
        ("a.csv.xz", "csv"),
        ("a.pkl", "pickle"),
        ("a.h5", "hdf"),
    ):
        (tmp_path / name).touch()
        with pytest.raises(DataError, match=rf"for example by pandas\.read_{reader}\("):
            prepared(tmp_path / name)
    (tmp_path / "b.csv").write_bytes(b"")
    with pytest.raises(DataError, match=r"b\.csv is empty"):
        prepared(tmp_path / "b.csv")


def test_an_entry_is_plain_data(entry: Any) -> None:
    _, folder = entry
    assert sorted(path.name for path in folder.iterdir()) == ENTRY
    assert json.loads((folder / "series.json").read_text())["series"] == ["s0", "s1", "s2"]


def test_what_is_ignored_or_has_a_role_is_neither_time_nor_series() -> None:
    found = prepared(long_table(num_series=1), roles=RoleRequest(ignore=("ds", "unique_id")))
    assert (found.roles.time, found.roles.series) == (None, None)
    table = long_table(num_series=1).rename_columns(["unique_id", "ds", "time", "temp"])
    assert prepared(table, roles=RoleRequest(target=("time",))).roles.time == "ds"
    table = long_table(num_series=1, ds=None, t1=long_table(num_series=1)["ds"])
    assert prepared(table).roles.time == "t1"
    with pytest.raises(DataError, match=r"several columns of times: t1, t2; .*`time='t1'`"):
        prepared(table.append_column("t2", table["t1"]))


@pytest.mark.parametrize(
    ("text", "values"),
    [("y\n1\n\n3\n", [1, np.nan, 3]), ("ds,y\n1,true\n2,false\n3,true\n", [1, 0, 1])],
    ids=["an empty line is a missing value", "true and false are numbers"],
)
def test_cells_of_a_csv(text: str, values: list[float], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text)
    np.testing.assert_array_equal(prepared(tmp_path / "a.csv").table.rows(0, 3)[:, 0], values)


def test_a_frame_that_is_no_table_is_refused_in_one_line() -> None:
    pandas = pytest.importorskip("pandas")
    double = pandas.DataFrame([[1, 2], [3, 4]], columns=["y", "y"])
    mixed = pandas.DataFrame({"y": [1, "a", None, 2.5]})
    for frame in (double, mixed):
        with pytest.raises(DataError, match="DataFrame") as caught:
            prepared(frame)
        assert "\n" not in str(caught.value)


def test_names_that_json_does_not_know_are_written_out() -> None:
    days = [datetime.date(2020, 1, 1 + k % 2) for k in range(150)]
    found = prepared(long_table(day=pa.array(days)), roles=RoleRequest(categorical=("day",)))
    assert found.categories == {"day": ["2020-01-01", "2020-01-02"]}


def test_numbers_beyond_float32_are_told() -> None:
    found = prepared(long_table(y=np.arange(150) * 2.0**24))
    told = "column 'y' ranges from 0 to 2.49981e+09: float32 keeps seven digits and loses"
    assert any(note.startswith(told) for note in found.notes)
    assert not any("digits" in note for note in prepared(long_table()).notes)


def test_a_column_that_counts_rows_is_no_feature(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(",ds,y\n0,1,1.5\n1,2,2.5\n2,3,3.5\n")
    found = prepared(path)
    assert found.table.columns == ("y",)
    assert "ignored columns (row counters): ''" in found.notes
    assert not found.repairs


def test_columns_without_a_role_are_a_repair_to_be_warned_of() -> None:
    found = prepared(long_table(note=["x"] * 150, other=["y"] * 150))
    told = "ignored columns (not numbers and without a role): note, other"
    assert told in found.repairs
    assert told in found.notes
    assert not prepared(long_table(note=["x"] * 150), roles=RoleRequest(ignore=("note",))).repairs


def test_hours_of_a_zone_are_no_days_though_the_first_batch_shows_one_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the order of time, over the night in which the clocks go back an hour."""
    monkeypatch.setattr("fastlstm.forecast.data.records._BATCH_ROWS", 2)
    hours = np.arange(40).astype("timedelta64[h]") + np.datetime64("2020-10-24T00", "us")
    ds = pa.array(np.repeat(hours, 2)).cast(pa.timestamp("us", "Europe/Berlin"))
    y = np.arange(80) / 7
    found = prepared(pa.table({"unique_id": ["a", "b"] * 40, "ds": ds, "y": y}))
    assert not found.is_wall
    assert len(found.table.segments) == 2


@pytest.mark.parametrize(("lost", "zone"), [(50, "Europe/Berlin"), (49, "Europe/London")])
def test_an_hour_that_clocks_skip_in_spring_is_no_gap_in_their_zone(lost: int, zone: str) -> None:
    hours = np.delete(np.arange(100), lost)
    times = np.datetime64("2024-03-29", "us") + hours.astype("timedelta64[h]")
    table = pa.table({"ds": pa.array(times, pa.timestamp("us")), "y": np.sin(hours)})
    for options, num_gaps in ((ReadOptions(), 1), (ReadOptions(tz=zone), 0)):
        notes = prepare_table(table, options).notes
        assert sum("in time: filled" in note for note in notes) == num_gaps
