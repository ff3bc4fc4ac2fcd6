"""CSV files as people have them: one message holds the options that read each."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fastlstm.cli.command import parse
from fastlstm.cli.options import TABLE_OPTIONS
from fastlstm.cli.prepare import COMMAND
from fastlstm.errors import DataError
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.preparation import prepare
from fastlstm.system.fields import built

START = datetime(2024, 1, 1)


def rows(form: str, count: int = 60, hours: int = 24) -> list[str]:
    """Lines with the time `{t}`, a number `{n}`, one with a fraction `{x}` and a large one."""
    return [
        form.format(t=START + timedelta(hours=hours * n), n=n, x=f"{n}.5", c=f"{n},5", k=1000 + n)
        for n in range(count)
    ]


def grouped(form: str, mark: str) -> list[str]:
    return [line.replace("~", mark) for line in rows(form.replace("{k}", "1~{n:03}"))]


def footed(lines: list[str], *end: str) -> list[str]:
    return [*lines, *end]


DAY = "{t:%Y-%m-%d}"
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
CASES: dict[str, tuple[list[str], str, int]] = {
    "plain": (["ds,y", *rows(DAY + ",{x}")], "", 60),
    "footer": (
        ["Month,passengers", *rows(DAY + ",{n}"), ",", "A title: monthly totals,"],
        "--skip-footer 2",
        60,
    ),
    "a footer of one cell": (["ds;y", *rows(DAY + ";{n}"), "Source: us"], "--skip-footer 1", 60),
    "no header": (
        [f"{1900 + n // 12};{n % 12 + 1:02};{50 + n}" for n in range(240)],
        "--no-header --time 1,2 --time-format '%Y %m'",
        240,
    ),
    "title lines": (
        ["Load of the grid", "in MW", "ds,y", *rows(DAY + ",{n}")],
        "--skip-rows 2",
        60,
    ),
    "date and clock": (
        ["Date;Time;y", *rows("{t:%d/%m/%Y};{t:%H.%M.%S};{x}", 600, 1)],
        "--time Date,Time --time-format '%d/%m/%Y %H.%M.%S'",
        600,
    ),
    "year, month and day": (
        ["year,month,day,y", *rows("{t.year},{t.month},{t.day},{n}")],
        "--time year,month,day",
        60,
    ),
    "a column per day": (
        [
            "country," + ",".join(f"{1 + n // 28}/{n % 28 + 1}/2024" for n in range(56)),
            *(f"c{k}," + ",".join(str(k + n) for n in range(56)) for k in range(20)),
        ],
        "--wide --time-format %m/%d/%Y",
        0,  # 20 series with a gap at the end of January
    ),
    "repeated header": (
        ["ds,load", *rows(DAY + ",{n}")[:20], "ds,load", *rows(DAY + ",{n}")[20:]],
        "--skip-headers",
        60,
    ),
    "decimal comma": (
        ["ds;y", *rows("{t:%d.%m.%Y};{c}")],
        "--decimal , --time ds --time-format %d.%m.%Y",
        60,
    ),
    "quoted decimal comma": (["ds,y", *rows(DAY + ',"{c}"')], "--decimal ,", 60),
    "groups by comma": (["ds,y", *grouped(DAY + ',"{k}"', ",")], "--thousands ,", 60),
    "groups by point": (
        ["ds;y", *grouped(DAY + ";{k},25", ".")],
        "--decimal , --thousands .",
        60,
    ),
    "groups by space": (["ds;y", *grouped(DAY + ";{k}", "\u00a0")], "--thousands '\u00a0'", 60),
    "a dash for no value": (
        ["ds,y", *[line.replace(",7", ",-") for line in rows(DAY + ",{n}")]],
        "--na -",
        60,
    ),
    "latin letters": (["Tag;Größe", *rows(DAY + ";{n}")], "--encoding=", 60),
    "months by name": (
        ["ds,y", *rows("{t:%d-%b-%Y},{n}")],
        "--time ds --time-format %d-%b-%Y",
        60,
    ),
    "half days by letters": (
        ["ds,y", *rows("{t:%m/%d/%Y %I:%M %p},{n}", 120, 12)],
        "--time ds --time-format '%m/%d/%Y %I:%M %p'",
        120,
    ),
    "titles as wide as the rows": (
        ["Sales by month,,", ",,", "Month,a,b", *(f"{m}-{y:02},{y},{y + 1}" for y in range(5, 25)
         for m in MONTHS), "Total,9,9"],
        "--skip-rows 2 --skip-footer 1 --time Month --time-format %b-%y",
        240,
    ),
    "lines below the header": (
        ["Price,Close,High", "Ticker,A,A", "Date,,", *rows(DAY + ",{n},{k}")],
        "--skip-below 2",
        60,
    ),
    "years below titles": (
        ["Data Source,x,", "Updated,2024-01-01,", "", "Country,1990,1991,1992,1993,1994",
         *(f"c{k},1,2,3,4,{k}" for k in range(20))],
        "--skip-rows 3 --wide --time-format %Y",
        100,
    ),
    "a column per step": (
        ["id," + ",".join(f"d_{n}" for n in range(1, 41)),
         *(f"c{k}," + ",".join(str(k + n) for n in range(40)) for k in range(20))],
        "--wide",
        800,
    ),
    "rows without any value": (
        ["Date;Time;y;z", *(line.replace(";7;7", ";?;?")
         for line in rows("{t:%d/%m/%Y};{t:%H:%M:%S};{n};{n}", 600, 1))],
        "--na '?' --time Date,Time --time-format '%d/%m/%Y %H:%M:%S'",
        600,
    ),
    "columns without a name": (
        ["ds;y;;", *rows("{t:%d.%m.%Y};{c};;"), ";;;", ";;;"],
        "--skip-footer 2 --decimal , --time ds --time-format %d.%m.%Y",
        60,
    ),
}  # fmt: skip


def parsed(options: str) -> dict[str, Any]:
    """The values of options as a shell and the command line read them."""
    return parse(COMMAND, ["a.csv", *shlex.split(options)]).given(TABLE_OPTIONS)


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., SeriesDataset]:
    """Reads lines with the options of a command line."""

    def made(lines: list[str], options: str = "", encoding: str = "utf-8") -> SeriesDataset:
        path = tmp_path / "a.csv"
        path.write_bytes(("\n".join(lines) + "\n").encode(encoding))
        given = parsed(options) | {"cache_dir": str(tmp_path / "cache")}
        config = built(ForecastConfig, given, "test")
        return prepare(str(path), config)

    return made


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_read_or_the_message_holds_the_options_that_do(name: str, read: Any) -> None:
    lines, wanted, num_rows = CASES[name]
    encoding = "cp1252" if wanted.startswith("--encoding") else "utf-8"
    options = ""
    if wanted:
        with pytest.raises(DataError, match="looks like") as caught:
            read(lines, encoding=encoding)
        told = str(caught.value).partition(": add ")[2].partition("; if it is not so")[0]
        options = " ".join(f"--{option}" for option in re.findall("`(.*?)`", told))
        assert options.startswith(wanted) or parsed(options) == parsed(wanted)
    dataset = read(lines, options, encoding)
    assert dataset.table.num_rows == num_rows or len(dataset.series) == 20
    assert dataset.roles.time is not None
    assert len(dataset.table.segments) == len(dataset.series) or len(dataset.series) == 20


@pytest.mark.parametrize(
    ("lines", "options", "values"),
    [
        (["ds;y", *grouped(DAY + ";{k},25", ".")], "--decimal , --thousands .", [1000.25, 1001.25]),
        (["ds,y", *grouped(DAY + ',"{k}"', ",")], "--thousands ,", [1000.0, 1001.0]),
        (["ds;y", *rows(DAY + ";{c}")], "--decimal ,", [0.5, 1.5]),
        (["a;b", *rows(DAY + ";{n}")], "--no-look --no-header --time 1 --skip-rows 1", [0.0, 1.0]),
    ],
    ids=["both marks", "groups", "comma", "names by number"],
)
def test_numbers_are_read_with_their_marks(
    lines: list[str], options: str, values: list[float], read: Any
) -> None:
    table = read(lines, options).table
    assert table.whole_rows(0, 2)[:, 0].tolist() == values


def test_a_file_can_be_read_as_it_is(read: Any) -> None:
    dataset = read(["a,b,c", *(f"{n},{n * 2},{n * 3}" for n in range(40)), "9,9,"], "--no-look")
    assert dataset.table.num_rows == 41


def test_the_last_lines_of_a_long_file_are_looked_at(read: Any, monkeypatch: Any) -> None:
    from fastlstm.forecast.data import csv_look

    monkeypatch.setattr(csv_look, "_BYTES", 1 << 10)
    lines = ["ds,y", *rows(DAY + ",{n}", 500), "", "Total,12"]
    with pytest.raises(DataError, match=r"a footer of 2 lines \(.*Total"):
        read(lines)
    assert read(lines, "--skip-footer 2").table.num_rows == 500


def test_lists_may_be_given_several_times(read: Any) -> None:
    lines = ["ds,a,b,c", *rows(DAY + ",{n},{n},{n}")]
    dataset = read(lines, "--target a --target b")
    assert (dataset.roles.target, dataset.roles.past) == (("a", "b"), ("c",))


def test_columns_go_by_pattern_number_and_stripped_name(read: Any) -> None:
    lines = ["ds, temp_in,temp_out, Volume", *rows(DAY + ",{n},{n},{n}")]
    assert read(lines, "--target temp_*").roles.target == ("temp_out",)
    assert read(lines, "--target 2").roles.target == (" temp_in",)
    assert read(lines, "--target Volume").roles.target == (" Volume",)


def test_a_column_per_series_becomes_a_row_for_each(read: Any) -> None:
    dataset = read(["ds,berlin,paris", *rows(DAY + ",{n},{k}")], "--wide")
    assert dataset.series == ("berlin", "paris")
    assert dataset.table.whole_rows(60, 62)[:, 0].tolist() == [1000.0, 1001.0]


def test_a_word_far_down_does_not_drop_a_column_of_numbers(read: Any) -> None:
    lines = ["ds,y,z", *rows(DAY + ",{n},{n}", 3000)]
    lines[2000] = lines[2000].rpartition(",")[0] + ",?"
    with pytest.raises(DataError, match=r"column 'z' holds numbers and '\?'; .* give `na='\?'`"):
        read(lines, "--target y")
    assert read(lines, "--target y --na '?'").roles.past == ("z",)


def test_an_hour_that_comes_twice_has_the_zone_in_its_message(read: Any) -> None:
    lines = ["ds,y", *rows("{t:%Y-%m-%d %H:%M},{n}", 60, 1)]
    lines.insert(30, lines[30])
    with pytest.raises(DataError, match="if clocks were put back there, give their zone: `tz="):
        read(lines)
