"""CSV files as people have them: one message holds the options that read each."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pytest

from fastlstm.cli.command import parse
from fastlstm.cli.options import TABLE_OPTIONS
from fastlstm.cli.output import with_flags
from fastlstm.cli.prepare import COMMAND
from fastlstm.errors import DataError
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.csv_look import kind_of
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.preparation import prepare, prepare_future
from fastlstm.forecast.data.time_text import formats_of, is_like_time, read_times
from fastlstm.system.charset import guess_of
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


DAY = "{t:%Y-%m-%d}"
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
CASES: dict[str, tuple[list[str], str, int]] = {
    "plain": (["ds,y", *rows(DAY + ",{x}")], "", 60),
    "footer": (
        ["Month,passengers", *rows(DAY + ",{n}"), ",", "A title: monthly totals,"],
        "--skip-footer 2", 60,
    ),
    "a footer of one cell": (["ds;y", *rows(DAY + ";{n}"), "Source: us"], "--skip-footer 1", 60),
    "dots between thousands beside numbers below 1000": (
        ["ds;y", *(f"{START + timedelta(days=n):%Y-%m-%d};{v}" for n, v in
          enumerate(["956", "1.161", "1.200", "870"] * 15))],
        "--decimal , --thousands .", 60,
    ),
    "weeks of years": (
        ["region,year,week,sold", *(f"{r},{2016 + n // 52},{n % 52 + 1},{n}" for r in "ab"
          for n in range(104))],
        "--time year,week --series region", 208,
    ),
    "no header": (
        [f"{1900 + n // 12};{n % 12 + 1:02};{50 + n}" for n in range(240)],
        "--no-header --time 1,2", 240,
    ),
    "title lines": (
        ["Load of the grid", "in MW", "ds,y", *rows(DAY + ",{n}")],
        "--skip-rows 2", 60,
    ),
    "date and clock": (
        ["Date;Time;y", *rows("{t:%d/%m/%Y};{t:%H.%M.%S};{x}", 600, 1)],
        "--time Date,Time --time-format '%d/%m/%Y %H.%M.%S'", 600,
    ),
    "year, month and day": (
        ["year,month,day,y", *rows("{t.year},{t.month},{t.day},{n}")],
        "--time year,month,day", 60,
    ),
    "a column per day": (
        [
            "country," + ",".join(f"{1 + n // 28}/{n % 28 + 1}/2024" for n in range(56)),
            *(f"c{k}," + ",".join(str(k + n) for n in range(56)) for k in range(20)),
        ],
        "--wide --time-format %m/%d/%Y", 0,  # 20 series with a gap at the end of January
    ),
    "repeated header": (
        ["ds,load", *rows(DAY + ",{n}")[:20], "ds,load", *rows(DAY + ",{n}")[20:]],
        "--skip-headers", 60,
    ),
    "decimal comma": (
        ["ds;y", *rows("{t:%d.%m.%Y};{c}")],
        "--decimal , --time-format %d.%m.%Y", 60,
    ),
    "quoted decimal comma": (["ds,y", *rows(DAY + ',"{c}"')], "--decimal ,", 60),
    "groups by comma": (["ds,y", *grouped(DAY + ',"{k}"', ",")], "--thousands ,", 60),
    "groups by point": (["ds;y", *grouped(DAY + ";{k},25", ".")], "--decimal , --thousands .", 60),
    "groups by space": (["ds;y", *grouped(DAY + ";{k}", "\u00a0")], "--thousands ' '", 60),
    "a dash for no value": (
        ["ds,y", *[line.replace(",7", ",-") for line in rows(DAY + ",{n}")]],
        "--na -", 60,
    ),
    "latin letters": (["Tag;Größe", *rows(DAY + ";{n}")], "--encoding cp1252", 60),
    "months by name": (["ds,y", *rows("{t:%d-%b-%Y},{n}")], "--time-format %d-%b-%Y", 60),
    "half days by letters": (
        ["ds,y", *rows("{t:%m/%d/%Y %I:%M %p},{n}", 120, 12)],
        "--time-format '%m/%d/%Y %I:%M %p'", 120,
    ),
    "titles as wide as the rows": (
        ["Sales by month,,", ",,", "Month,a,b", *(f"{m}-{y:02},{y},{y + 1}" for y in range(5, 25)
         for m in MONTHS), "Total,9,9"],
        "--skip-rows 2 --skip-footer 1 --time Month --time-format %b-%y", 240,
    ),
    "lines below the header": (
        ["Price,Close,High", "Ticker,A,A", "Date,,", *rows(DAY + ",{n},{k}")],
        "--skip-below 2", 60,
    ),
    "years below titles": (
        ["Data Source,x,", "Updated,2024-01-01,", "", "Country,1990,1991,1992,1993,1994",
         *(f"c{k},1,2,3,4,{k}" for k in range(20))],
        "--skip-rows 3 --wide --time-format %Y", 100,
    ),
    "a column per step": (
        ["id," + ",".join(f"d_{n}" for n in range(1, 41)),
         *(f"c{k}," + ",".join(str(k + n) for n in range(40)) for k in range(20))],
        "--wide", 800,
    ),
    "names of series among counted columns": (  # as R writes a matrix, rows of several lengths
        [",".join(f'"V{n}"' for n in range(1, 42)),
         *(f'"H{k}"' + "".join(f',"{k + n}"' for n in range(40 - k)) + "," * k
           for k in range(20))],
        "--wide", 20 * 40 - sum(range(20)),
    ),
    "rows without any value": (
        ["Date;Time;y;z", *(line.replace(";7;7", ";?;?")
         for line in rows("{t:%d/%m/%Y};{t:%H:%M:%S};{n};{n}", 600, 1))],
        "--na '?' --time Date,Time --time-format '%d/%m/%Y %H:%M:%S'", 600,
    ),
    "columns without a name": (
        ["ds;y;;", *rows("{t:%d.%m.%Y};{c};;"), ";;;", ";;;"],
        "--skip-footer 2 --decimal , --time-format %d.%m.%Y", 60,
    ),
    "a column per month": (
        ["Year," + ",".join(MONTHS) + ",J-D", *(
            f"{y}," + ",".join("***" if y == 1999 and m > 8 else f".{m:02}" for m in range(12))
            + ",.05" for y in range(1980, 2000))],
        "--na '***' --wide", 237,  # the last three are still to come
    ),
    "days of Excel": (
        ["sep=;", "Day;Visitors", *(f"{45292 + n};{200 + n % 7}" for n in range(60))],
        "--skip-rows 1 --time Day --time-format excel", 60,
    ),
    "months with the month first": (
        ["Date,y", *(f"{m:02}/01/{y},{y + m}" for y in range(2000, 2020) for m in range(1, 13))],
        "--time Date --time-format %m/%d/%Y", 240,
    ),
    "months with the day first": (
        ["Date,y", *(f"01/{m:02}/{y},{y + m}" for y in range(2000, 2020) for m in range(1, 13))],
        "--time Date --time-format %d/%m/%Y", 240,
    ),
    "a key of two columns": (
        ["date,store,item,price,sales", *(
            f"{START + timedelta(days=n):%Y-%m-%d},{s},{i},{s}.5,{n + s}"
            for n in range(40) for s in range(5) for i in ("a", "b", "c", "d"))],
        "--series item,store --target sales", 800,
    ),
    "a series by name": (
        ["week,country,cases", *(
            f"2016-W{w:02},c{k},{w}" for k in range(20) for w in range(1, 53))],
        "--series country", 1040,
    ),
    "money": (["ds,y", *rows(DAY + ',"$1,{n:03}.50"')], "--units --thousands ,", 60),
    "prices, newest first": (
        ["Date,Close,Volume,Change", *rows("{t:%m/%d/%Y},${x},{x}M,({x}%)")[::-1]],
        "--units --time Date --time-format %m/%d/%Y --disorder sort", 60,
    ),
    "a quote": (
        ["ds,name,y", *(line.replace(",n7,", ',"n7,') for line in rows(DAY + ",n{n},{n}"))],
        "--no-quotes", 60,
    ),
    "titles, then a header": (
        ["Price, United States, monthly", "https://a.org", "Month,all,homes",
         *(f"{m} {y},{y},{'--' if y == 2001 and m == 'Jan' else 9}"
           for y in range(2001, 2021) for m in MONTHS)],
        "--skip-rows 2 --na -- --time Month --time-format '%b %Y'", 240,
    ),
    "a header with an empty name": (
        ['"";USD;FLAGS', '"";"a rate";', "Unit;USD;", "As of;now;", *rows(DAY + ";{c};")],
        "--skip-below 3 --decimal ,", 60,
    ),
    "flags behind numbers": (
        ["unit,geo\\TIME_PERIOD\t" + "\t".join(f"2000-{m:02} " for m in range(1, 13)),
         *(f"PC,c{k}\t" + "\t".join(": " if m == 3 else f"{m}.{k} p" for m in range(12))
           for k in range(20))],
        "--units --na : --wide", 240,
    ),
    "a header far down": (
        ["ds,y", *rows(DAY + ",{n}", 1500), "ds,y", *rows(DAY + ",{n}", 3000)[1500:]],
        "--skip-headers", 3000,
    ),
    "the station of a logger above the names": (
        ['"TOA5","Hill","CR1000","12345"', '"TIMESTAMP","RECORD","Air_Avg","RH"',
         '"TS","RN","Deg C","%"', '"","","Avg","Smp"',
         *rows('"{t:%Y-%m-%d %H:%M:%S}",{k},{x},"NAN"', 3, 1),
         *rows('"{t:%Y-%m-%d %H:%M:%S}",{k},{x},7{n}', 60, 1)[3:]],
        "--skip-rows 1 --skip-below 2 --na NAN", 60,
    ),
    "quotes behind a backslash": (
        ['"id","ds","shop","y","note"',
         *(f'"{2 * n + k}","{START + timedelta(days=n)}","{shop}",{v},"it\'s \\"ok\\", fine"'
           for n in range(40) for k, shop in enumerate(("a", 'b \\"old\\"'))
           for v in ["\\N" if n == 7 else f'"{n}.5"'])],
        "--escape '\\' --series shop", 80,
    ),
    "a start and an end": (
        ["DATE,START TIME,END TIME,USAGE",
         *rows("{t:%Y-%m-%d},{t:%H:%M},{t:%H}:59,{t.hour}.5", hours=1)],
        "--time 'DATE,START TIME'", 60,
    ),
    "a date and an hour": (
        ["Date,Hour,y", *rows("{t:%d/%m/%Y},{t.hour},{n}", 600, 1)],
        "--time Date,Hour --time-format '%d/%m/%Y %H'", 600,
    ),
    "values below a limit": (["ds,y", *rows(DAY + ",<{n}"), ], "--units", 60),
    "letters among few numbers": (
        ["ds,y,holiday", *rows(DAY + ",{x},0", 60)[:30], *rows(DAY + ",{x},a", 60)[30:34],
         *rows(DAY + ",{x},0", 60)[34:]],
        "--categorical holiday", 60,
    ),
}  # fmt: skip


def parsed(options: str) -> dict[str, Any]:
    """The values of options as a shell and the command line read them."""
    return parse(COMMAND, ["a.csv", *shlex.split(options)]).given(TABLE_OPTIONS)


def told(message: str) -> str:
    """The options of a message, as the command line shows them."""
    first = re.compile(r"(?:: add|give) `(--.+?)`(?:(?: with, for example,| and) `(--.+?)`)?[;,\n]")
    *_, text = re.split("(?=: add )", with_flags(message))
    found = first.search(text + "\n")
    assert found is not None, message
    return " ".join(filter(None, found.groups()))


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


@pytest.fixture
def cured(read: Callable[..., SeriesDataset]) -> Callable[..., tuple[str, SeriesDataset]]:
    """Returns the options that the message about lines proposes, and what is read with them."""

    def made(lines: list[str], given: str = "", **encoding: str) -> tuple[str, SeriesDataset]:
        with pytest.raises(DataError) as caught:
            read(lines, given, **encoding)
        found = told(str(caught.value))
        return found, read(lines, f"{found} {given}", **encoding)

    return made


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_read_or_the_message_holds_the_options_that_do(
    name: str, read: Any, cured: Any
) -> None:
    lines, wanted, num_rows = CASES[name]
    if wanted:
        encoding = "cp1252" if wanted.startswith("--encoding") else "utf-8"
        options, dataset = cured(lines, encoding=encoding)
        assert options.startswith(wanted) or parsed(options) == parsed(wanted)
    else:
        dataset = read(lines)
    assert dataset.table.num_rows == num_rows or len(dataset.series) == 20
    assert dataset.roles.time is not None
    assert len(dataset.table.segments) == len(dataset.series) or len(dataset.series) == 20


@pytest.mark.parametrize(
    ("lines", "options", "values"),
    [
        (["ds;y", *grouped(DAY + ";{k},25", ".")], "--decimal , --thousands .", [1000.25, 1001.25]),
        (["ds,y", *grouped(DAY + ',"{k}"', ",")], "--thousands ,", [1000.0, 1001.0]),
        (["ds;y", *rows(DAY + ";{c}")], "--decimal ,", [0.5, 1.5]),
        (["ds;y", *rows(DAY + ";({c}K)")], "--decimal , --units", [-500.0, -1500.0]),
        (["ds,y", *grouped(DAY + ',"-$ {k}"', ",")], "--thousands , --units", [-1000.0, -1001.0]),
        (["ds,y", *rows(DAY + ",{x} p")], "--units", [0.5, 1.5]),
        (["ds,y", *rows(DAY + ",<{n}")], "--units", [0.0, 0.5]),
        (["a;b", *rows(DAY + ";{n}")], "--no-look --no-header --time 1 --skip-rows 1", [0.0, 1.0]),
    ],
    ids=["both marks", "groups", "comma", "parentheses", "currency", "flags", "half of a limit",
        "names by number"],
)  # fmt: skip
def test_numbers_are_read_with_their_marks(
    lines: list[str], options: str, values: list[float], read: Any
) -> None:
    table = read(lines, options).table
    assert table.whole_rows(0, 2)[:, 0].tolist() == values


def test_the_last_lines_of_a_long_file_are_looked_at(cured: Any, monkeypatch: Any) -> None:
    from fastlstm.forecast.data import csv_look

    monkeypatch.setattr(csv_look, "_BYTES", 1 << 10)
    lines = ["ds,y", *rows(DAY + ",{n}", 500), "", "Total,12"]
    found, dataset = cured(lines)
    assert (found, dataset.table.num_rows) == ("--skip-footer 2", 500)


def test_a_look_at_few_long_lines_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    from fastlstm.forecast.data import csv_look

    monkeypatch.setattr(csv_look, "_BYTES", 1 << 12)
    for end, told in (("1", False), ("0." + "1" * 98, True)):
        path = tmp_path / f"{told}.csv"
        path.write_text("\n".join(["ds,y,x", *rows(DAY + ",{n}," + end, 300)]) + "\n")
        notes = prepare(str(path), ForecastConfig(cache_dir=str(tmp_path / "cache"))).notes
        assert any("lines are checked for its format" in note for note in notes) == told


def test_lists_may_be_given_several_times(read: Any) -> None:
    lines = ["ds,a,b,c", *rows(DAY + ",{n},{n},{n}")]
    dataset = read(lines, "--target a --target b")
    assert (dataset.roles.target, dataset.roles.past) == (("a", "b"), ("c",))


def test_columns_go_by_pattern_number_and_stripped_name(read: Any) -> None:
    lines = ["ds, temp_in,temp_out, Volume", *rows(DAY + ",{n},{n},{n}")]
    assert read(lines, "--target temp_*").roles.target == ("temp_out",)
    assert read(lines, "--target 2").roles.target == (" temp_in",)
    assert read(lines, "--target Volume").roles.target == (" Volume",)


def test_a_word_far_down_does_not_drop_a_column_of_numbers(read: Any) -> None:
    lines = ["ds,y,z", *rows(DAY + ",{n},{n}", 3000)]
    lines[2000] = lines[2000].rpartition(",")[0] + ",?"
    with pytest.raises(DataError, match=r"'z' has the text '\?' in row 2000, .* give `na='\?'`"):
        read(lines, "--target y")
    assert read(lines, "--target y --na '?'").roles.past == ("z",)
    assert read(lines, "--target y --past ''").roles.past == ()  # a model that does not read it


def test_every_series_has_the_name_of_its_two_columns(read: Any) -> None:
    lines = CASES["a key of two columns"][0]
    dataset = read(lines, "--series store,item --target sales --static store")
    assert dataset.series[:2] == ("0/a", "0/b")
    assert dataset.roles.past == ("price",)
    assert dataset.statics["store"].tolist() == [k // 4 for k in range(20)]
    row = 40 * dataset.series.index("3/c")
    assert dataset.table.whole_rows(row, row + 2)[:, 0].tolist() == [3.0, 4.0]


def test_no_two_keys_of_two_columns_have_one_name(read: Any) -> None:
    keys = (("a/b", "c"), ("a", "b/c"), ("a\\", "/c"))
    lines = ["dept,item,ds,y"]
    lines += [f"{d},{i},{line}" for d, i in keys for line in rows(DAY + ",{n}")]
    dataset = read(lines, "--series dept,item")
    assert list(dataset.series) == [r"a\/b/c", r"a/b\/c", r"a\\/\/c"]
    lines.append(lines[1])
    with pytest.raises(DataError, match=r"has the same time as|is earlier than the row before"):
        read(lines, "--series dept,item")


@pytest.mark.parametrize("freq", ["h", "15min"])
@pytest.mark.parametrize("zone", ["Europe/London", "Europe/Berlin", "America/New_York"])
def test_an_hour_that_comes_twice_asks_for_the_zone(zone: str, freq: str, read: Any) -> None:
    utc = pandas.date_range("2023-10-20", periods=3000, freq=freq, tz="UTC")
    lines = ["ds,y", *(f"{t:%Y-%m-%d %H:%M},{n}" for n, t in enumerate(utc.tz_convert(zone)))]
    advice = "for local clock times give their zone, such as `tz='Europe/Berlin'`"
    with pytest.raises(DataError, match=advice):
        read(lines)
    with pytest.raises(DataError) as caught:  # days come twice for other reasons
        read(["ds,y", "2023-10-28,1", "2023-10-29,2", "2023-10-29,3", "2023-10-30,4"])
    assert "tz=" not in str(caught.value)
    dataset = read(lines, f"--tz {zone}")
    assert (dataset.table.num_rows, len(dataset.table.segments)) == (3000, 1)


@pytest.mark.parametrize("cell", ['3" pipe', 'a "b" c" d'])
def test_a_quote_within_a_field_is_a_character(read: Any, cell: str) -> None:
    dataset = read(["ds,y,what", *(f"{line},{cell}" for line in rows(DAY + ",{n}"))], "--target y")
    assert dataset.table.num_rows == 60


@pytest.mark.parametrize("cell", ["290 K", "1 B", "(5", "5)"])
def test_other_words_beside_numbers_are_no_units(read: Any, cell: str) -> None:
    lines = ["ds,y", *rows(DAY + ",{n}")]
    lines[1:40] = [f"{line.partition(',')[0]},{cell}" for line in lines[1:40]]
    with pytest.raises(DataError) as caught:
        read(lines)
    assert "--units" not in with_flags(str(caught.value))


def test_a_date_beside_another_clock_can_be_the_time_alone(read: Any) -> None:
    lines = ["ds,opens,y", *(f"{START:%Y-%m-%d},0{n % 9}:00,{n}" for n in range(60))]
    with pytest.raises(DataError, match=r"\(or `time='ds'` if it holds them alone\)"):
        read(lines)


def test_irregular_days_in_order_decide_on_day_and_month() -> None:
    days = sorted(np.random.default_rng(0).choice(360, 100, replace=False))
    texts = pa.array([f"{START + timedelta(days=int(d)):%d/%m/%Y}" for d in days if d % 30 < 10])
    assert formats_of(texts) == ["%d/%m/%Y"]
    assert formats_of(texts[::-1]) == ["%d/%m/%Y"]


def test_months_follow_each_other_over_the_years(read: Any) -> None:
    dataset = read(CASES["a column per month"][0], "--na *** --wide")
    months = [f".{m:02}" for m in range(12)] * 20
    values = dataset.table.whole_rows(0, 237)[:, 0].tolist()
    assert values == pytest.approx(list(map(float, months[:237])))
    assert str(dataset.frequency) == "1 month"
    assert (dataset.series, dataset.roles.series) == (("",), None)


def test_months_without_values_are_cut_at_the_end_of_the_last_file_alone(tmp_path: Path) -> None:
    values = ",".join(map(str, range(11)))
    for year in (2001, 2002):
        text = f"Year,{','.join(MONTHS)}\n{year},{values},\n"
        (tmp_path / f"{year}.csv").write_text(text)
    config = ForecastConfig(wide=True, cache_dir=str(tmp_path / "cache"))
    table = prepare(str(tmp_path / "*.csv"), config).table
    found = table.whole_rows(0, 23)[:, 0]
    np.testing.assert_array_equal(found, [*range(11), np.nan, *range(11)])
    assert (table.num_rows, len(table.segments)) == (23, 1)


def test_the_name_of_a_series_has_its_quotes(read: Any) -> None:
    dataset = read(CASES["quotes behind a backslash"][0], "--escape '\\' --series shop")
    assert dataset.series == ("a", 'b "old"')
    assert np.isnan(dataset.table.whole_rows(0, 80)[:, 0]).sum() == 2
    assert "ignored columns (row counters): 'id'" in dataset.notes


@pytest.mark.parametrize("cell", ['"C:\\data\\"', '"a\\b"', '"say ""a\\"" once"'])
def test_a_backslash_in_a_path_is_no_escape(cell: str, read: Any) -> None:
    assert len(read(["ds,path,y", *rows(DAY + f",{cell},{{n}}")]).notes) > 0


def test_a_wide_parquet_is_asked_about_as_a_csv_is(tmp_path: Path) -> None:
    months = {m: [1.0, 2.0] for m in MONTHS}
    table = pa.table({"Year": [2001, 2002], **months})
    with pytest.raises(DataError, match="a column for each month: add `wide=True`; if it is not"):
        prepare(table, ForecastConfig(cache_dir=str(tmp_path)))


def test_a_counter_within_the_days_of_excel_is_no_time(read: Any) -> None:
    lines = ["ds,y,percentage_total", *rows(DAY + ",{n},4{k}")]
    assert read(lines).roles.past == ("percentage_total",)
    with pytest.raises(DataError, match=r"days since 1900, as in Excel .45292.; give `time_format"):
        read(["day,y", *(f"{45292 + n},{n}" for n in range(60))], "--time day")


def test_damaged_bytes_in_a_guessed_encoding_are_no_crash(tmp_path: Path) -> None:
    lines = [f"{1000 + n}-01-01,Logro\xf1o,{n}" for n in range(5000)]
    lines.append("6000-01-01,\x81\x8d,5000")
    (tmp_path / "a.csv").write_bytes("\n".join(["ds,city,y", *lines]).encode("latin-1"))
    with pytest.raises(DataError, match=r"Logroño.* with these options: byte 0x81 is no character"):
        prepare(str(tmp_path / "a.csv"), ForecastConfig(cache_dir=str(tmp_path)))


def test_days_of_excel_are_read_with_their_clock(read: Any) -> None:
    lines = ["when,y", *(f"{45292 + n / 4},{n}" for n in range(60))]
    segments = read(lines, "--time when --time-format excel").table.segments
    assert segments.start_times.astype("M8[us]").tolist() == [START]


@pytest.mark.parametrize(
    ("text", "encoding", "guess", "remark"),
    [
        ("日期,城市,销量", "gb18030", "cp949", "gb18030 reads '日期'"),
        ("Ay,Satış", "cp1254", "cp1254", "cp1252 reads 'Satýþ'"),
        ("ds,Kadıköy", "cp1254", "cp1252", "cp1254 reads 'Kadıköy'"),
        ("Þórður býr í Reykjavík", "cp1252", "cp1252", "cp1254 reads 'Şórğur'"),
        ("Москва", "cp1251", "big5", "cp1251 reads 'Москва'"), ("año", "cp1252", "cp1252", "'año'"),
        ("-- ¡Qué día! -dijo él-. «Mañana» será 1º", "cp1252", "cp1252", "reads 'ˇQué'"),
        ("col·legi, acció; 3º año, 2ª fila", "cp1252", "cp1252", "cp1250 reads"),
        ("L'été à Zürich, señor 1 où?\n" * 99, "cp1252", "cp1252", "cp1257 reads 'ą'"),
        ("Chrząszcz brzmi w trzcinie, że", "cp1250", "cp1250", "cp1252 reads"),
        ("Łódź", "cp1250", "cp1250", "cp1252 reads '£ódŸ'"),
        ("Ø", "cp1252", "cp1252", "cp1250 reads 'Ř'"),
    ],
)  # fmt: skip
def test_of_few_words_other_readings_are_shown(
    text: str, encoding: str, guess: str, remark: str
) -> None:
    found = guess_of(f"{text}\n".encode(encoding))
    assert found is not None
    assert found[0] == guess
    assert remark in found[1]


def test_the_guess_of_an_encoding_is_shown_by_a_word(read: Any) -> None:
    lines = ["ds,city,y", *rows(DAY + ",Logroño,{n}")]
    shown = r"text in cp1252 \('Logroño', a guess; cp1250 reads 'Logrońo'\)"
    with pytest.raises(DataError, match=shown):
        read(lines, encoding="cp1252")


def test_several_errors_end_with_all_options(read: Any) -> None:
    lines = ["ds,y,z", *rows(DAY + ",{n},{n}", 2000)]
    for place, cell in ((1500, "M,1"), (1600, "1,-")):
        lines[place] = lines[place][:11] + cell
    with pytest.raises(DataError, match=r"(?s)row 1500, .* for all of these add `na='-,M'`$"):
        read(lines)


@pytest.mark.parametrize(
    ("encoding", "line"),
    [
        ("cp1252", "{t:%d.%m.%Y};München;Ø {n},50"), ("cp1252", "{t:%d.%m.%Y};a;{n},50"),
        ("iso8859-15", "{t:%d.%m.%Y};a;{n},50"), ("cp850", "{t:%d.%m.%Y};München;{n},50"),
        ("cp1251", "{t:%d.%m.%Y};Москва, улица;{n},50"),
    ],
)  # fmt: skip
def test_common_encodings_are_guessed_first(encoding: str, line: str) -> None:
    """Also where the header alone has a letter beyond ASCII."""
    head = "Datum;Grün;Umsatz" if encoding == "cp850" else "Datum;Filiale;Umsatz (€)"
    if encoding == "cp1251":
        head = "Дата;Город;Сумма"
    data = "\r\n".join([head, *rows(line)]).encode(encoding)
    assert guess_of(data)[0] == encoding


def test_duplicates_are_dropped_where_they_are_few_or_explained_by_a_column(
    read: Any, cured: Any
) -> None:
    stations = [f"{n},{s},{START + timedelta(hours=n)},{n}" for n in range(120) for s in "AB"]
    stations.insert(10, stations[9])
    assert cured(stations, "--target 4")[0] == "--no-header --series 2 --duplicates last"
    with pytest.raises(DataError, match=r"which drops 1 of 241 rows"):
        read(stations, "--target 4 --no-header --series 2")
    with pytest.raises(DataError, match=r"40 of 60 rows have the time of another, too") as caught:
        read(["ds,y", *(f"{START + timedelta(n // 3)},{n}" for n in range(60))])
    assert "duplicates=" not in str(caught.value)


@pytest.mark.parametrize("names", [("Année", "Semaine"), ("rocznik", "tydzień")])
def test_years_and_weeks_of_any_name_are_the_time(names: tuple[str, str], cured: Any) -> None:
    weeks = [(START + timedelta(weeks=n)).isocalendar() for n in range(110)]
    lines = [f"{w.year};{w.week};{shop};{n}" for n, w in enumerate(weeks) for shop in ("A", "B")]
    found, data = cured([f"{';'.join(names)};shop;y", *lines, "Total;;;9999"])
    assert found == f"--skip-footer 1 --time '{','.join(names)}' --series shop"
    assert (data.table.num_rows, str(data.frequency)) == (220, "1 week")


@pytest.mark.parametrize(
    ("lines", "options"),
    [
        (["Jahr;y", *(f"{1700 + n};{n}" for n in range(60))], "--time Jahr"),
        (
            ["country,year,y", *(f"{c},{1960 + 5 * n},{n}" for c in "abcd" for n in range(12))],
            "--time year --series country",
        ),
        (
            ["year,country,y", *(f"{1960 + n},{c},{n}" for n in range(12) for c in range(400))],
            "--time year --series country",
        ),
        (
            ["Jahr;y", *(f"{2019 - n};{n}" for n in range(60))],
            "--time Jahr --disorder sort",
        ),
        (
            ["rownames,time,y", *(f"{n + 1},{1949 + n / 12:.3f},{n}" for n in range(60))],
            "--time-format year",
        ),
        (
            ["rownames,Time,y", *(f"{n + 1},{1960 + n / 4},{n}" for n in range(60))],
            "--time Time --time-format year",
        ),
    ],
    ids=["one series", "panel", "panel by year", "newest first", "months of R", "quarters of R"],
)
def test_years_are_times(lines: list[str], options: str, cured: Any) -> None:
    found, data = cured(lines)
    assert found == options
    assert data.table.num_rows == len(lines) - 1
    assert len(data.table.segments) == len(data.series or "y")
    assert "rownames" not in data.roles.values


def test_years_that_are_no_times_are_values(read: Any) -> None:
    rng = np.random.default_rng(0)
    lines = ["year,y", *(f"{1990 + rng.integers(20)},{n}" for n in range(60))]
    found = read(lines)
    assert found.roles.past == ("year",)
    assert "'year' holds years" in found.repairs[0]
    for name in ("operating_time_h", "cycle_time", "centimetres", "Time"):
        lines = [f"{name},y", *(f"{1650 + n},{n}" for n in range(60))]
        assert read(lines).roles.past == (name,)
    lines = ["year,y", *(f"{1990 + n},{n}" for n in range(60))]
    assert read(lines, "--ignore year").roles.values == ("y",)
    assert read(lines, "--past year").roles.values == ("y", "year")


def test_numbers_of_time_beyond_64_bits_are_refused(read: Any) -> None:
    lines = ["timestamp,y", *(f"202401{n + 1:02}123059123456,{n}" for n in range(28))]
    with pytest.raises(DataError, match=r"numbers with fractions \(2.0240101"):
        read(lines)


def test_a_table_whose_rows_are_counted_is_not_asked_for_times(tmp_path: Path) -> None:
    """Its forecaster was fitted with the years left out, and `predict` has no way to say so."""
    frame = pandas.DataFrame({"year": 1900 + np.arange(80), "y": 1.0 * np.arange(80), "promo": 0.0})
    config = ForecastConfig(horizon=4, future=("promo",), ignore=("year",), cache_dir=str(tmp_path))
    past = prepare(frame, config)
    assert prepare(frame, replace(config, ignore=()), like=past.timeline).roles.time is None
    assert prepare_future(frame, config, past).roles.time is None


def test_a_fraction_of_a_year_that_is_no_month_is_named(read: Any) -> None:
    lines = ["time,y", *(f"{1990 + n / 52},{n}" for n in range(60))]
    with pytest.raises(DataError, match=r"fractions \(1990.019\d+\), .* count rows instead with"):
        read(lines)
    with pytest.raises(DataError, match=r"row 2 has 1990.019.* whose fractions are months"):
        read(lines, "--time-format year")


@pytest.mark.parametrize("step", [15, 60])
def test_hours_that_end_at_24_are_read_across_the_change_of_clocks(
    step: int, read: Any, cured: Any
) -> None:
    begin, end = (pandas.Timestamp(day, tz="America/Chicago") for day in ("20240301", "20241120"))
    ends = pandas.date_range(begin, end, freq=f"{step}min", inclusive="right")
    starts = ends - pandas.Timedelta(minutes=step)
    late = (starts.tz_localize(None) + pandas.Timedelta(minutes=step)).strftime("%H:%M")
    lines = ["DeliveryDate,HourEnding,price"]
    lines += [
        f"{day},{'24:00' if clock == '00:00' else clock},{n % 97}.5"
        for n, (day, clock) in enumerate(zip(starts.strftime("%m/%d/%Y"), late, strict=True))
    ]
    found, data = cured(lines, "--tz America/Chicago")
    assert found == "--time DeliveryDate,HourEnding --time-format '%m/%d/%Y %H:%M'"
    table = data.table
    assert (table.num_rows, len(table.segments)) == (len(ends), 1)
    assert table.segments.start_times[0] == ends[0].value // 1000


@pytest.mark.parametrize(
    ("form", "step", "options"),
    [
        ("%Y %b", "M", "--time-format '%Y %b'"),
        ("%b-1-%Y", "M", "--time-format %b-%d-%Y"),
        ("%Y %m", "M", ""),
        ("Q%q %Y", "Q", ""),
        ("%qQ%Y", "Q", ""),
    ],
)
def test_months_and_quarters_in_words(
    form: str, step: str, options: str, read: Any, cured: Any
) -> None:
    times = pandas.period_range("1991-07", periods=40, freq=step)
    lines = ["when,y", *(f"{text},{n}" for n, text in enumerate(times.strftime(form)))]
    if options:
        found, data = cured(lines)
        assert found == f"--time when {options}"
    else:
        data = read(lines)
    assert (data.roles.time, data.table.num_rows) == ("when", 40)
    assert data.table.segments.start_times[0] == pandas.Timestamp("1991-07-01").value // 1000


def test_24_o_clock_is_midnight(tmp_path: Path) -> None:
    texts = pa.array(["2024-12-31 23:00", "2024-12-31 24:00", "2025-01-01 01:00"])
    hours = [datetime(2024, 12, 31, 23) + timedelta(hours=n) for n in range(3)]
    assert read_times(texts).to_pylist() == hours
    texts = pa.array(
        [f"{text[8:10]}.{text[5:7]}.{text[:4]}{text[10:]}" for text in texts.to_pylist()]
    )
    assert read_times(texts, "%d.%m.%Y %H:%M").to_pylist() == hours


def test_a_gauge_with_local_clock_times_needs_one_command(read: Any, cured: Any) -> None:
    """As of the USGS: comments, widths below the names, a constant number, names of the clocks."""
    times = pandas.date_range("2024-03-01", periods=2000, freq="15min", tz="America/Chicago")
    lines = ["# a gauge", "#", "agency_cd\tsite_no\tdatetime\ttz_cd\t1_00060\t1_00060_cd"]
    lines += ["5s\t15s\t20d\t6s\t14n\t10s"]
    lines += [
        f"USGS\t05331000\t{t:%Y-%m-%d %H:%M}\t{t:%Z}\t{n % 97}\tP" for n, t in enumerate(times)
    ]
    found, data = cured(lines, "--target 1_00060 --tz America/Chicago")
    assert found == "--skip-rows 2 --skip-below 1"
    assert (data.table.num_rows, data.roles.past) == (2000, ())
    assert not data.has_missing
    plain = "--skip-rows 2 --skip-below 1 --target 1_00060 --gaps fill"
    assert read(lines, plain).table.num_rows == 2004


def test_months_without_values_are_cut_at_the_end_of_each_series(tmp_path: Path) -> None:
    lines = {"a": ["a,2001,1", "a,2002,9"], "b": ["b,2001,1", "b,2002,9"]}
    for name, (first, last) in lines.items():
        rest = ",".join("2" * 11) if name == "b" else "2,,4" + "," * 8
        text = f"station,Year,{','.join(MONTHS)}\n{first},{','.join('2' * 11)}\n{last},{rest}\n"
        (tmp_path / f"{name}.csv").write_text(text)
    config = ForecastConfig(wide=True, cache_dir=str(tmp_path / "cache"))
    data = prepare(str(tmp_path / "*.csv"), config)
    assert data.series == ("a", "b")
    assert data.table.segments.num_rows.tolist() == [16, 24]
    np.testing.assert_array_equal(data.table.whole_rows(12, 16)[:, 0], [9, 2, np.nan, 4])


@pytest.mark.parametrize(
    ("head", "flags", "message"),
    [
        ("ds,y,y", "", "has two columns called 'y'; rename one"),
        ("ds,y,y", "--units", "has two columns called 'y'"),
        ("ds,y,y", "--wide", "has two columns called 'y'"),
        ("ds,Year,Year", "", "has two columns called 'Year'"),
        ("ds,a,b", "--wide --time day", "has no column 'day'; its columns: ds, a, b"),
        ("ds,a,b", "--wide --ignore a,b", "neither columns named by times, nor a column of times"),
    ],
)
def test_columns_that_are_missing_or_double_are_named(
    head: str, flags: str, message: str, read: Any
) -> None:
    with pytest.raises(DataError, match=message):
        read([head, *rows(DAY + ",{n},{k}")], flags)


@pytest.mark.parametrize("flags", ["", " --time 1,2"])
def test_a_column_that_is_not_utf_8_is_named(flags: str, tmp_path: Path) -> None:
    path, options = tmp_path / "a.csv", dict[str, Any](look=False, header=False)
    path.write_bytes(b"".join(b"2024-01-%02d,\xe9,%d\n" % (k, k) for k in range(1, 29)))
    with pytest.raises(DataError, match="column '2' is not UTF-8; give the `encoding` of the CSV"):
        prepare(str(path), ForecastConfig(**options, time=flags[8:] or None))


def test_a_wide_table_has_large_numbers_and_its_time_by_number(read: Any) -> None:
    lines = ["ds,a,b", *rows(DAY + ",115292150460{n}46977,{k}")]
    first = read(lines, "--wide --time 1").table.whole_rows(0, 1)[0, 0]
    assert first == pytest.approx(115292150460e6, rel=1e-4)


@pytest.mark.parametrize("counter", [None, "id", "", "No."])
def test_every_column_of_a_wide_table_but_a_counter_is_a_series(
    counter: str | None, read: Any
) -> None:
    def numbered(head: str, lines: list[str]) -> list[str]:
        if counter is None:
            return [head, *lines]
        return [f"{counter},{head}", *(f"{n},{line}" for n, line in enumerate(lines))]

    dataset = read(numbered("ds,berlin,paris", rows(DAY + ",{n},{k}")), "--wide")
    assert dataset.series == ("berlin", "paris")
    assert dataset.table.whole_rows(60, 62)[:, 0].tolist() == [1000.0, 1001.0]
    lines = [f"{k},{year}," + ",".join("2" * 12) for k in (4, 7) for year in range(1990, 1999)]
    stations = numbered(f"station,Year,{','.join(MONTHS)}", lines)
    assert list(read(stations, "--wide").series) == ["4", "7"]


def test_an_empty_hour_that_clocks_skip_has_a_cure(read: Any, cured: Any) -> None:
    """As of ENTSO-E: an empty hour in spring, a tail without values."""
    times = pandas.date_range("2024-03-01", "2024-11-20", freq="h", tz="Europe/Berlin")
    lines = [f"{t:%d.%m.%Y %H:%M} - {t:%d.%m.%Y},{n % 97}" for n, t in enumerate(times)]
    lines[-35:] = [line.partition(",")[0] + ",-" for line in lines[-35:]]
    lines.insert(0, "Time (CET/CEST),y")
    place = next(n for n, line in enumerate(lines) if line.startswith("31.03.2024 03:00"))
    lines.insert(place, "31.03.2024 02:00 - 31.03.2024,")
    found, data = cured(lines, "--tz Europe/Berlin")
    assert found.endswith("--na -")
    assert (data.table.num_rows, len(data.table.segments)) == (len(times) - 35, 1)
    lines[place] += "5"
    with pytest.raises(DataError, match="which the clocks of Europe/Berlin skip"):
        read(lines, f"{found} --tz Europe/Berlin")


@pytest.mark.parametrize("minutes", [30, 15])
def test_dates_and_numbers_of_half_hours_are_the_time(minutes: int, read: Any, cured: Any) -> None:
    """As of the British grid: a day has 46 settlement periods in spring, 50 in autumn."""
    freq = f"{minutes}min"
    times = pandas.date_range("2024-03-25", "2024-11-04", freq=freq, tz="Europe/London")[:-1]
    numbers = (times - times.normalize()) // pandas.Timedelta(freq) + 1
    lines = ["SETTLEMENT_DATE,SETTLEMENT_PERIOD,ND"]
    lines += [
        f"{t:%d-%b-%Y},{number},{n % 977}".upper()
        for n, (t, number) in enumerate(zip(times, numbers, strict=True))
    ]
    found, data = cured(lines, "--tz Europe/London")
    assert {"SETTLEMENT_DATE,SETTLEMENT_PERIOD", "%d-%b-%Y"} <= set(found.split())
    options = f"{found} --tz Europe/London"
    start = pandas.Timestamp(data.table.segments.start_times[0], unit="us", tz="UTC")
    assert (start, str(data.frequency)) == (times[0], f"{minutes} minutes")
    values = data.table.whole_rows(0, len(times))[:, 0]
    np.testing.assert_array_equal(values, np.arange(len(times)) % 977)
    most = 25 * 60 // minutes
    for cell, message in (
        ("0", f"row 71 has 'SETTLEMENT_PERIOD' 0.0, expected 1 to {most}$"),
        ("", r"row 71 has no time \('SETTLEMENT_DATE,SETTLEMENT_PERIOD'\)"),
    ):
        lines[71] = f"26-MAR-2024,{cell},1"
        with pytest.raises(DataError, match=message):
            read(lines, options)


def test_names_over_three_lines_are_refused_where_no_line_names_all(read: Any) -> None:
    """As of yfinance with two tickers."""
    head = ["Price,Close,Close,Volume,Volume", "Ticker,AAPL,MSFT,AAPL,MSFT", "Date,,,,"]
    lines = [*head, *rows(DAY + ",{n}{n},{n}{n}.5,{n}{n},{n}{n}")]
    with pytest.raises(DataError, match=r"spread over lines 1 to 3; write each .* `skip_rows=2`$"):
        read(lines, "")
    assert read(lines, "--skip-rows 2").roles.target[0] == "unnamed 2"
    one = ["Price,Close,Volume", "Ticker,AAPL,AAPL", "Date,,", *rows(DAY + ",{x},2{x}")]
    assert read(one, "--skip-below 2").roles.target == ("Close", "Volume")


@pytest.mark.parametrize("total", ["Total,5,5", "Total Jan,5,", ",5,5"])
def test_subtotals_between_rows_are_refused_as_such(total: str, read: Any) -> None:
    lines = ["ds,y,z", *rows(DAY + ",{n},{x}")]
    lines.insert(32, total)
    with pytest.raises(DataError, match=r"row 32 has .*; remove such rows, as subtotals are, from"):
        read(lines, "")


def test_dates_as_numbers_without_a_header_are_the_time(cured: Any) -> None:
    """As of the GHCN: a station, a date, what is measured, its value."""
    days = [START + timedelta(days=n) for n in range(60)]
    keys = [(s, what) for s in ("USW1", "USW2") for what in ("TMAX", "PRCP")]
    lines = [f"{s},{t:%Y%m%d},{w},{t.day},,,W" for t in days for s, w in keys]
    found, data = cured(lines, "--target 4")
    assert found == "--no-header --time 2 --time-format %Y%m%d --ignore 5,6 --series 1,3"
    assert (len(data.series), data.table.num_rows) == (4, 240)


def test_events_of_several_sensors_are_told_apart(read: Any) -> None:
    """As of Home Assistant: one sensor behind the other, at irregular times."""
    rng = np.random.default_rng(0)
    lines = ["entity_id,state,last_changed"]
    lines += [
        f"{name},{20 + k % 9},{START + timedelta(seconds=int(second)):%Y-%m-%dT%H:%M:%S}"
        for name in ("living", "cellar", "power")
        for k, second in enumerate(np.cumsum(rng.integers(60, 900, 400)))
    ]
    with pytest.raises(DataError, match=r"each entity_id has its own times.*`snap=") as caught:
        read(lines)
    assert "`series='entity_id'`" in str(caught.value)
    with pytest.raises(DataError, match="give `duplicates='last'`"):
        read(lines, "--series entity_id --snap 30m")
    assert len(read(lines, "--series entity_id --snap 30m --duplicates last").series) == 3


def test_periods_of_a_day_are_no_series(read: Any, cured: Any) -> None:
    lines = [f"{line},{k},{n}" for n, line in enumerate(rows(DAY)) for k in range(1, 49)]
    lines.insert(0, "date,SETTLEMENT_PERIOD,y")
    assert cured(lines)[0] == "--time date,SETTLEMENT_PERIOD"
    with pytest.raises(DataError, match="or all columns of the time with `time`; or") as caught:
        read(lines, "--time date")
    assert "series='SETTLEMENT" not in str(caught.value)


@pytest.mark.parametrize("months", ["Januar Februar März April Mai Juni Juli August September"
    " Oktober November Dezember", "janvier février mars avril mai juin juillet août septembre"
    " octobre novembre décembre"])  # fmt: skip
def test_names_of_months_beside_years_and_a_header_of_three_lines(months: str, cured: Any) -> None:
    names = months.split()
    head = ["A table", ";;Total;Hotels;Inns", ";;net;net;net", ";;2015=100;2015=100;2015=100"]
    lines = [f"{2005 + n // 12};{names[n % 12]};{n},5;{n},5;{n},5" for n in range(60)]
    found, data = cured(head + lines, "--target Total")
    assert found.startswith("--skip-rows 1 --skip-below 2 --decimal ,")
    assert (data.table.num_rows, str(data.frequency)) == (60, "1 month")


@pytest.mark.parametrize(
    ("form", "shown"),
    [
        ("%a, %d %b %Y %H:%M:%S GMT", ""),  # of mails and HTTP
        ("%Y%m%dT%H%M%SZ", ""),  # ISO 8601 without marks
        ("%Y-%m-%d %H:%M:%S,125", "%Y-%m-%d %H:%M:%S.%f"),  # Python's logging
        ("%d.%m.%Y %H:%M:%S.125", "%d.%m.%Y %H:%M:%S.%f"),
    ],
)
def test_times_of_logs_and_mails_have_a_format(form: str, shown: str, cured: Any) -> None:
    hours = pandas.date_range(START, periods=400, freq="h")
    found, dataset = cured(["at,y", *(f'"{t:{form}}",{n}.5' for n, t in enumerate(hours))])
    assert shlex.split(found) == ["--time", "at", "--time-format", shown or form]
    assert str(dataset.frequency) == "1 hour"


@pytest.mark.parametrize("name", ["ts", "Time", "created_at", "unix"])
@pytest.mark.parametrize("form", ["s", "%Y%m%d%H", "%Y%m%d%H%M", "%Y%m%d%H%M%S"])
def test_numbers_of_times_are_told_whatever_their_column_is_called(
    name: str, form: str, cured: Any
) -> None:
    hours = pandas.date_range(START, periods=300, freq="h")
    texts = [f"{int(t.timestamp())}" if form == "s" else f"{t:{form}}" for t in hours]
    found, dataset = cured([f"{name},y", *(f"{t},{n}.5" for n, t in enumerate(texts))])
    assert found == f"--time {name} --time-format {form}"
    assert str(dataset.frequency) == "1 hour"
    assert dataset.table.segments.start_times[0] == hours[0].timestamp() * 1e6


@pytest.mark.parametrize(
    "lines",
    [
        ['"ds" "y"', *rows('"{n}" "{t:%Y-%m-%d}" {x}')],  # R's write.table
        ['"Index" "y"', *rows(DAY + " {x}")],
        ["ds          y", *rows(DAY + "  {n:9}")],
    ],
)
def test_columns_separated_by_blanks_are_told(lines: list[str], read: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="if blanks separate columns, convert it by") as caught:
        read(lines)
    code = re.search(r"pandas.*index=False\)", str(caught.value))
    assert code is not None
    made = tmp_path / "table.csv"
    names = {"pandas": pandas, "FILE": tmp_path / "a.csv", "made": made}
    eval(code[0].replace("'table.csv'", "made"), names)
    assert prepare(str(made), ForecastConfig()).table.num_rows == 60
    assert read(["y", *rows("{n:03} 250")], "--thousands ' '").table.num_rows == 60


def test_a_long_cell_takes_no_longer_than_a_short_one() -> None:
    """The pattern of intervals took minutes for 80 kB, and a server read them."""
    assert kind_of("a1" * 200_000) == "text"
    assert not is_like_time("a1" * 200_000)
