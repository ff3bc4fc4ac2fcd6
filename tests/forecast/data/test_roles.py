from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fastlstm.errors import DataError
from fastlstm.forecast.data.dataset import prepare_table
from fastlstm.forecast.data.problems import Problems
from fastlstm.forecast.data.records import FrameRecords
from fastlstm.forecast.data.roles import RoleRequest, find_roles, listed


@pytest.mark.parametrize(
    ("name", "values", "is_counter"),
    [
        ("RECORD", range(1000, 1040), True), ("id", range(40, 0, -1), True),
        ("Record No", [*range(20), *range(30, 50)], True), ("row", [0, 0, 1, 1] * 10, False),
        ("row_id", np.repeat(range(20), 2), True), ("id", np.arange(40) * 2, False),
        ("day", range(40), False), ("id", [n + 2**63 for n in range(40)], False),
        ("Unnamed: 0", range(40), True),
    ],
)  # fmt: skip
def test_a_column_that_counts_rows_has_no_role(name: str, values: Any, is_counter: bool) -> None:
    """Of each series too: row_id counts the rows of two series that take turns."""
    kind = pa.uint64() if max(values) >= 2**63 else None
    columns = {"unique_id": ["a", "b"] * 20, "y": [0.5] * 40, name: pa.array(list(values), kind)}
    records = FrameRecords(pa.table(columns))
    found = find_roles(records, RoleRequest(), Problems("t"))
    assert found.past == (() if is_counter else (name,))
    assert (f"ignored columns (row counters): '{name}'" in found.notes) == is_counter
    assert find_roles(records, RoleRequest(past=(name,)), Problems("t")).past == (name,)


def test_a_table_whose_only_numbers_count_rows_is_refused_as_that() -> None:
    records = FrameRecords(pa.table({"id": list(range(1, 31)), "what": ["a", "b", "c"] * 10}))
    with pytest.raises(DataError, match=r"but 'id', which counts rows \(`target='id'` takes it\)"):
        find_roles(records, RoleRequest(), Problems("t"))
    assert find_roles(records, RoleRequest(target=("id",)), Problems("t")).target == ("id",)


@pytest.mark.parametrize(
    ("name", "values", "is_series"),
    [
        ("Werk", np.repeat([7, 3, 5], 20), True), ("Werk", np.repeat([7, 3, 5], 20)[:55], True),
        ("Werk", np.repeat([7, 3], 20), True), ("Werk", np.repeat([7, 3], 20)[:30], False),
        ("Werk", np.tile([7, 3, 5], 20), False), ("Jahr", np.repeat([7, 3, 5], 20), False),
        ("Werk", np.repeat([7, 3, 5], 2)[:5], False), ("Werk", [7] * 60, False),
    ],
)  # fmt: skip
def test_whole_numbers_in_runs_are_proposed_as_series(
    name: str, values: Any, is_series: bool
) -> None:
    records = FrameRecords(pa.table({"y": np.arange(len(values)) / 3, name: values}))
    if is_series:
        with pytest.raises(DataError, match=r"rows for each number of 'Werk'.*`series='Werk'`"):
            find_roles(records, RoleRequest(), Problems("t"))
    else:
        assert find_roles(records, RoleRequest(), Problems("t")).past == (name,)
    assert find_roles(records, RoleRequest(past=(name,)), Problems("t")).past == (name,)
    assert find_roles(records, RoleRequest(series=name), Problems("t")).series == name
    read = RoleRequest(target=("y",), past=())  # as of a model that does not read it
    assert find_roles(records, read, Problems("t")).values == ("y",)


def test_whole_numbers_called_codes_are_named() -> None:
    table = pa.table({"y": [0.5, 1, 2, 3], "site_no": [4, 2, 9, 4], "price": [1, 2, 5, 3]})
    notes = prepare_table(table, request=RoleRequest(target=("y",))).notes
    note = "column 'site_no' is read as an amount; if it is a code, give `categorical='site_no'`"
    assert notes[:2] == ("past covariates: site_no, price", note)


def test_of_many_names_the_first_are_listed() -> None:
    text = listed([f"c{n}" for n in range(50)])
    assert text.startswith("c0, c1, ")
    assert text.endswith("c39 … (50 in all)")


def test_the_hour_of_a_daily_row_is_a_covariate(tmp_path: Path) -> None:
    rows = [
        f"2024-01-{day:02},{8 + day % 3},{store},{day}" for day in range(1, 29) for store in "ab"
    ]
    path = tmp_path / "shops.csv"
    path.write_text("\n".join(["date,hour,store,y", *rows]))
    found = prepare_table(path, request=RoleRequest(series="store", target=("y",))).roles
    assert (found.time, found.past) == ("date", ("hour",))
