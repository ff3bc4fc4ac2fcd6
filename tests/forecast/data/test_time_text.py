"""Times as texts and numbers, and names that read like no value: what people's files hold."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fastlstm.errors import DataError
from fastlstm.forecast.data.roles import RoleRequest
from fastlstm.forecast.data.time_text import (
    formats_of,
    is_like_time,
    micro_of_floats,
    read_times,
)
from series_frames import prepared

pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")

START = datetime.datetime(1990, 1, 1)
HOURS = [START + datetime.timedelta(hours=k) for k in range(60)]
DAYS = [START + datetime.timedelta(days=k) for k in range(60)]


def table(path: Path, times: list[str], header: str = "date,y") -> Path:
    rows = [f"{time},{k}" for k, time in enumerate(times)]
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def micro(time: datetime.datetime) -> int:
    return round((time - datetime.datetime(1970, 1, 1)).total_seconds() * 1e6)


@pytest.mark.parametrize(
    ("times", "form"),
    [
        ([f"{t.year}/{t.month}/{t.day} {t.hour}:00" for t in HOURS], None),
        ([f"{t.year}-{t.month}-{t.day} {t.hour}:00:00" for t in HOURS], None),
        ([f"{t.year}.{t.month:02}.{t.day:02}T{t.hour:02}:00:00.0" for t in HOURS], None),
        ([f"{t.year}/{t.month}/{t.day}" for t in DAYS], None),
        ([f"{t:%d.%m.%Y %H:%M:%S}.{t.microsecond:06}" for t in HOURS], "%d.%m.%Y %H:%M:%S.%f"),
        ([f"{t.day}.{t.month}.{t.year}" for t in DAYS], "%d.%m.%Y"),
        ([f"{t:%d %B %y}" for t in DAYS], "%d %B %y"),
        ([f"{t:%Y%m%d}" for t in DAYS], "%Y%m%d"),
        ([f"{t:%m/%d/%Y %I:%M %p}" for t in HOURS], "%m/%d/%Y %I:%M %p"),
    ],
)
def test_times_are_read(times: list[str], form: str | None, tmp_path: Path) -> None:
    found = prepared(table(tmp_path / "a.csv", times), time_format=form)
    assert found.table.num_rows == 60
    assert len(found.table.segments) == 1  # every one an hour, or a day, behind the one before
    assert found.table.segments.start_times[0] == micro(START)


@pytest.mark.parametrize(
    "text",
    [
        "2024-03-01 12:30:05 UTC",  # BigQuery, Ruby
        "2024-03-01 12:30:05.250 UTC",  # Athena, Trino
        "2024-03-01 12:30:05.250 -0730",  # Snowflake
        "2024-03-01 12:30:05.2500000 +05:30",  # SQL Server
        "2024-03-01T12:30:05.1234567Z",  # .NET
        "2024-03-01T12:30:05.123456789Z",  # InfluxDB
        "2024-03-01 12:30:05.123456789",
        "2024-03-01 12:30 +02:00",
    ],
)
def test_times_of_databases_are_those_of_pandas(text: str) -> None:
    found, wanted = read_times(pa.array([text])), pandas.Timestamp(text).floor("us")
    assert found.cast(pa.int64())[0].as_py() == round(wanted.timestamp() * 1e6)
    assert (found.type.tz is None) == (wanted.tz is None)
    assert read_times(pa.array([text, text])).equals(pa.concat_arrays([found, found]))


def test_odd_digits_behind_minutes_are_no_fraction() -> None:
    for text in ("2024-03-01 12:305", "2024-03-01 12:30:055", "2024-03-01 12:30 UTC+1"):
        with pytest.raises(pa.ArrowInvalid):
            read_times(pa.array([text]))
    go = read_times(pa.array(["2024-03-01 12:30:05 +0000 UTC"]))
    assert go.equals(read_times(pa.array(["2024-03-01 12:30:05Z"])))
    assert is_like_time("01-JAN-24 12.30.05.000000 AM")  # Oracle: told, not counted as rows


def test_a_fraction_of_a_second_is_kept() -> None:
    texts = pa.array(["01.02.2016 00:00:01.5", "01.02.2016 00:00:01.000007"])
    found = read_times(texts, "%d.%m.%Y %H:%M:%S.%f").cast(pa.int64()).to_pylist()
    assert [time % 10**9 - found[0] % 10**9 for time in found] == [0, -499_993]
    texts_with_comma = pa.array(["01.02.2016 00:00:01,5", "01.02.2016 00:00:01,000007"])
    again = read_times(texts_with_comma, "%d.%m.%Y %H:%M:%S,%f").cast(pa.int64()).to_pylist()
    assert again == found
    short = read_times(pa.array(["2016/2/1 0:00:01.5", "2016/2/1 0:00:01.000007"]))
    assert short.cast(pa.int64()).to_pylist() == found
    with pytest.raises(DataError, match="%f, a fraction of a second, is only supported at the"):
        read_times(texts, "%f %d.%m.%Y")


@pytest.mark.parametrize(
    ("bad", "form", "message"),
    [
        ("20160231", "%Y%m%d", "row 61 has '20160231'; expected the format of `time_format="),
        ("20150231", "%Y%m%d", "row 61 has '20150231'; expected the format of"),  # Arrow: 3 March
        ("31.4.2016", "%d.%m.%Y", "row 61 has '31.4.2016'; expected the format of"),
        ("2016/2/31", None, "row 61 has '2016/2/31'; there is no such day"),
        ("2016/2/3 24:30", None, "there is no such day or time of day"),
        ("soon", None, "row 61 has 'soon'; remove such rows, as subtotals are"),
    ],
)
def test_what_is_no_time_is_refused(bad: str, form: str | None, message: str) -> None:
    good = [f"{t:{form or '%Y/%m/%d'}}" for t in DAYS]
    rows = pa.table({"date": [*good, bad], "y": np.arange(61.0)})
    with pytest.raises(DataError) as caught:
        prepared(rows, time_format=form)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("written", "others"),
    [
        ("%d/%m/%Y", "%m/%d/%Y"),
        ("%m-%d-%y %H:%M", "%d-%m-%y %H:%M"),
        ("%d.%m.%Y %H:%M:%S", "%m.%d.%Y %H:%M:%S"),
    ],
)
def test_day_or_month_first_is_seen_or_asked_for(written: str, others: str) -> None:
    rows = pa.table({"date": [f"{t:{written}}" for t in DAYS], "y": np.arange(60.0)})
    with pytest.raises(DataError, match=rf"; give `time_format='{written}'`$"):
        prepared(rows)
    with pytest.raises(DataError, match="day or month may come first") as caught:
        prepared(rows.slice(0, 10))
    assert all(repr(form) in str(caught.value) for form in (written, others))


@pytest.mark.parametrize(("unit", "per_s"), [("s", 1.0), ("ms", 1e3), ("us", 1e6), ("ns", 1e9)])
def test_numbers_since_1970_may_have_a_fraction(unit: str, per_s: float) -> None:
    seconds = 1_467_331_200 + 0.5 * np.arange(60)
    found = prepared(pa.table({"ds": seconds * per_s, "y": np.arange(60.0)}), time_format=unit)
    assert str(found.frequency) == "500 milliseconds"
    assert found.table.segments.start_times[0] == 1_467_331_200 * 10**6
    for value in (np.nan, np.inf, -np.inf):
        seconds[3] = value
        with pytest.raises(DataError, match=f"row 4 has {value}"):
            prepared(pa.table({"ds": seconds * per_s, "y": np.arange(60.0)}), time_format=unit)
    seconds[3] = seconds[2]
    with pytest.raises(DataError, match=r"fractions .* give `time_format='s'`"):
        prepared(pa.table({"ds": seconds, "y": np.arange(60.0)}))


def test_a_name_may_be_na_and_a_number_may_not(tmp_path: Path) -> None:
    days = [f"2020-01-{k:02},{'NA' if k == 3 else k}" for k in range(1, 29)]
    rows = [f"{day},{c},{c}" for c in ("US", "NA") for day in days]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["ds,y,unique_id,land", *rows]) + "\n")
    found = prepared(path, roles=RoleRequest(past=("land",), categorical=("land",)))
    assert found.series == ("US", "NA")
    assert found.categories == {"land": ["US", "NA"]}
    assert "column 'y' has missing values in 2 rows (3.57%)" in found.notes
    assert "column 'land': 'NA' is read as a name, not as missing" in found.notes
    path.write_text(path.read_text() + "2020-02-01,1,,US\n")
    with pytest.raises(DataError, match=r"row 57 has no series \('unique_id'\)"):
        prepared(path)


def test_a_text_far_down_is_named_and_not_the_gaps_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastlstm.forecast.data.csv_records._BLOCK_BYTES", 1024)
    rows = [f"{k},{'oops' if k == 399 else 'NA' if k > 390 else k % 9}" for k in range(400)]
    (tmp_path / "a.csv").write_text("\n".join(["t,y", *rows]) + "\n")
    with pytest.raises(DataError, match="column 'y' has the text 'oops' in row 400"):
        prepared(tmp_path / "a.csv")


def test_a_column_of_numbers_and_their_texts() -> None:
    ids = [7] * 28 + ["7"] * 28 + [8.0] * 4
    days = [*DAYS[:56], *DAYS[:4]]
    frame = pandas.DataFrame({"unique_id": ids, "ds": days, "y": [1, "2"] * 30})
    found = prepared(frame)
    assert found.series == ("7", "8")
    assert found.table.rows(0, 4)[:, 0].tolist() == [1, 2, 1, 2]
    frame["unique_id"] = [*([k] for k in range(59)), "a"]
    with pytest.raises(DataError, match="'unique_id' has a list in row 1, expected"):
        prepared(frame)


@pytest.mark.parametrize("form", ["%Y-%m-%d", "%Y/%m/%d"])
def test_an_index_of_dates_as_texts_is_the_time(form: str) -> None:
    found = prepared(pandas.DataFrame({"y": np.arange(60.0)}, index=[f"{t:{form}}" for t in DAYS]))
    assert (found.roles.time, str(found.frequency)) == ("ds", "1 day")
    named = pandas.DataFrame({"y": np.arange(60.0)}, index=[f"row {k}" for k in range(60)])
    assert prepared(named).roles.time is None


def test_a_fraction_is_read_to_the_nearest_microsecond() -> None:
    """0.031373 s times a million is a little less than 31,373 µs."""
    column = pa.array([0.031373, 1_467_331_200.031373, -0.031373])
    found = micro_of_floats(column, 1e6).cast(pa.int64()).to_pylist()
    assert found == [31_373, 1_467_331_200_031_373, -31_373]


def frames(texts: dict[str, list[str]], num_rows: int = 60) -> list[Any]:
    """The same table as pandas, polars and Arrow frames."""
    columns = {**texts, "y": list(range(num_rows))}
    return [
        pandas.DataFrame(columns),
        pandas.DataFrame(columns).astype(dict.fromkeys(texts, object)),
        polars.DataFrame(columns),
        pa.table(columns),
    ]


ROWS = np.random.default_rng(0).permutation(60)


@pytest.mark.parametrize("form", ["%Y-%m-%d %H:%M", "%Y/%m/%d %H:%M:%S", "%Y-%m-%dT%H:%MZ"])
def test_texts_of_a_frame_are_the_time_column_as_in_a_csv(form: str, tmp_path: Path) -> None:
    texts = [HOURS[row].strftime(form) for row in ROWS]
    path = table(tmp_path / "a.csv", texts, "when,y")
    for source in (path, *frames({"when": texts})):
        with pytest.raises(DataError, match="is earlier than the row before"):
            prepared(source)
        found = prepared(source, disorder="sort")
        assert (found.roles.time, str(found.frequency)) == ("when", "1 hour")
        assert found.table.segments.start_times[0] == micro(START)


def test_texts_with_a_role_are_not_looked_at() -> None:
    days = [f"{day:%Y-%m-%d}" for day in DAYS]
    for frame in frames({"ds": days, "released": days, "shop": [f"{d:%d.%m.%Y}" for d in DAYS]}):
        assert prepared(frame).roles.time == "ds"
    for role in ({"ignore": ("when",)}, {"categorical": ("when",)}):
        for frame in frames({"when": days}):
            assert prepared(frame, roles=RoleRequest(**role)).roles.time is None
    for frame in frames({"shop": [f"shop {n}" for n in range(60)]}):
        assert prepared(frame).roles.time is None


@pytest.mark.parametrize(
    "form", ["%d.%m.%Y %H:%M", "%m/%d/%Y", "%d %b %Y", "%B %d %Y %I:%M %p", "%d-%m-%y"]
)
def test_texts_that_are_like_dates_are_refused(form: str, tmp_path: Path) -> None:
    texts = [f"{time:{form}}" for time in HOURS]
    for source in (table(tmp_path / "a.csv", texts, "when,y"), *frames({"when": texts})):
        with pytest.raises(DataError) as refused:
            prepared(source, look=False)
        # of three days any may come first; this one is no form that is tried
        others = {"%m/%d/%Y": "%d/%m/%Y", "%B %d %Y %I:%M %p": "%d.%m.%Y %H:%M"}
        likely = others.get(form, form)
        assert str(refused.value).endswith(
            f"column 'when' looks like times ({texts[0]!r}) but is not read as the time column:"
            f" give `time='when'` with, for example, `time_format={likely!r}`, or `ignore='when'`"
        )
        asked = {"roles": RoleRequest(time="when"), "time_format": form}
        if form == "%d.%m.%Y %H:%M":
            assert str(prepared(source, **asked).frequency) == "1 hour"


def test_two_columns_of_texts_are_refused() -> None:
    days = [f"{day:%Y-%m-%d}" for day in DAYS]
    for frame in frames({"start": days, "end": days}):
        with pytest.raises(DataError, match="'start' looks like times"):
            prepared(frame)
        assert prepared(frame, roles=RoleRequest(ignore=("start",))).roles.time == "end"


@pytest.mark.parametrize("text", ["1.2.3", "shop 12", "12:30", "99-99-99", "2024", "a 1, 2024", ""])
def test_other_texts_are_not_like_dates(text: str) -> None:
    assert not is_like_time(text)


@pytest.mark.parametrize(
    ("texts", "want"),
    [
        (["2016-W01", "2016-W53"], None),  # 2016 has 52
        (["2015-W53", "2016-W01"], ["2015-12-28", "2016-01-04"]),
        (["2020W01", "2020W53", "2021W01"], ["2019-12-30", "2020-12-28", "2021-01-04"]),
        (["1950Q1", "1950-Q4", "1951 Q1"], ["1950-01-01", "1950-10-01", "1951-01-01"]),
        (["1990M01", "1990M12"], ["1990-01-01", "1990-12-01"]),
        (["1990M00"], None), (["1990M13"], None), (["1990Q5"], None), (["1990Q1", "1990M02"], None),
        (["1950Q1", "total"], None),
    ],
)  # fmt: skip
def test_weeks_quarters_and_months_begin_on_their_first_day(
    texts: list[str], want: list[str] | None
) -> None:
    if want is None:
        with pytest.raises(pa.ArrowInvalid):
            read_times(pa.array(texts))
        return
    found = read_times(pa.array(texts)).to_pylist()
    assert [str(time.date()) for time in found] == want


def test_iso_weeks_agree_with_pythons(tmp_path: Path) -> None:
    days = [datetime.date(1995, 1, 2) + datetime.timedelta(weeks=k) for k in range(1600)]
    texts = ["{}-W{:02}".format(*day.isocalendar()[:2]) for day in days]
    assert [time.date() for time in read_times(pa.array(texts)).to_pylist()] == days
    rows = [f"{week},{name}" for name in ("a", "b") for week in texts[:60]]
    source = table(tmp_path / "weeks.csv", rows, "week,country,y")
    with pytest.raises(DataError, match="each country has its own times: give `series='country'`"):
        prepared(source)
    assert prepared(source, roles=RoleRequest(series="country")).roles.time == "week"


@pytest.mark.parametrize(("unit", "step"), [("s", 3600), ("ms", 3_600_000)])
def test_whole_numbers_since_1970_are_never_a_covariate_by_themselves(
    tmp_path: Path, unit: str, step: int
) -> None:
    first = 1_502_942_400 * (step // 3600)
    source = table(tmp_path / "a.csv", [str(first + k * step) for k in range(60)], "open_time,y")
    with pytest.raises(DataError, match=rf"time='open_time'` and `time_format='{unit}'"):
        prepared(source)
    roles = RoleRequest(time="open_time")
    assert prepared(source, roles=roles, time_format=unit).roles.time == "open_time"
    assert prepared(source, roles=RoleRequest(ignore=("open_time",))).roles.time is None
    huge = pa.table(
        {"time_id": pa.array([2**63 + k for k in range(60)], pa.uint64()), "y": range(60)}
    )
    assert prepared(huge, roles=RoleRequest(target=("y",))).roles.time is None
    plain = table(tmp_path / "b.csv", [str(k) for k in range(60)], "uptime,y")
    assert prepared(plain, roles=RoleRequest(target=("y",))).roles.past == ("uptime",)


def test_days_below_13_of_several_series_do_not_decide_on_day_and_month() -> None:
    """Gaps, and the way back to the first day, are odd steps in both readings."""
    days = [f"{day:02}/01/2024" for day in range(1, 13)]
    one = pa.array(days)
    assert formats_of(one)[0] in ("%d/%m/%Y", "%m/%d/%Y")
    several = pa.array([*days, *days[:5], *days[6:], *days])
    assert sorted(formats_of(several)) == ["%d/%m/%Y", "%m/%d/%Y"]
