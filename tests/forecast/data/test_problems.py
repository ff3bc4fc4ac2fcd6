"""What is wrong with a table is said at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastlstm.cli.main import main
from fastlstm.errors import DataError, DataErrors
from fastlstm.forecast.config import ReadOptions
from fastlstm.forecast.data.dataset import prepare_table
from fastlstm.forecast.data.problems import Problems
from fastlstm.forecast.data.roles import RoleRequest


def table(path: Path, days: list[int]) -> Path:
    rows = [
        f"2020-01-{day:02},{-9999 if day == 3 else day},{'oops' if day == 5 else day % 3},"
        f"{'1e99' if day == 7 else 2},"
        for day in days
    ]
    path.write_text("\n".join(["ds,y,x,z,empty", *rows]) + "\n")
    return path


def problems(path: Path, **roles: tuple[str, ...]) -> tuple[str, ...]:
    with pytest.raises(DataErrors) as caught:
        prepare_table(path, ReadOptions(look=False), RoleRequest(**roles))
    return tuple(map(str, caught.value.args))


def test_everything_that_can_be_known_is_said(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", [*range(1, 29), 28])
    head, *found = problems(path, target=("y",), past=("x", "z", "empty"), future=("plan", "sale"))
    assert head == f"{path}: this table has 7 errors"
    parts = [
        "no column 'plan' (given as future)",
        "no column 'sale' (given as future)",
        "'x' has the text 'oops' in row 5",
        "'z' is infinite, or beyond float32, in row 7",
        "'y' is -9999 in 1 row ",
        "'empty' has no values",
        "row 29, 2020-01-28, has the same time as the row before",
    ]
    assert all(part in error for part, error in zip(parts, found, strict=True))


def test_a_single_problem_is_itself(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", [*range(8, 29), 28])
    with pytest.raises(DataError, match="has the same time as the row before") as caught:
        prepare_table(path, request=RoleRequest(target=("y",), past=("x",)))
    assert not isinstance(caught.value, DataErrors)


def test_what_ends_the_reading_is_said_with_what_was_found(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", list(range(1, 29)))
    path.write_text(path.read_text() + "soon,1,2,3,\n")
    _, *found = problems(path, target=("y",), past=("x",))
    assert len(found) == 2
    assert "oops" in found[0]
    assert "row 29 has 'soon'" in found[1]
    _, *found = problems(path, target=("yy", "xx"))
    assert ["no column 'yy'" in found[0], "no column 'xx'" in found[1]] == [True, True]


def test_of_a_column_the_first_problem_counts() -> None:
    found = Problems("a.csv")
    first, other, whole = (DataError(text) for text in ("first", "other", "whole"))
    for error, column in ((first, "y"), (other, "y"), (whole, None)):
        found.add(error, column)
    assert "y" in found
    with pytest.raises(DataErrors) as caught:
        found.raise_all()
    assert caught.value.args == ("a.csv: this table has 2 errors", first, whole)


def test_the_command_line_prints_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(tmp_path / "a.csv", [*range(1, 29), 28])
    assert main(["prepare", str(path), "--target", "y", "--past", "x"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"fastlstm: error: {path}: this table has 3 errors:"
    assert [line[:4] for line in lines[1:]] == ["  - "] * 4
    assert "`--keep-value -9999`" in lines[2]
    assert "`--duplicates last`" in lines[3]


def test_of_many_problems_the_first_are_listed() -> None:
    found = Problems("a.csv")
    for number in range(25):
        found.add(DataError(f"number {number}"))
    with pytest.raises(DataErrors) as caught:
        found.raise_all()
    head, *shown = caught.value.args
    assert head == "a.csv: this table has 25 errors, the first 20"
    assert [str(error) for error in shown] == [f"number {number}" for number in range(20)]


def test_a_missing_column_is_said_once_with_all_it_was_asked_for(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", list(range(8, 29)))
    roles = RoleRequest(target=("y",), past=("x",), future=("plan",), categorical=("plan",))
    with pytest.raises(DataError, match=r"'plan' \(given as future and categorical\)"):
        prepare_table(path, request=roles)
