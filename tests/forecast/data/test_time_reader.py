"""Times of every kind: time zones, dates as whole numbers, business days, files that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fastlstm import Forecaster
from fastlstm.errors import DataError
from fastlstm.forecast.data.dataset import prepare_table
from fastlstm.forecast.data.ingest import TableIngest
from fastlstm.forecast.data.roles import RoleRequest
from fastlstm.forecast.data.timeline import BUSINESS_DAYS, DAYS, Frequency, Timeline
from series_frames import prepared

pandas = pytest.importorskip("pandas")
TINY: dict[str, Any] = {
    "horizon": 4, "input_size": 6, "patch": 2, "hidden_size": 4, "steps": 1, "dropout": 0.0,
}  # fmt: skip


def frame(ds: Any, **columns: Any) -> Any:
    y = np.random.default_rng(0).normal(size=len(ds))
    return pandas.DataFrame({"ds": ds, "y": y, **columns})


@pytest.mark.parametrize("start", ["2020-03-20", "2020-10-20"])
def test_a_file_a_day_is_a_daily_table(start: str, tmp_path: Path) -> None:
    """Days of a zone whose clocks change meanwhile; every batch shows a single time."""
    days = pandas.date_range(start, periods=15, tz="Europe/Berlin")
    for number, day in enumerate(days):
        frame([day] * 2, unique_id=["a", "b"]).to_parquet(tmp_path / f"{number:02}.parquet")
    found = prepared(tmp_path)
    assert found.is_wall
    assert found.frequency == DAYS
    assert len(found.table.segments) == 2


def test_hours_are_no_days_though_every_batch_shows_one_hour_of_the_day(tmp_path: Path) -> None:
    hours = pandas.date_range("2020-03-28", periods=72, freq="h", tz="Europe/Berlin")
    for hour in range(24):
        frame(hours[hours.hour == hour]).to_parquet(tmp_path / f"{hour:02}.parquet")
    found = prepared(tmp_path, disorder="sort")
    assert not found.is_wall
    assert str(found.frequency) == "1 hour"
    assert len(found.table.segments) == 1


@pytest.mark.parametrize(("freq", "shown"), [("D", "1 day"), ("MS", "1 month")])
def test_times_with_offsets_are_regular_by_the_clocks_of_tz(
    freq: str, shown: str, tmp_path: Path
) -> None:
    times = pandas.date_range("2020-01-01", periods=100, freq=freq, tz="Europe/Berlin")
    frame(times).to_csv(path := tmp_path / "a.csv", index=False)
    with pytest.raises(
        DataError, match=r"; .*give the zone of the clocks, as `tz='Europe/Berlin'`, r"
    ):
        prepared(path)
    found = prepared(path, tz="Europe/Berlin")
    assert (found.is_wall, found.time_zone, str(found.frequency)) == (True, "Europe/Berlin", shown)
    assert len(found.table.segments) == 1
    with pytest.raises(DataError, match="have the time zone 'Moon/Base', which this system does"):
        prepared(path, tz="Moon/Base")


def test_midnight_that_the_clocks_leave_out_is_still_the_day() -> None:
    days = pandas.date_range("2022-03-20", periods=14).tz_localize(
        "Asia/Beirut", nonexistent="shift_forward"
    )
    assert days[7].hour == 1
    found = prepared(frame(days))
    assert found.is_wall
    assert len(found.table.segments) == 1


def test_files_of_two_zones_are_a_table_in_the_zone_of_the_first(tmp_path: Path) -> None:
    days = pandas.date_range("2020-03-01", periods=60, tz="Europe/Berlin")
    frame(days[:30]).to_parquet(tmp_path / "a.parquet")
    frame(days[30:].tz_convert("UTC")).to_parquet(tmp_path / "b.parquet")
    found = prepared(tmp_path)
    assert (found.time_zone, found.is_wall) == ("Europe/Berlin", True)
    assert found.table.segments.num_rows.tolist() == [60]


def test_files_of_times_with_and_without_a_zone_are_refused(tmp_path: Path) -> None:
    days = pandas.date_range("2020-01-01", periods=6)
    frame(days[:3]).to_parquet(tmp_path / "a.parquet")
    frame(days[3:].tz_localize("Europe/Berlin")).to_parquet(tmp_path / "b.parquet")
    with pytest.raises(DataError, match="'ds' starts with times and has times with a time zone"):
        prepared(tmp_path)
    frame(np.arange(3)).to_parquet(tmp_path / "b.parquet")
    with pytest.raises(DataError, match="'ds' starts with times and has whole numbers from row 4"):
        prepared(tmp_path)


@pytest.mark.parametrize("freq", ["D", "h", "MS"])
@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_one_row_of_what_is_known_ahead_is_enough(freq: str, zone: str | None) -> None:
    times = pandas.date_range("2020-03-01", periods=41, freq=freq, tz=zone)
    table = frame(times, plan=np.arange(41.0))
    model = Forecaster(**{**TINY, "horizon": 1, "patch": 1}, future=["plan"]).fit(table[:40])
    found = model.predict(future=table[40:].drop(columns="y"))
    assert found["ds"].tolist() == [times[40]]


def test_numbers_in_place_of_the_times_of_fit_are_named_with_their_format() -> None:
    times = pandas.date_range("2020-03-01", periods=40, freq="h")
    model = Forecaster(**TINY).fit(table := frame(times))
    numbers = table.assign(ds=times.astype("datetime64[ms]").astype("int64"))
    with pytest.raises(
        DataError, match=r"'ds' are whole numbers \(1583.*; give `time_format='ms'`"
    ):
        model.predict(numbers)
    assert len(Forecaster(**TINY, time_format="ms").fit(numbers).predict(numbers)) > 0
    with pytest.raises(DataError, match=r"whole numbers \(0\), and the table .*; convert them"):
        model.predict(table.assign(ds=range(40)))


def test_what_is_known_ahead_may_be_in_another_zone() -> None:
    times = pandas.date_range("2020-03-01", periods=44, tz="Europe/Berlin")
    table = frame(times, plan=np.arange(44.0))
    model = Forecaster(**TINY, future=["plan"]).fit(table[:40])
    ahead = table[40:].assign(ds=times[40:].tz_convert("UTC"))
    assert model.predict(future=ahead)["ds"].tolist() == list(times[40:])
    with pytest.raises(DataError, match="has no time zone in the future table and time"):
        model.predict(future=table[40:].assign(ds=times[40:].tz_localize(None)))


def test_a_table_of_one_season_keeps_the_hours_of_the_one_it_is_like() -> None:
    """Days by UTC, which all show one hour of a zone while its clocks do not change."""
    days = pandas.date_range("2020-01-01", periods=300, tz="UTC").tz_convert("Europe/Berlin")
    whole = prepared(frame(days))
    assert not whole.is_wall
    assert prepared(frame(days[:30])).is_wall
    assert not prepared(frame(days[:30]), like=whole.timeline).is_wall
    assert not prepared(frame(days[:1])).is_wall, "one time shows no rule"
    midnights = frame(pandas.date_range("2020-01-01", periods=300, tz="Europe/Berlin"))
    assert prepared(frame(days[:1]), like=prepared(midnights).timeline).is_wall


@pytest.mark.parametrize(
    ("form", "freq"),
    [
        ("%Y%m%d", "D"), ("%Y%m", "MS"), ("%Y%m%d%H", "h"), ("%Y%m%d%H%M", "15min"),
        ("%Y%m%d%H%M%S", "s"),
    ],
)  # fmt: skip
def test_dates_as_whole_numbers_are_refused_without_a_format(form: str, freq: str) -> None:
    times = pandas.date_range("2016-12-20", periods=40, freq=freq)
    table = frame(times.strftime(form).astype("int64"))
    with pytest.raises(DataError, match=f"look like dates .*; give `time_format='{form}'`, or"):
        prepared(table)
    found = prepared(table, time_format=form)
    start = found.table.segments.start_times[0]
    assert pandas.Timestamp(start, unit="us") == times[0]
    assert len(found.table.segments) == 1
    assert prepared(table, roles=RoleRequest(ignore=("ds",))).roles.time is None


@pytest.mark.parametrize(
    "numbers",
    [np.arange(200001, 200041), np.arange(1990, 2030), np.arange(20161201, 20161251),
     np.arange(0, 400, 10), np.arange(40) + 10**8, np.arange(20161170, 20161210)],
    ids=str,
)  # fmt: skip
def test_numbers_that_are_no_dates_count(numbers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the last batch may read as dates, where those before do not."""
    monkeypatch.setattr("fastlstm.forecast.data.records._BATCH_ROWS", 4)
    found = prepared(frame(numbers))
    assert not found.has_clock
    assert found.frequency.step == numbers[1] - numbers[0]
    assert not any("since 1970" in note for note in found.notes)


@pytest.mark.parametrize(("unit", "size"), [("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)])
@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_numbers_since_1970_count_or_are_times(
    unit: str, size: int, kind: str, tmp_path: Path
) -> None:
    table = frame((1_480_000_000 + 3600 * np.arange(40)) * size)
    path = tmp_path / f"a.{kind}"
    table.to_csv(path, index=False) if kind == "csv" else table.to_parquet(path)
    counted = prepared(path)
    assert counted.frequency.step == 3600 * size
    told = f"would be 2016-11-24 15:06:40), give `time_format='{unit}'`"
    assert any(told in note for note in counted.notes)
    found = prepared(path, time_format=unit)
    assert str(found.frequency) == "1 hour"
    assert found.table.segments.start_times.tolist() == [1_480_000_000_000_000]


def test_dates_are_refused_though_the_last_batch_holds_the_first_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fastlstm.forecast.data.records._BATCH_ROWS", 4)
    days = [20161230, 20161231, 20170101, 20170102, 20161230]
    with pytest.raises(DataError, match="20161230 as 2016-12-30"):
        prepared(frame(days, unique_id=list("aaaab")))


def test_the_time_that_cannot_be_read_is_named_with_its_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fastlstm.forecast.data.records._BATCH_ROWS", 4)
    texts = [f"2020-01-{day:02}" for day in range(1, 31)]
    texts[20] = "soon"
    with pytest.raises(DataError, match=r"cannot be read: row 21 has 'soon'; expected 2016"):
        prepared(frame(texts))
    with pytest.raises(DataError, match="row 21 has 'soon'; expected the format of `time_form"):
        prepared(frame(texts), time_format="%Y-%m-%d")
    numbers = np.append(1_480_000_000 + 3600 * np.arange(20), 10**18)
    with pytest.raises(DataError, match=r"cannot be read: row 21 has 10{18}; expected the years"):
        prepared(frame(numbers), time_format="s")
    for number, form in ((2**60 + 1, "excel"), (2**63, "ns")):
        days = np.append(np.arange(43_000, 43_020, dtype=np.uint64), np.uint64(number))
        with pytest.raises(DataError, match=rf"row 21 has {number}; .* `time_format='{form}'`"):
            prepared(frame(days), time_format=form)


@pytest.mark.parametrize("unit", ["s", "ms"])
def test_times_of_more_microseconds_than_64_bits_hold_are_refused(unit: str) -> None:
    days = np.arange(40, dtype=np.int64)
    times = pa.array(np.where(days < 30, days, days + 2**55), pa.timestamp(unit))
    table = pa.table({"t": times, "v": np.arange(40.0)})
    with pytest.raises(DataError, match=rf"the time of row 31 in 't' is {2**55 + 30} {unit} since"):
        prepared(table)


def test_steps_of_whole_numbers_are_told_as_numbers() -> None:
    with pytest.raises(DataError, match=r"\(most often 4 \(15%\), .*\); resample them,"):
        prepared(frame(np.cumsum(np.arange(40) % 7 + 3)))
    assert prepared(frame([3])).frequency.unit == "rows"


@pytest.mark.parametrize("start", ["2020-01-01", "2020-01-03", "2020-01-06 16:00"])
@pytest.mark.parametrize("zone", [None, "America/New_York"])
def test_business_days_are_a_step(start: str, zone: str | None) -> None:
    days = pandas.bdate_range(start, periods=120, tz=zone, normalize=False)
    found = prepared(frame(days[:100]))
    assert found.frequency == BUSINESS_DAYS
    assert "one row every 1 business day" in found.notes[-1]
    assert found.table.segments.num_rows.tolist() == [100]
    model = Forecaster(**{**TINY, "horizon": 8}).fit(frame(days[:100]))
    assert model.predict()["ds"].tolist() == list(days[100:108])
    for end in (96, 97, 98, 99):
        again = model.predict(frame(days[:end]))["ds"].tolist()
        assert again == list(days[end : end + 8])


def test_a_weekend_in_any_row_makes_days_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastlstm.forecast.data.arrange._BLOCK_ROWS", 20)
    business = pandas.bdate_range("2020-01-01", periods=40)
    every = pandas.date_range("2020-01-01", periods=40)
    table = frame(business.append(every), unique_id=["a"] * 40 + ["b"] * 40)
    found = prepared(table)
    assert found.frequency == DAYS
    weeks = [pandas.date_range(monday, periods=5) for monday in ("2020-01-06", "2020-01-13")]
    assert prepared(frame(weeks[0])).frequency == DAYS
    apart = frame(weeks[0].append(weeks[1]), unique_id=["a"] * 5 + ["b"] * 5)
    assert prepared(apart).frequency == DAYS


@pytest.mark.parametrize(
    ("frequency", "times", "are_whole"),
    [
        (BUSINESS_DAYS, ["2020-01-03", "2020-01-04", "2020-01-06"], [False, False]),  # Fri Sat Mon
        (Frequency(1, "months"), ["2020-01-01", "2020-02-01T06", "2020-03-01T06"], [False, True]),
    ],
    ids=str,
)
def test_a_step_is_whole_between_two_times_of_its_kind(
    frequency: Frequency, times: list[str], are_whole: list[bool]
) -> None:
    found = frequency.are_whole_steps(np.array(times, "datetime64[us]").astype(np.int64))
    assert found.tolist() == are_whole


def test_a_week_of_a_table_of_business_days_is_one_too() -> None:
    week = frame(pandas.date_range("2020-01-06", periods=5))
    like = Timeline(BUSINESS_DAYS, None, None)
    assert prepared(week, like=like).frequency == BUSINESS_DAYS
    assert prepared(frame(pandas.date_range("2020-01-06", periods=9)), like=like).frequency == DAYS
    business = frame(pandas.bdate_range("2020-01-06", periods=9))
    found = prepared(business, like=Timeline(DAYS, None, None, may_miss=False))
    assert found.frequency == DAYS
    assert found.table.segments.num_rows.tolist() == [5, 4]


@pytest.mark.parametrize("freq", ["MS", "ME", "QS", "QE", "YS", "W-SUN", "W-MON", "2D", "15min"])
def test_forecasts_go_on_in_the_calendar(freq: str) -> None:
    times = pandas.date_range("2000-01-01", periods=64, freq=freq)
    model = Forecaster(**TINY).fit(frame(times[:60]))
    assert model.predict()["ds"].tolist() == list(times[60:])


def test_months_at_changing_hours_and_a_row_within_a_month_are_refused() -> None:
    """Midnights of a zone written in UTC; a second row in one month of a monthly table."""
    months = pandas.date_range("2020-01-01", periods=40, freq="MS", tz="Europe/Berlin")
    with pytest.raises(DataError, match="have no regular frequency"):
        prepared(frame(months.tz_convert("UTC")))
    plain = months.tz_localize(None)
    like = prepared(frame(plain)).timeline
    with_one = plain[:9].append(pandas.DatetimeIndex(["2020-09-15"])).append(plain[9:])
    with pytest.raises(DataError, match="have no regular frequency"):
        prepared(frame(with_one), like=like)
    with pytest.raises(DataError, match="have no regular frequency"):
        prepared(frame(with_one))


def test_a_file_that_changes_while_it_is_read_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days, cache = pandas.date_range("2020-01-01", periods=60), tmp_path / "cache"
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "a.parquet"
    frame(days[:20]).to_parquet(path)
    frame(days[20:]).to_parquet(tmp_path / "data" / "b.parquet")
    run = TableIngest.run

    def changed(*arguments: Any) -> Any:
        found = run(*arguments)
        frame(days[:10]).to_parquet(path)
        return found

    monkeypatch.setattr(TableIngest, "run", changed)
    with pytest.raises(DataError, match=r"a\.parquet changed while it was being read"):
        prepare_table(tmp_path / "data", cache_dir=cache)
    monkeypatch.setattr(TableIngest, "run", run)
    assert list((cache / "series" / "entries").iterdir()) == []
    frame(days[:20]).to_parquet(path)
    again = prepare_table(tmp_path / "data", cache_dir=cache)
    assert (again.from_cache, again.table.num_rows) == (False, 60)


@pytest.mark.parametrize(("unit", "size"), [("s", 10**3), ("s", 10**9), ("ms", 10**6)])
def test_numbers_in_another_unit_than_that_given_are_refused(unit: str, size: int) -> None:
    table = frame((1_480_000_000 + 3600 * np.arange(40)) * size)
    message = f"row 1 has 148{'0' * 7}{'0' * (len(str(size)) - 1)}; .* `time_format='{unit}'`"
    with pytest.raises(DataError, match=message):
        prepared(table, time_format=unit)


def test_periods_of_pandas_are_times() -> None:
    days = pandas.period_range("2020-01-01", periods=30, freq="D")
    by_index = frame(days).drop(columns="ds").set_axis(days)
    for table in (frame(days), by_index):
        found = prepared(table)
        assert found.frequency == DAYS
        assert found.table.segments.start_times.tolist() == [pandas.Timestamp("2020").value // 1000]


def test_whole_numbers_that_count_step_by_a_number() -> None:
    assert "40 rows, one row every 60" in prepared(frame(np.arange(0, 2400, 60))).notes
    assert "40 rows" in prepared(frame(np.arange(40))).notes


def test_column_names_that_are_not_utf_8_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("ds,größe\n1,1.5\n2,2.5\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"names are not UTF-8 .*; save the file as UTF-8"):
        prepared(path, look=False)


def test_local_times_get_their_zone_and_the_hour_that_comes_twice_its_order(tmp_path: Path) -> None:
    utc = pandas.date_range("2024-10-26", periods=72, freq="h", tz="UTC")
    local = utc.tz_convert("Europe/Berlin").tz_localize(None)
    for names in (None, ["a", "b"]):
        columns = frame(local)
        if names is not None:
            columns = pandas.concat([columns.assign(unique_id=name) for name in names])
        columns.to_csv(tmp_path / "a.csv", index=False)
        found = prepared(tmp_path / "a.csv", tz="Europe/Berlin")
        assert str(found.frequency) == "1 hour"
        assert len(found.table.segments) == len(names or "a")
        start = np.datetime64("2024-10-26", "us").astype(np.int64)
        assert (found.table.segments.start_times == start).all()
        assert found.time_zone == "Europe/Berlin"


@pytest.mark.parametrize("minutes", [60, 15])
@pytest.mark.parametrize("names", ["", "ab", "ab by time"])
def test_an_empty_row_at_a_time_that_the_clocks_skip_vanishes(minutes: int, names: str) -> None:
    steps = pandas.date_range("2024-03-30", periods=48 * 60 // minutes, freq=f"{minutes}min")
    is_skipped = np.asarray((steps.day == 31) & (steps.hour == 2))
    columns = frame(steps)
    columns.loc[is_skipped, "y"] = None
    if names:
        columns = pandas.concat([columns.assign(unique_id=name) for name in names[:2]])
    if names.endswith("time"):
        columns = columns.sort_values("ds", kind="stable")
    found = prepared(columns, tz="Europe/Berlin")
    assert not found.has_missing
    assert len(found.table.segments) == max(1, len(names[:2]))
    wanted = columns.sort_values("unique_id", kind="stable") if names else columns
    np.testing.assert_allclose(
        found.table.whole_rows(0, len(found.table.values))[:, 0], wanted["y"].dropna(), rtol=1e-6
    )
    empty = columns.assign(y=columns["y"].where(columns["ds"].dt.hour != 3))  # 3:00 stays
    assert prepared(empty, tz="Europe/Berlin").table.num_rows == found.table.num_rows


def test_times_are_rounded_to_a_duration(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    hours = pandas.date_range("2024-01-01", periods=50, freq="h")
    jittered = hours + pandas.to_timedelta(rng.integers(-300, 300, 50), unit="s")
    with pytest.raises(DataError, match="no regular frequency"):
        prepared(frame(jittered))
    found = prepared(frame(jittered), snap="1h")
    assert (str(found.frequency), len(found.table.segments)) == ("1 hour", 1)
    assert any("rounded to the nearest 1 hour" in note for note in found.notes)


@pytest.mark.parametrize("form", [None, "%d.%m.%Y %H:%M"])
def test_of_an_interval_the_start_is_the_time(form: str | None, tmp_path: Path) -> None:
    show = form or "%Y-%m-%d %H:%M"
    hours = pandas.date_range("2024-01-01", periods=30, freq="h")
    texts = [f"{t.strftime(show)} - {(t + hours.freq).strftime(show)}" for t in hours]
    found = prepared(frame(texts), time_format=form)
    assert str(found.frequency) == "1 hour"
    assert found.table.segments.start_times[0] == hours[0].value // 1000
    assert any("are intervals: their starts are used" in note for note in found.notes)
