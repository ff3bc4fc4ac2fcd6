"""`effects`: what columns known ahead and the calendar add to a target, learned before the LSTM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from fastlstm import Forecaster
from fastlstm.errors import ConfigError
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.preparation import prepare
from fastlstm.forecast.data.splits import split_table
from fastlstm.forecast.effects import _rows as _training_rows
from fastlstm.forecast.effects import fit_effects
from fastlstm.forecast.model.network import CovariateEffects, ForecasterConfig, ForecastNetwork
from fastlstm.forecast.plan import untrained_forecaster
from fastlstm.forecast.ridge import Ridge, _rows, fit_ridges, joint_ridge, ridge_forecast
from fastlstm.forecast.table_schema import apply_schema

QUICK: dict[str, Any] = {"horizon": 6, "input_size": 24, "hidden_size": 16, "steps": 5}
COLUMNS: dict[str, Any] = {"target": "y", "time": "ds", "future": "warmth"}
pytestmark = pytest.mark.filterwarnings("ignore:80 % intervals cover")  # after few steps


def heated(rows: int = 1500, slope: float = 1.0) -> pandas.DataFrame:
    """Heat needed below 0 degrees and cooling above, more of both at noon, on a slow walk."""
    rng = np.random.default_rng(0)
    hour, warmth = np.arange(rows) % 24, rng.normal(size=rows)
    for row in range(1, rows):
        warmth[row] = 0.8 * warmth[row - 1] + 0.6 * warmth[row]
    walk = np.cumsum(0.05 * rng.normal(size=rows))
    y = (
        20
        + walk
        + slope * np.abs(warmth) * (1 + (abs(hour - 12) < 4))
        + 0.1 * rng.normal(size=rows)
    )
    times = pandas.date_range("2024-01-01", periods=rows, freq="h")
    return pandas.DataFrame({"ds": times, "y": y, "warmth": warmth})


def test_effects_that_bend_and_combine_are_learned(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    frame = heated()
    with caplog.at_level("INFO", "fastlstm"):
        model = Forecaster(**QUICK, **COLUMNS).fit(frame[:-6])
    assert model.stored_.config.effects is model.network_.config.effects is True
    assert model.stored_.given.effects is None
    assert model.stored_.config.calendar == ("hour", "weekday")
    assert "the nonlinear effects of warmth and the calendar (hour, weekday)" in caplog.text
    plain = Forecaster(**QUICK, **COLUMNS, effects=False).fit(frame[:-6])
    found, before = model.backtest(), plain.backtest()
    for name in ("forecaster", "ridge"):
        assert found[name]["mae"] < 0.5 * before[name]["mae"]
    ahead = frame[-6:][["ds", "warmth"]]
    model.save(tmp_path)
    again = Forecaster.load(tmp_path).predict(frame[:-6], future=ahead)["y"]
    np.testing.assert_array_equal(again, model.predict(future=ahead)["y"])
    assert np.abs(again.to_numpy() - frame["y"][-6:].to_numpy()).mean() < 0.5


def test_effects_of_noise_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "fastlstm"):
        model = Forecaster(**QUICK, **COLUMNS).fit(heated(slope=0.0))
    assert model.stored_.config.effects is False
    assert model.network_.effects is None
    assert "the nonlinear effects of warmth are left out" in caplog.text


def test_short_tables_need_more_than_chance_gives() -> None:
    rng, taken = np.random.default_rng(0), 0
    for _ in range(6):
        columns = dict(zip("abc", rng.normal(size=(3, 400)).cumsum(1), strict=True))
        times = pandas.date_range("2024-01-01", periods=400, freq="D")
        frame = pandas.DataFrame({"ds": times, "y": rng.normal(size=400).cumsum(), **columns})
        model = Forecaster(**QUICK, future=("a", "b", "c")).fit(frame)
        taken += model.network_.config.effects
    assert taken == 0


def test_effects_are_subtracted_from_the_past_and_added_ahead() -> None:
    sizes = ForecasterConfig(
        8, 4, num_targets=2, num_future=3, patch=2, hidden_size=4, linear=True, effects=True
    )
    network = ForecastNetwork(sizes).eval()
    ridge = Ridge(torch.ones(4, 8), torch.zeros(4), torch.zeros(4, 3), 0.0)
    network.set_linear(ridge, is_start=True)
    values = torch.randn(5, 12, 5)
    effects = network.effects(values[..., 2:])
    rest = values[..., :2] - effects
    level = rest[:, 7:8]
    expected = (rest[:, :8] - level).sum(1, keepdim=True) + level + effects[:, 8:]
    torch.testing.assert_close(network(values)[..., 0], expected)
    values[:, 8:, :2] = torch.nan  # unknown, and not read
    torch.testing.assert_close(network(values)[..., 0], expected)


def test_training_leaves_the_effects_as_they_are() -> None:
    sizes = ForecasterConfig(
        8, 4, num_future=2, categories=((2, 3),), patch=2, linear=True, effects=True
    )
    network = ForecastNetwork(sizes)
    before = {n: t.clone() for n, t in network.state_dict().items() if n.startswith("effects.")}
    assert not [name for name, _ in network.named_parameters() if name.startswith("effects.")]
    values = torch.randn(5, 12, 3)
    values[..., 2] = torch.tensor([0.0, 1.0, 2.0] * 4)
    network.train()(values).sum().backward()
    for name, tensor in before.items():
        assert torch.equal(network.state_dict()[name], tensor), name
    with torch.autocast("cpu", torch.bfloat16):
        assert network.effects(values[..., 1:]).dtype == torch.float32


def untrained(frame: pandas.DataFrame, **options: Any) -> Any:
    config = ForecastConfig(
        horizon=6, input_size=24, future=("warmth",), time="ds", target=("y",), effects=True,
        **options,
    )  # fmt: skip
    dataset = prepare(frame, config)
    split = split_table(dataset.table, dataset.frequency, config.split)
    stored = untrained_forecaster(config, config, dataset, split)
    return stored.network, apply_schema(dataset, stored), split


def test_a_column_that_never_changed_has_no_effect() -> None:
    frame = heated()
    frame["warmth"] = np.where(np.arange(1500) < 1400, 1.0, 5.0)
    frame["y"] += np.arange(1500) % 3
    network, inputs, split = untrained(frame, calendar=("hour",))
    state = fit_effects(network, inputs, split, seed=0)
    assert state is None or not state["first.weight"][:, 0].any()
    frame["warmth"] = heated()["warmth"]
    network, inputs, split = untrained(frame, calendar=("hour",))
    state = fit_effects(network, inputs, split, seed=0)
    assert state is not None
    assert state["first.weight"][:, 0].any()


def test_fits_are_equal_and_leave_the_random_numbers() -> None:
    network, inputs, split = untrained(heated())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, two = (fit_effects(network, inputs, split, seed=1) for _ in range(2))
    assert torch.equal(torch.rand(3), expected)
    assert one is not None
    assert two is not None
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_missing_values_are_left_out_of_the_fit() -> None:
    frame = heated()
    frame.loc[np.random.default_rng(0).integers(1500, size=300), "y"] = np.nan
    frame.loc[::50, "warmth"] = np.nan
    network, inputs, split = untrained(frame)
    state = fit_effects(network, inputs, split, seed=0)
    assert state is not None
    effects = CovariateEffects(1, (), 1)
    effects.load_state_dict(state)
    curve = effects(torch.tensor([[-2.0], [0.0], [2.0]]))[:, 0]
    assert curve[0] > curve[1] < curve[2]
    assert torch.isfinite(curve).all()


def test_effects_per_row_are_those_of_every_window() -> None:
    network, inputs, split = untrained(heated(700))
    network.set_effects({n: torch.randn_like(t) for n, t in network.effects.state_dict().items()})
    index = split.windows(inputs.table, "train", 24, 6)
    by_row = list(_rows(network, inputs, index, 1000))
    assert sum(len(x) for x, *_ in by_row) * 30 > inputs.table.num_rows
    values = torch.cat([values for values, _ in inputs.read(index.rows(1000), network.config)])
    lags, shift, _ = network.normalised(values)
    torch.testing.assert_close(torch.cat([x for x, *_ in by_row]), lags[..., 0])
    torch.testing.assert_close(torch.cat([s for *_, s, _ in by_row]), shift[..., 0])


def test_several_targets_have_their_own_effects() -> None:
    frame = heated()
    frame["z"] = -3 * frame["y"]
    given = {**QUICK, **COLUMNS, "target": ("y", "z")}
    model, plain = (Forecaster(**given, effects=e).fit(frame) for e in (True, False))
    found = model.network_.effects(torch.linspace(-2, 2, 9)[:, None])
    np.testing.assert_allclose(found[:, 0] - found[0, 0], found[0, 1] - found[:, 1], atol=0.15)
    assert model.backtest()["forecaster"]["mae"] < 0.8 * plain.backtest()["forecaster"]["mae"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"future": (), "past": ("warmth",), "calendar": "none"}, "no column is known in advance"),
        ({"linear": False}, "there is no linear path"),
        ({"input_size": 2304, "patch": 6}, "there is no linear path"),
        ({"tbptt": 24}, "there is no linear path"),
    ],
)
def test_effects_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"`effects` is True, but {message}"):
        Forecaster(**{**QUICK, **COLUMNS, **options}, effects=True).fit(heated(6000))


def test_an_input_too_long_for_a_linear_path_has_no_effects() -> None:
    model = Forecaster(**{**QUICK, "input_size": 2304, "patch": 6}, **COLUMNS).fit(heated(6000))
    assert model.network_.effects is None


def test_a_calendar_that_adds_nothing_to_the_effects_is_left_out() -> None:
    frame = heated()
    frame["y"] = np.abs(frame["warmth"]) + 0.1 * np.random.default_rng(1).normal(size=1500)
    model = Forecaster(**QUICK, **COLUMNS).fit(frame)
    assert model.network_.effects is not None
    assert model.stored_.config.calendar == ()


def test_the_joint_path_is_fitted_beside_the_effects() -> None:
    frame = heated(3000)
    before = frame["y"].shift(6).bfill()
    frame["z"] = frame["y"]
    frame["y"] = before + 2 * np.abs(frame["warmth"])
    given = {**QUICK, **COLUMNS, "target": ("y", "z"), "channels": "joint", "linear": True}
    model = Forecaster(**given, effects=True).fit(frame)
    network, config = model.network_, model.stored_.config
    split = split_table(model.dataset_.table, model.dataset_.frequency, config.split)
    own = Ridge(network.linear_weight, network.linear_bias, network.linear_future, 0.0)
    again = joint_ridge(network.cpu(), model._inputs, split, own).joint
    assert again is not None
    torch.testing.assert_close(again[0], network.linear_joint, atol=1e-4, rtol=1e-3)


def test_a_gap_is_no_row_of_the_fit() -> None:
    frame = heated()
    frame.loc[np.arange(1500) % 3 > 0, "y"] = np.nan
    network, inputs, split = untrained(frame, gaps="fill")
    rows = _training_rows(network, inputs, split, "train")
    assert rows.targets[:, 0].isnan().float().mean() > 0.5


@pytest.mark.parametrize("normalize", ["last", "standard", "none", "log"])
def test_errors_of_all_kinds_of_windows_are_compared_in_one_unit(normalize: Any) -> None:
    network, inputs, split = untrained(heated(700), normalize=normalize)
    ridge = fit_ridges(network, inputs, split)[0]
    rows = split.windows(inputs.table, "valid", 24, 6).rows()
    values = torch.cat([values for values, _ in inputs.read(rows, network.config)])
    error = torch.from_numpy(ridge_forecast(network, ridge, values)) - values[:, 24:, :1]
    assert ridge.error == pytest.approx(float(error.abs().mean()), rel=1e-4)


def test_standardised_windows_have_effects() -> None:
    model = Forecaster(**QUICK, **COLUMNS, normalize="standard").fit(heated())
    assert model.network_.effects is not None


def test_the_ridge_reads_effects_of_a_network_on_another_device() -> None:
    network, inputs, split = untrained(heated(700))
    rows = split.windows(inputs.table, "test", 24, 6).rows(20)
    values, _ = next(inputs.read(rows, network.config))
    ridge = Ridge(torch.randn(6, 24), torch.randn(6), torch.zeros(6, 1), 0.0)
    expected, effects = ridge_forecast(network, ridge, values), network.effects(values[..., 1:])

    class OfMeta(torch.nn.Module):
        def forward(self, known: torch.Tensor) -> torch.Tensor:
            assert known.device.type == "meta"
            return effects

    network.effects = OfMeta()
    network.head.to("meta")
    np.testing.assert_array_equal(ridge_forecast(network, ridge, values), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_effects_are_forecast_and_compared_on_a_gpu() -> None:
    frame = heated(3000)
    frame["z"] = frame["y"].shift(6).bfill()
    given = {**QUICK, **COLUMNS, "target": ("y", "z"), "channels": "joint", "linear": True}
    gpu, cpu = (
        Forecaster(**given, effects=True, device=device).fit(frame).backtest()
        for device in ("cuda", "cpu")
    )
    assert gpu["ridge"]["mae"] == pytest.approx(cpu["ridge"]["mae"], rel=1e-3)
