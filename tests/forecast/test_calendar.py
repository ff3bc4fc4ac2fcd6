"""The calendar: future covariates computed from the time column."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas
import pytest
import torch

from fastlstm import Forecaster
from fastlstm.errors import ConfigError, DataError
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.calendar import calendar_names
from fastlstm.forecast.data.preparation import prepare
from fastlstm.forecast.window_forecaster import load_window_forecaster

QUICK: dict[str, Any] = {
    "horizon": 4, "input_size": 8, "hidden_size": 8, "steps": 2, "split": (300, 100, 100),
}  # fmt: skip


def daily(effect: float, rows: int = 500, zone: str | None = None, freq: str = "D") -> Any:
    """Noise plus an effect on Saturdays and Sundays."""
    rng = np.random.default_rng(0)
    times = pandas.date_range("2021-03-01", periods=rows, freq=freq, tz=zone)
    weekend = (times.day_of_week >= 5).astype(float)
    return pandas.DataFrame({"ds": times, "y": rng.normal(size=rows) + effect * weekend})


def columns_of(frame: Any, *parts: str) -> Any:
    """Returns times and calendar of a table."""
    dataset = Forecaster(**QUICK, calendar=parts).fit(frame).dataset_
    values = dataset.table.rows(0, dataset.table.num_rows)[:, 1:]
    return pandas.DataFrame(values, columns=dataset.table.columns[1:])


def test_a_column_named_like_a_calendar_part_leaves_that_part_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    frame = daily(9.0, freq="h").assign(hour_sin1=1.0)
    frame["hour_sin1"] = np.arange(500.0)
    with caplog.at_level("INFO", "fastlstm"):
        model = Forecaster(**QUICK, linear=True).fit(frame)
    assert "the calendar leaves out hour, as the table has a column 'hour_sin1'" in caplog.text
    assert "hour" not in (model.stored_.config.calendar or ())


def test_notes_on_columns_are_logged_in_python(caplog: pytest.LogCaptureFixture) -> None:
    frame = daily(9.0).assign(flat=1.0, large=np.arange(500.0) * 1e7)
    warned = pytest.warns(UserWarning, match="the same in every row")
    with warned, caplog.at_level("INFO", "fastlstm"):
        Forecaster(**QUICK, target="y", verbose=False).fit(frame)
    assert "ignored columns (the same in every row): flat" in caplog.text
    assert "column 'large' ranges from 0 to 4.99e+09: float32 keeps seven digits" in caplog.text


def promoted(rows: int = 500) -> Any:
    """Sales of a weekday, and half as much again on days of promotions, which are known ahead."""
    promo = (np.random.default_rng(1).random(rows) < 0.2).astype(float)
    return daily(6.0, rows).assign(promo=promo, y=lambda frame: frame["y"] + 6 * promo)


def test_the_calendar_is_tried_beside_future_covariates(tmp_path: Any) -> None:
    frame, given = promoted(), {**QUICK, "input_size": 2, "target": "y", "future": "promo"}
    model = Forecaster(**given).fit(frame)
    assert model.stored_.config.calendar == ("weekday",)
    assert (
        "reads also",
        "promo, " + ", ".join(calendar_names(("weekday",))),
    ) in model.stored_.rows()
    plain = Forecaster(**given, calendar="none").fit(frame)
    assert model.backtest()["ridge"]["mae"] < 0.8 * plain.backtest()["ridge"]["mae"]
    ahead = frame[["ds", "promo"]].assign(ds=frame["ds"] + pandas.Timedelta(days=500))
    found = model.predict(future=ahead)
    due = 6.0 * (found["ds"].dt.day_of_week >= 5) + 6 * frame["promo"][:4].to_numpy()
    assert np.abs(found["y"] - due).max() < 3


def test_a_useless_calendar_leaves_the_linear_path_of_the_given_covariates() -> None:
    """The same weights as without a calendar: they are not fitted again."""
    frame = daily(0.0).assign(promo=promoted()["promo"], y=lambda f: f["y"] + 6 * f["promo"])
    given = {**QUICK, "target": "y", "future": "promo"}
    model, plain = (Forecaster(**given, calendar=c).fit(frame) for c in (None, "none"))
    assert model.stored_.config.calendar == ()
    for name in ("linear_weight", "linear_bias", "linear_future"):
        pair = (getattr(each.network_, name) for each in (model, plain))
        torch.testing.assert_close(*pair)
    assert (plain.network_.linear_future > 0.5).all()


def test_a_year_and_a_half_may_teach_the_season_of_the_year() -> None:
    frame = daily(0.0, 800)
    season = np.sin(2 * np.pi * frame["ds"].dt.day_of_year / 365.25)
    given = {**QUICK, "horizon": 40, "normalize": "last"}
    for effect, split, taken in ((4, (560, 120, 120), True), (0, (560, 120, 120), False),
                                 (4, (540, 120, 140), False)):  # fmt: skip
        table = frame.assign(y=frame["y"] + effect * season)
        model = Forecaster(**{**given, "split": split}).fit(table)
        assert ("year" in model.stored_.config.calendar) == taken, (effect, split)


def test_columns_are_sines_of_local_time() -> None:
    times = pandas.date_range("2021-03-01", periods=500, freq="h", tz="UTC")
    frame = pandas.DataFrame(
        {"ds": times.tz_convert("Europe/Berlin"), "y": np.random.default_rng(0).normal(size=500)}
    )
    found, local = columns_of(frame, "weekday", "hour"), times.tz_convert("Europe/Berlin")
    hour = 2 * np.pi * local.hour / 24
    week = 2 * np.pi * (local.day_of_week + local.hour / 24) / 7
    assert list(found)[:4] == ["hour_sin1", "hour_cos1", "hour_sin2", "hour_cos2"]
    np.testing.assert_allclose(found["hour_sin1"], np.sin(hour), atol=1e-6)
    np.testing.assert_allclose(found["hour_cos2"], np.cos(2 * hour), atol=1e-6)
    np.testing.assert_allclose(found["weekday_sin3"], np.sin(3 * week), atol=1e-6)
    assert len(found.columns) == 4 + 6


@pytest.mark.parametrize("freq", ["h", "MS", "B"])
def test_every_row_has_the_calendar_of_its_own_time(freq: str) -> None:
    times = pandas.date_range("2021-03-01", periods=60, freq=freq)
    kept = np.r_[0:20, 23:45, 50:60]  # three segments
    parts = [pandas.DataFrame({"id": n, "ds": times[kept], "y": kept % 7.0}) for n in "ab"]
    config = ForecastConfig(horizon=4, series="id", calendar=("year",), gaps="split")
    dataset = prepare(pandas.concat(parts), config)
    assert len(dataset.table.segments.series) == 6
    found = dataset.table.rows(0, dataset.table.num_rows)[
        :, dataset.table.columns.index("year_sin1")
    ]
    days = (times[kept] - pandas.Timestamp("1970-01-05")) / pandas.Timedelta("1D")
    expected = np.sin(2 * np.pi * np.tile(days, 2) / 365.25)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_calendar_that_lowers_the_validation_error_is_used() -> None:
    notes: list[str] = []
    model = Forecaster(
        **QUICK | {"input_size": 2},
        observers=[lambda event: notes.append(str(event.get("text")))],
    ).fit(daily(3.0))
    assert model.stored_.config.calendar == ("weekday",)
    assert any("the calendar (weekday) lowers" in note for note in notes)
    scores = model.backtest()
    plain = Forecaster(**QUICK | {"input_size": 2}, calendar="none").fit(daily(3.0)).backtest()
    for name in ("forecaster", "ridge"):
        assert scores[name]["mae"] < 0.8 * plain[name]["mae"]


def test_a_calendar_without_effect_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="fastlstm"):
        model = Forecaster(**QUICK).fit(daily(0.0))
    told = next(text for text in caplog.messages if "the calendar (weekday) is left out" in text)
    assert "and needs -1%; `calendar=('weekday',)` takes it" in told
    assert model.stored_.config.calendar == ()
    assert model.network_.config.num_future == 0


def test_forecasts_follow_the_calendar_after_the_table_ends(tmp_path: Any) -> None:
    frame = daily(8.0)
    model = Forecaster(**QUICK | {"input_size": 2}).fit(frame)
    model.save(tmp_path / "model")
    again = Forecaster.load(tmp_path / "model")
    for rows in (494, 500):  # ends on a Thursday and on a Wednesday
        table = again.predict(frame[:rows])
        is_weekend = table["ds"].dt.day_of_week >= 5
        assert (table["y"][is_weekend] > 5).all()
        assert (table["y"][~is_weekend] < 3).all()
    np.testing.assert_array_equal(again.predict(frame)["y"].to_numpy(), model.predict()["y"])
    again.partial_fit(frame)
    assert again.network_.config.num_future == 6
    served = load_window_forecaster(tmp_path / "model")
    assert served.future.names[0] == "weekday_sin1"


def test_a_calendar_is_chosen_by_name_or_off() -> None:
    assert Forecaster(**QUICK, calendar="none").fit(daily(8.0)).stored_.config.calendar == ()
    frame = daily(0.0)
    frame["plan"] = 1.0 * (np.arange(500) % 3)
    both = Forecaster(**QUICK, calendar="weekday", future=("plan",)).fit(frame)
    assert both.dataset_.table.columns[:3] == ("y", "plan", "weekday_sin1")
    ahead = pandas.DataFrame(
        {"ds": pandas.date_range(frame["ds"].iloc[-1], periods=5)[1:], "plan": 1.0}
    )
    assert len(both.predict(future=ahead)) == 4


def test_an_impossible_calendar_is_refused() -> None:
    with pytest.raises(ConfigError, match="'month', expected some of hour, weekday, year, or none"):
        Forecaster(**QUICK, calendar="month").fit(daily(0.0))
    with pytest.raises(DataError, match="no column of times"):
        Forecaster(**QUICK, calendar="hour").fit(np.arange(500.0) % 7)
    frame = daily(0.0).assign(weekday_sin1=np.arange(500.0))
    with pytest.raises(DataError, match="rename it"):
        Forecaster(**QUICK, calendar="weekday").fit(frame)
    assert Forecaster(**QUICK, target="y").fit(frame).network_.config.num_future == 0
