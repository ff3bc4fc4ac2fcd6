"""Forecasts as tables: rows, times, units and kinds."""

from __future__ import annotations

import datetime

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from fastlstm import Forecaster
from fastlstm.errors import DataError
from fastlstm.forecast import forecast_table
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.preparation import prepare
from fastlstm.forecast.forecast_table import Forecasts, as_kind, kind_of
from forecast_server import L, fit_plain, h
from series_frames import long_table


@pytest.fixture(scope="module")
def model() -> Forecaster:
    return fit_plain()


def test_forecasts_are_in_the_units_of_the_table(model: Forecaster) -> None:
    """The last window of the table needs no actual values."""
    cut = model.dataset_.table.segments.first_rows + 120 - L - h
    scaled, _ = next(model.stored_.forecast(model._inputs, cut))
    shorter = prepare(long_rows(model, 120 - h), ForecastConfig(target=("y",)))
    found = Forecasts(model.stored_, shorter, model._table(long_rows(model, 120 - h))[1]).table()
    mean, std = (scale[:, :1] for scale in model._inputs.scales(np.arange(3)))
    expected = scaled[..., 0, 0].numpy() * std + mean
    np.testing.assert_allclose(found["y"].to_numpy().reshape(3, h), expected, rtol=1e-5)


def long_rows(model: Forecaster, num_rows: int) -> pa.Table:
    """The first rows of each series that the model was fitted on."""
    from forecast_server import waves

    return waves().filter(pa.array(np.tile(np.arange(120) < num_rows, 3)))


def test_many_series_are_forecast_in_parts(
    model: Forecaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Forecasts(model.stored_, model.dataset_, model._inputs).table()
    monkeypatch.setattr(forecast_table, "SERIES_AT_ONCE", 2)
    parts = Forecasts(model.stored_, model.dataset_, model._inputs).table()
    np.testing.assert_allclose(whole["y"].to_numpy(), parts["y"].to_numpy(), rtol=1e-5)
    assert whole.drop_columns(["y"]).equals(parts.drop_columns(["y"]))


def test_a_series_that_is_too_short_is_left_out_and_named(model: Forecaster) -> None:
    rows, whole = np.tile(np.arange(120), 3), model.predict()
    table = long_rows(model, 120).filter(pa.array(rows < np.repeat([120, L - 1, 120], 120)))
    with pytest.warns(
        UserWarning, match="^not forecast: series 's1' ends in 23 rows without gaps, a"
    ):
        found = model.predict(table)
    assert found["unique_id"].to_pylist() == ["s0"] * h + ["s2"] * h
    expected = np.delete(whole["y"].to_numpy().reshape(3, h), 1, 0)
    np.testing.assert_allclose(found["y"].to_numpy().reshape(2, h), expected, rtol=1e-5)
    with pytest.warns(UserWarning, match="not forecast"):
        forecasts = model.forecasts(table)
    assert forecasts.num_rows == 2 * h
    assert {panel["series"] for panel in forecasts.events(None, 9)} == {"s0", "s2"}
    with pytest.raises(DataError, match="too short to forecast; name others"):
        forecasts.plot(["s1"])


def test_short_series_are_counted(model: Forecaster) -> None:
    rows = np.tile(np.arange(120), 3)
    is_short = rows < np.repeat([20, 7, 5], 120)
    text = r"'s0' ends in 20 rows without gaps, 's1' in 7, 's2' in 5 \(3 series are too short\)"
    with pytest.raises(DataError, match=text):
        model.predict(long_rows(model, 120).filter(pa.array(is_short)))


def test_times_of_local_time_stay_local() -> None:
    """Clocks in Berlin go forward after the last row."""
    start = datetime.datetime(2024, 3, 31) - datetime.timedelta(hours=48)
    table = long_table(49, 1, temp=None).drop_columns(["unique_id", "ds"])
    ds = pa.array([start + datetime.timedelta(hours=n) for n in range(49)], pa.timestamp("us"))
    zoned = pa.compute.assume_timezone(ds, "Europe/Berlin")
    model = Forecaster(
        horizon=3, input_size=8, patch=1, hidden_size=4, steps=1, split="60/20/20"
    ).fit(table.append_column("ds", zoned))
    shown = [str(time)[:16] for time in model.predict()["ds"].to_pylist()]
    assert shown == ["2024-03-31 01:00", "2024-03-31 03:00", "2024-03-31 04:00"]


def test_a_forecast_has_the_kind_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"step": [0, 1], "y": [1.0, 2.0], "z": [3.0, 4.0]})
    for frame, kind in (
        (np.zeros(2), np.ndarray),
        (pd.DataFrame(), pd.DataFrame),
        (pl.DataFrame(), pl.DataFrame),
        (table, pa.Table),
        ("a.csv", pd.DataFrame),
        (["a.csv"], pd.DataFrame),
    ):
        found = as_kind(table, kind_of(frame))
        assert type(found) is kind
        if kind is np.ndarray:
            assert found.tolist() == [[1.0, 3.0], [2.0, 4.0]]
        else:
            assert list(found["z"]) == [3.0, 4.0] or found["z"].to_pylist() == [3.0, 4.0]
    monkeypatch.setattr(forecast_table, "find_spec", lambda _: None)
    assert kind_of("a.csv") == "arrow", "without pandas"
