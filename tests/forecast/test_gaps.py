"""`predict` and `backtest` treat gaps and missing values alike."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastlstm import Forecaster
from fastlstm.errors import DataError
from series_frames import long_table

QUICK: dict[str, Any] = {
    "horizon": 6, "input_size": 24, "patch": 6, "hidden_size": 8, "steps": 3, "split": "60/20/20",
    "linear": False,
}  # fmt: skip
ROWS = 240


def table(missing: Any = (), dropped: Any = ()) -> pa.Table:
    """Two waves, the first with missing values and dropped rows."""
    hours = np.tile(np.arange(ROWS), 2)
    y = np.sin(hours / 4) + 10 * np.repeat([0.0, 1.0], ROWS)
    y[list(missing)] = np.nan
    whole = long_table(ROWS, 2, y=y.astype(np.float32), temp=None)
    return whole.take([row for row in range(2 * ROWS) if row not in dropped])


HOLES = {
    "none": table(),
    "gap": table(dropped=range(100, 104)),
    "missing": table([100]),
    "missing end": table(range(230, 240)),
    "gap at end": table(dropped=range(225, 228)),
}


def outcome(use: Any) -> str | None:
    """Returns the error, or None without one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            use()
    except DataError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def models() -> dict[tuple[str, str], Forecaster]:
    fitted = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for gaps in ("split", "fill"):
            for hole in ("none", "missing"):
                model = Forecaster(**QUICK, gaps=gaps)  # type: ignore[arg-type]
                fitted[gaps, hole] = model.fit(HOLES[hole])
    return fitted


@pytest.mark.parametrize("hole", HOLES)
@pytest.mark.parametrize("at_fit", ["none", "missing"])
@pytest.mark.parametrize("gaps", ["split", "fill"])
def test_predict_and_backtest_take_the_same_tables(
    models: dict[tuple[str, str], Forecaster], gaps: str, at_fit: str, hole: str
) -> None:
    model, given = models[gaps, at_fit], HOLES[hole]
    found = [outcome(lambda: model.predict(given)), outcome(lambda: model.backtest(frame=given))]
    if gaps == "split" and at_fit == "none" and hole == "missing":
        assert found[0] == found[1]
        assert "has missing values, the table at fit had none" in str(found[0])
    else:
        assert found == [None, None]


def test_a_target_that_ends_before_others_is_named() -> None:
    y, hours = np.sin(np.arange(ROWS) / 4), np.arange(ROWS)
    gone = np.where(hours < ROWS - 9, y, np.nan)
    given = pa.table({"ds": hours.astype("M8[h]").astype("M8[us]"), "a": y, "b": gone})
    model = Forecaster(**QUICK, target=("a", "b")).fit(given)
    with pytest.warns(UserWarning, match="'b' has no value in the last 9 rows: its"):
        model.predict()


def business_days(*closed: int) -> pa.Table:
    """Prices of weekdays; the exchange is closed on some of them."""
    days = np.busday_offset("2022-01-03", np.arange(ROWS), roll="forward")
    prices = 100 + np.sin(np.arange(ROWS) / 4)
    kept = [row for row in range(ROWS) if row not in closed]
    return pa.table({"ds": days[kept].astype("M8[us]"), "y": prices[kept]})


def test_prices_with_a_holiday_near_the_end_are_forecast_as_they_were_trained() -> None:
    given = business_days(50, 130, 225)
    with pytest.warns(UserWarning, match="3 gaps in time: filled with 3 empty rows"):
        model = Forecaster(**QUICK).fit(given)
    assert np.isfinite(model.predict(given)["y"].to_numpy()).all()  # without the same warning
    with pytest.warns(UserWarning, match="2 gaps in time: filled with 2 empty rows") as told:
        model.predict(business_days(50, 130))
    assert told[0].filename == __file__
    assert outcome(lambda: model.backtest(frame=given)) is None
    whole = Forecaster(**QUICK).fit(business_days())  # not trained with missing values
    assert "a forecast reads the last 24; give more" in str(outcome(lambda: whole.predict(given)))


def test_training_warns_where_the_forecast_will_be_refused() -> None:
    told = "series 's0' ends in 12 rows without gaps, a forecast reads the last"
    given = HOLES["gap at end"]
    with pytest.warns(UserWarning, match=f"forecasts of this table will leave series out: {told}"):
        model = Forecaster(**QUICK, gaps="split").fit(given)
    with pytest.warns(UserWarning, match=f"not forecast: {told} 24; give .*`gaps='fill'`"):
        assert model.predict(given)["unique_id"].to_pylist() == ["s1"] * 6
    alone = given.filter(pa.compute.equal(given["unique_id"], "s0"))
    with pytest.warns(UserWarning, match=f"forecasts of this table will be refused: {told}"):
        model = Forecaster(**QUICK, gaps="split").fit(alone)
    assert "`input_size` or with `gaps='fill'`" in str(outcome(lambda: model.predict(alone)))


@pytest.mark.parametrize("num_missing", [6, 24, 200])
def test_forecasts_begin_behind_the_last_target(num_missing: int) -> None:
    """As where a table has no rows behind it; `backtest` has windows without any target."""
    holes = table(range(ROWS - num_missing, ROWS))
    model = Forecaster(**{**QUICK, "steps": 30}).fit(HOLES["missing"])
    note = f"{num_missing} rows behind the last target of a series: dropped, forecasts begin there"
    assert note in model.forecasts(holes).dataset.notes
    found = model.predict(holes)
    rows = [row for row in range(2 * ROWS) if not ROWS - num_missing <= row < ROWS]
    assert found.equals(model.predict(holes.take(rows)))
    holes = table(range(ROWS - num_missing - 7, ROWS - 7))
    assert np.isfinite(list(model.backtest(frame=holes)["forecaster"].values())).all()


@pytest.mark.parametrize("output", ["point", "quantiles", "negative_binomial"])
def test_a_series_without_any_value_has_no_forecast(output: Any) -> None:
    holes = table(range(ROWS))
    y = np.round(holes["y"].to_numpy() + 5)
    holes = holes.set_column(2, "y", pa.array(y))
    model = Forecaster(**QUICK, output=output)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*has no value")
        model.fit(holes)
    with pytest.warns(UserWarning, match="series 's0' has no value of 'y': such forecasts are NaN"):
        found = model.predict(holes)["y"].to_numpy()
    assert np.isnan(found[:6]).all()
    assert np.isfinite(found[6:]).all()
    with pytest.warns(UserWarning, match="has no value"):
        bands = model.predict_quantiles(holes)
    assert np.isnan(bands["y-q0.1"].to_numpy()[:6]).all()
    assert model.backtest(frame=holes)["forecaster"]["num_values"] == 43 * 6


def test_rows_split_for_one_forecaster_are_not_those_of_another(tmp_path: Path) -> None:
    """A table with a missing value and a gap: the first is refused it, the second fills the gap."""
    path, holes = tmp_path / "t.parquet", table([100], range(120, 122))
    pq.write_table(holes, path)
    for cache in ("shared", "own"):
        options = {**QUICK, "cache_dir": str(tmp_path / cache)}
        if cache == "shared":
            first = Forecaster(**options).fit(HOLES["none"])
            assert outcome(lambda model=first: model.predict(path)) is not None
        second = Forecaster(**options).fit(HOLES["missing"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = second.backtest(frame=path)["naive"]
        if cache == "shared":
            want = found
    assert found == want


def test_a_table_whose_ends_are_dropped_misses_nothing() -> None:
    model = Forecaster(**QUICK).fit(HOLES["none"])
    assert model.predict(HOLES["missing end"]).num_rows == 2 * QUICK["horizon"]
