"""Whether a source is a text or a table, by its name and its first lines."""

from pathlib import Path

import pytest

from fastlstm.text.data import source_kind
from fastlstm.text.data.source_kind import files_of, kind_of_source

CSV = "date,y\n" + "".join(f"2020-01-{day:02},{day}\n" for day in range(1, 29))
PROSE = "One day, 1 of 3, it rained.\nThe next 2 days, too.\nThen, on the 4th, it was dry.\n" * 9


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mixed", "texts", "tables"):
        Path(name).mkdir()
    for name, content in (("numbers.txt", CSV), ("book.txt", PROSE), ("mixed/notes.md", PROSE)):
        Path(name).write_text(content)
    Path("mixed/a.csv").write_text(CSV)
    Path("texts/b.txt").write_text(PROSE)


@pytest.mark.parametrize(
    ("source", "kind"),
    [("book.txt", "text"), ("numbers.txt", "csv"), ("nothing.md", "unknown"), ("mixed", "mixed")],
)
def test_what_a_source_holds(source, kind):
    assert kind_of_source(source) == kind


def test_a_field_in_quotes_may_hold_delimiters():
    rows = [f'"{", ".join("abc"[: n % 3 + 1])}",{n}' for n in range(9)]
    Path("quoted.txt").write_text("\n".join(["name,y", *rows]))
    assert kind_of_source("quoted.txt") == "csv"
    Path("excel.txt").write_text("\n".join(["name\ty", "a\t1", "b\t2"]), encoding="utf-16")
    assert kind_of_source("excel.txt") == "csv"


@pytest.mark.parametrize(
    "lines",
    [
        ["In 1812, Napoleon marched.", "In 1813, he was beaten.", "By 1815, it was over."],
        ["Chapter 1; The inn", "Chapter 2; The road", "Chapter 3; The sea"],
        ['"At 9, he came," she said', '"At 10, he left," she said', '"At 11, too," she said'],
        ["one, two", "three, four", "five, six"],
    ],
    ids=["a comma in every line", "headings", "quotations", "no digits"],
)
def test_prose_with_equally_many_delimiters_is_a_text(lines):
    Path("prose.txt").write_text("\n".join(lines))
    assert kind_of_source("prose.txt") == "text"


@pytest.mark.parametrize(
    "lines",
    [
        ["day;y", "1.2.2024;1,5", "2.2.2024;2,5"],
        ["when\twho", "2024-01-01T00:00:00Z\tAnna", "2024-01-01T01:00:00Z\tPaul"],
        ["name,a,b", "x,?,1", "y,2,?"],
        ["day;sold;price", "Mon;1,5;2,5", "Tue;2,5;1,5"],
        ["y", "1e-3", "-2.5"],
        ["1 | 2", "3 | 4", "5 | 6"],
        ["# site", "agency\tdate\tflow", "5s\t20d\t14n", *(f"US\t2024\t{n}" for n in range(9))],
    ],
    ids=["decimal commas", "times", "missing", "names", "one column", "no header", "comments"],
)
def test_rows_with_a_number_or_a_time_are_a_table(lines):
    Path("rows.txt").write_text("\n".join(lines))
    assert kind_of_source("rows.txt") == "csv"


def test_hidden_files_do_not_count():
    for path in ("texts/.a.csv", "texts/.cache/a.csv"):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text(CSV)
    assert kind_of_source("texts") == "text"


def test_what_many_files_are_is_looked_up_once_each(monkeypatch):
    hashed: list[Path] = []

    class Counted(type(Path())):  # type: ignore[misc]
        def __hash__(self):
            hashed.append(self)
            return super().__hash__()

    paths = [Counted(f"{n}.csv") for n in range(500)]
    monkeypatch.setattr(source_kind, "walk", lambda path: paths)
    assert files_of("tables") == (paths, [])
    assert len(hashed) <= len(paths)


def test_a_logger_file_with_lines_of_names_and_units_is_a_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = ['"TOA5","Station","33"', '"TIMESTAMP","n","a","b"', '"TS","RN","C","%"', '"","","",""']
    rows = [f'"2024-03-01 00:{n}:00",{n},1.5,2' for n in range(10, 40)]
    Path("table10min.dat").write_text("\n".join(lines + rows))
    assert kind_of_source("table10min.dat") == "csv"
    Path("prose.dat").write_text("Once, upon\na time, there\nwas, a cat\n" * 9)
    assert kind_of_source("prose.dat") == "text"
