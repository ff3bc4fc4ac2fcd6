"""`normalize="log"`: chosen where a linear forecast of logarithms is better."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fastlstm import Forecaster
from fastlstm.errors import ConfigError
from fastlstm.forecast import forecast_table
from fastlstm.forecast.model.network import ForecasterConfig, ForecastNetwork
from fastlstm.forecast.window_forecaster import load_window_forecaster

pytestmark = pytest.mark.filterwarnings("ignore:80 % intervals cover")  # after few steps
QUICK: dict[str, Any] = {
    "horizon": 7, "input_size": 28, "patch": 7, "hidden_size": 8, "steps": 5, "split": "60/20/20",
    "target": "y", "calendar": "none",
}  # fmt: skip


def sales(is_product: bool = True, rows: int = 420) -> pd.DataFrame:
    """Two series of a season, a weekday and noise, of which each multiplies the others or adds."""
    rng, day = np.random.default_rng(0), np.arange(rows)
    effect = 0.8 * np.sin(day / 60) + 0.7 * (day % 7 == 5)
    parts = []
    for name, level in (("a", 20.0), ("b", 900.0)):
        noise = effect + 0.1 * rng.normal(size=rows)
        y = level * np.exp(noise) if is_product else level * (3 + noise)
        times = pd.date_range("2021-03-01", periods=rows, freq="D")
        parts.append(pd.DataFrame({"unique_id": name, "ds": times, "y": y}))
    return pd.concat(parts, ignore_index=True)


@pytest.fixture(scope="module")
def model() -> Forecaster:
    return Forecaster(**QUICK).fit(sales())


def test_logarithms_are_taken_where_they_lower_the_validation_error(model: Forecaster) -> None:
    assert model.stored_.config.normalize == model.network_.config.normalize == "log"
    plain = Forecaster(**QUICK, normalize="last").fit(sales())
    for name, share in (("forecaster", 1.0), ("ridge", 0.98)):
        assert model.backtest()[name]["mae"] < share * plain.backtest()[name]["mae"]
    sums = sales(is_product=False)
    assert Forecaster(**QUICK).fit(sums).stored_.config.normalize == "last"
    assert Forecaster(**QUICK, output="student_t").fit(sales()).stored_.config.normalize == "last"
    assert Forecaster(**QUICK, tbptt=14).fit(sales()).stored_.config.normalize == "last"
    for value in (-1.0, 0.0):  # a single 0 may be a mistake
        below = sales().assign(y=lambda frame, v=value: frame["y"].where(frame.index != 3, v))
        assert Forecaster(**QUICK).fit(below).stored_.config.normalize == "last"


def closed() -> pd.DataFrame:
    """`sales` of shops that are closed on Sundays."""
    frame = sales(rows=1200)
    return frame.assign(y=frame["y"].where(frame["ds"].dt.day_of_week != 6, 0))


def test_closed_days_have_logarithms_and_are_forecast_as_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given, table = {**QUICK, "calendar": None}, closed()
    with caplog.at_level("INFO", "fastlstm"):
        model = Forecaster(**given).fit(table)
    assert model.stored_.config.calendar == ("weekday",)
    assert model.network_.config.normalize == "log"
    for told in (
        "14% of the values of the target are 0, none is below: no",
        "`normalize='log'` low",
    ):
        assert told in caplog.text
    plain = Forecaster(**given, normalize="last").fit(table)
    assert model.backtest()["forecaster"]["mae"] < 0.95 * plain.backtest()["forecaster"]["mae"]
    found = model.predict_quantiles(quantiles=(0.01, 0.5, 0.9))
    sunday = found["ds"].dt.day_of_week == 6
    assert (found.loc[sunday, "y-q0.5"] == 0).all()
    assert found.loc[~sunday, "y-q0.5"].min() > 10
    assert found.filter(like="y-q").to_numpy().min() >= 0
    sundays = table["ds"][table["ds"].dt.day_of_week == 6]
    ends = table[(table["unique_id"] == "b") & (table["ds"] <= sundays.max())]
    assert model.predict(ends)["y"].max() > 300  # behind a 0
    shut = table.assign(y=lambda frame: frame["y"].where(frame["ds"] < "2024-05-01", 0))
    assert model.predict(shut)["y"].max() < 30  # for longer than the input


@pytest.mark.filterwarnings("ignore:the target is 0 or less in")
@pytest.mark.parametrize("normalize", ["last", "log"])
def test_no_forecast_is_below_0_where_no_value_is(normalize: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rare = sales().assign(y=rng.poisson(0.7, 840).astype(float))
    given = {**QUICK, "normalize": normalize, "learning_rate": 0.05}
    model = Forecaster(**given).fit(rare)
    assert model.network_.config.non_negative
    model.save(tmp_path)
    ends = rare.groupby("unique_id").tail(28)["y"].to_numpy(np.float32).reshape(2, 28, 1)
    served = load_window_forecaster(tmp_path)
    for levels in ((0.05, 0.5, 0.95), ()):
        found = model.predict_quantiles(quantiles=levels) if levels else model.predict()
        values = found.filter(like="y").to_numpy()
        assert values.min() >= 0
        run = served.run(ends, statics=np.arange(2, dtype=np.float32)[:, None])
        numbers = run.arrays(levels)["quantiles" if levels else "forecast"]
        np.testing.assert_allclose(numbers.reshape(values.shape), values, atol=1e-4)
    free = Forecaster(**{**given, "normalize": "last"}, non_negative=False).fit(rare)
    assert free.predict_quantiles(quantiles=(0.05,))["y-q0.05"].min() < 0


def test_a_bound_that_does_not_hold_is_refused() -> None:
    below = sales().assign(y=lambda frame: frame["y"].where(frame.index % 99 > 0, -1.0))
    with pytest.raises(ConfigError, match=r"`non_negative` is True, but 'y' is below 0 in 9 rows"):
        Forecaster(**QUICK, non_negative=True).fit(below)
    with pytest.raises(ConfigError, match="expected point or quantiles with `non_negative=True`"):
        Forecaster(**QUICK, non_negative=True, output="student_t").fit(sales())


def test_a_table_without_times_or_series_has_logarithms_too() -> None:
    y = sales()["y"].to_numpy()[:420]
    given = {name: value for name, value in QUICK.items() if name != "target"}
    model = Forecaster(**given).fit(y)
    assert model.stored_.config.normalize == "log"
    assert np.abs(np.log(model.predict()[:, 0] / y[-21:-14])).max() < 1


def test_saved_served_and_trained_on_it_stays_the_same(model: Forecaster, tmp_path: Path) -> None:
    model.save(tmp_path)
    again = Forecaster.load(tmp_path)
    due = model.predict()["y"].to_numpy()
    np.testing.assert_allclose(again.predict(sales())["y"].to_numpy(), due, rtol=1e-6)
    ends = sales().groupby("unique_id").tail(28)["y"].to_numpy(np.float32).reshape(2, 28, 1)
    served = load_window_forecaster(tmp_path)
    known = served.run(ends, statics=np.arange(2, dtype=np.float32)[:, None])
    np.testing.assert_allclose(known.arrays()["forecast"].reshape(-1), due, rtol=1e-4)
    alone = (
        served.run(ends).arrays()["forecast"].reshape(-1)
    )  # unknown series are scaled by their window
    np.testing.assert_allclose(alone, due, rtol=1e-4)
    renamed = sales().assign(unique_id=lambda frame: frame["unique_id"] + "x")
    np.testing.assert_allclose(again.predict(renamed)["y"].to_numpy(), due, rtol=1e-4)
    assert again.set_params(steps=3).partial_fit(sales()).stored_.config.normalize == "log"


def test_a_target_of_0_at_predict_is_told_once(
    model: Forecaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecast_table, "SERIES_AT_ONCE", 1)
    closed = sales().assign(y=lambda frame: frame["y"].where(frame.index % 420 != 415, 0.0))
    with pytest.warns(UserWarning, match="a target is 0 or less, and the forecaster") as told:
        found = model.predict(closed)["y"]
    assert len(told) == 1  # once, not for every block of series
    assert np.isfinite(found).all()


def test_the_forecast_grows_with_the_level() -> None:
    torch.manual_seed(0)
    sizes = ForecasterConfig(
        input_size=8, horizon=4, patch=2, hidden_size=6, embed_size=4, normalize="log",
        output="quantiles",
    )  # fmt: skip
    network = ForecastNetwork(sizes).double().eval()
    x = torch.rand(3, 12, 1).double() + 0.5
    torch.testing.assert_close(network(5 * x), 5 * network(x))
    torch.nn.init.zeros_(network.head.weight)
    torch.nn.init.zeros_(network.head.bias)
    torch.testing.assert_close(network(x)[..., 0], x[:, 7:8].expand(3, 4, 1))


def test_logarithms_of_other_outputs_and_of_streams_are_refused() -> None:
    for given, message in (
        ({"output": "student_t"}, "`output` is 'student_t', expected point or quantiles with"),
        ({"tbptt": 14}, "`normalize` is 'log': `tbptt` needs one direction"),
    ):
        with pytest.raises(ConfigError, match=message):
            Forecaster(**{**QUICK, **given}, normalize="log").fit(sales())


def test_rows_without_a_logarithm_are_told_at_fit() -> None:
    zeros = sales().assign(y=lambda frame: frame["y"].where(frame.index % 7 != 6, 0.0))
    with pytest.warns(UserWarning, match=r"the target is 0 or less in 120 rows, which have no"):
        Forecaster(**QUICK, normalize="log").fit(zeros)
