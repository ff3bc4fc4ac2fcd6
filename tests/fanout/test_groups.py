"""The groups of a table: names of directories, and the rows that each gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, ipc
from pyarrow import parquet as pq

from fastlstm.errors import DataError
from fastlstm.fanout import groups as groups_module
from fastlstm.fanout.groups import GroupedTable, directory_names
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.opening import open_records
from odd_names import NAMES
from series_frames import long_table

ODD = [
    "../x",
    "a/b",
    "",
    ".",
    "..",
    "ü",
    "é" * 300,
    "a\0b",
    "fanout.json",
    "CON",
    "a~b",
    " a",
    "-rf",
]


def test_names_of_directories_are_plain_and_never_the_same() -> None:
    names = list(dict.fromkeys(["berlin", "Rom", "rom", *ODD, *NAMES]))
    found = directory_names(names)
    assert found[0] == "berlin"
    assert len({name.lower() for name in found}) == len(names)
    for name in found:
        assert 0 < len(name) <= 60
        assert set(name) <= set(
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.~-"
        )
        assert name[0] not in ".-"
        assert name.lower() != "fanout.json"
    assert directory_names(names) == found


def table_of(names: list[Any]) -> pa.Table:
    """Returns three rows of every name, mixed."""
    rows = pa.table(
        {"store": names * 3, "ds": list(range(3 * len(names))), "y": np.random.rand(3 * len(names))}
    )
    return rows


def write_csv(table: pa.Table, path: Path) -> None:
    csv.write_csv(table, path, csv.WriteOptions(delimiter=";"))


def write_arrow(table: pa.Table, path: Path) -> None:
    with ipc.new_file(path, table.schema) as file:
        file.write_table(table)


KINDS = {"csv": write_csv, "parquet": pq.write_table, "arrow": write_arrow}


def read_back(path: Path) -> pa.Table:
    records = open_records(path)
    kinds = {field.name: field.type for field in records.schema}
    return pa.Table.from_batches(records.batches(kinds))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("held", [1 << 28, 1], ids=["at-once", "in-parts"])
def test_a_group_has_its_rows_in_order_without_the_column(
    kind: str, held: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups_module, "_HELD_BYTES", held)
    table = table_of(["007", "b,;b", 'say "no"', "NA"])
    parts = [table.slice(0, 5), table.slice(5)]
    for number, part in enumerate(parts):
        KINDS[kind](part, tmp_path / f"{number}.{kind}")
    grouped = GroupedTable(open_records(tmp_path), "store", ForecastConfig())
    groups = grouped.groups()
    assert [(group.name, group.rows) for group in groups] == [
        ("007", 3), ("b,;b", 3), ('say "no"', 3), ("NA", 3),
    ]  # fmt: skip
    grouped.write(tmp_path / "out", groups)
    for number, group in enumerate(groups):
        found = read_back(tmp_path / "out" / group.directory)
        assert found.column_names == ["ds", "y"]
        assert found["ds"].to_pylist() == [number, number + 4, number + 8]
        assert found["y"].to_pylist() == table["y"].to_pylist()[number::4]


def test_numbers_are_one_name_in_any_spelling(tmp_path: Path) -> None:
    pq.write_table(table_of([7.0, 8.5]), tmp_path / "t.parquet")
    grouped = GroupedTable(open_records(tmp_path), "store", ForecastConfig())
    assert [group.directory for group in grouped.groups()] == ["7", "8.5"]


@pytest.mark.parametrize(
    ("options", "is_kept"),
    [({}, True), ({"series": "city"}, False), ({"series": "city", "static": "unique_id"}, True)],
)
def test_the_column_stays_where_it_has_a_role(
    options: dict[str, Any], is_kept: bool, tmp_path: Path
) -> None:
    table = long_table(4, city=["a", "b"] * 6)
    pq.write_table(table, tmp_path / "t.parquet")
    config = ForecastConfig(
        target=("y",), categorical=("unique_id",) * ("static" in options), **options
    )
    grouped = GroupedTable(open_records(tmp_path), "unique_id", config)
    grouped.write(tmp_path / "out", grouped.groups())
    assert ("unique_id" in read_back(tmp_path / "out" / "s1").column_names) is is_kept


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("stor", r"no column 'stor' \(given as --by\) \(did you mean 'store'\?\)"),
        ("ds", "column 'ds' is the time"),
        ("y", "column 'y' is a target"),
        ("store", "row 2 has no value in 'store'"),
    ],
)
def test_a_column_that_cannot_group_is_refused(by: str, message: str, tmp_path: Path) -> None:
    table = pa.table({"store": ["a", None, "b"], "ds": [1, 2, 3], "y": [1.0, 2.0, 3.0]})
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(DataError, match=message):
        GroupedTable(open_records(tmp_path), by, ForecastConfig(target=("y",))).groups()
