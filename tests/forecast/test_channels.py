"""`channels`: joint where the past of the other targets lowers the error of a linear forecast."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fastlstm import Forecaster
from fastlstm.errors import ConfigError, Stopped
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.preparation import prepare
from fastlstm.forecast.data.splits import split_table
from fastlstm.forecast.model.network import ForecasterConfig, ForecastNetwork
from fastlstm.forecast.plan import untrained_forecaster
from fastlstm.forecast.ridge import Ridge, joint_gain
from fastlstm.forecast.table_schema import apply_schema
from fastlstm.forecast.train import train_forecaster

QUICK: dict[str, Any] = {"horizon": 4, "input_size": 16, "hidden_size": 16, "steps": 5}
pytestmark = pytest.mark.filterwarnings("ignore:80 % intervals cover")  # after few steps


def follower(delay: int | None, rows: int = 900) -> NDArray[np.float64]:
    """A walk with a level, and one that repeats it `delay` rows later; independent if None."""
    noise = np.random.default_rng(0).normal(size=(rows + 20, 2))
    walks = np.zeros_like(noise)
    for row in range(1, len(walks)):
        walks[row] = 0.95 * walks[row - 1] + noise[row]
    if delay is not None:
        walks[20:, 1] = walks[20 - delay : len(walks) - delay, 0] + 0.1 * noise[20:, 1]
    return walks[20:]


@pytest.mark.parametrize(
    ("delay", "channels", "told"),
    [
        (
            6,
            "joint",
            r"the past of the other targets lowers the error of a linear forecast .* by [3-9]\d\.",
        ),
        (None, "shared", r"each target is forecast from its own past: .* by [+-]0\.\d%, and needs"),
    ],
)
def test_channels_are_joint_where_targets_follow_each_other(
    delay: int | None, channels: str, told: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level("INFO", "fastlstm"):
        model = Forecaster(**QUICK).fit(follower(delay))
    assert model.stored_.config.channels == model.network_.config.channels == channels
    assert model.stored_.given.channels is None
    assert re.search(told, caplog.text)
    model.save(tmp_path)
    again = Forecaster.load(tmp_path).predict(follower(delay))
    np.testing.assert_array_equal(again, model.predict())


def test_joint_channels_forecast_what_follows_better() -> None:
    given = {**QUICK, "steps": 300, "dropout": 0.1}
    joint, shared = (
        Forecaster(**given, channels=channels).fit(follower(6, 2000)).backtest()["forecaster"]
        for channels in (None, "shared")
    )
    assert joint["mae"] < 0.85 * shared["mae"]


def test_the_linear_path_of_joint_channels_reads_all_targets() -> None:
    joint, shared = (
        Forecaster(**QUICK, channels=channels).fit(follower(6)) for channels in (None, "shared")
    )
    assert joint.backtest()["ridge"]["mae"] < 0.75 * shared.backtest()["ridge"]["mae"]
    assert "linear_joint" not in shared.network_.state_dict()
    independent = Forecaster(**QUICK, channels="joint").fit(follower(None)).backtest()["ridge"]
    plain = Forecaster(**QUICK, channels="shared").fit(follower(None)).backtest()["ridge"]
    assert independent["mae"] < 1.02 * plain["mae"]


@pytest.mark.parametrize("older", [0, 3])
def test_a_joint_part_adds_what_its_weights_say(
    older: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastlstm.forecast.model.network._JOINT_LAGS", 12)  # six of each target
    L = 6 + older
    sizes = ForecasterConfig(
        input_size=L, horizon=3, num_targets=2, patch=3, hidden_size=4, embed_size=4,
        channels="joint", linear=True, normalize="none",
    )  # fmt: skip
    network = ForecastNetwork(sizes).eval()
    weight, bias = torch.zeros(6, 12), torch.zeros(6)
    weight[3 * 1 + 2, 6 * 0 + 4] = 2.0  # the third step of target 1 from lag 4 of target 0
    bias[3 * 0 + 1] = 7.0
    own = torch.zeros(3, L), torch.zeros(3), torch.zeros(3, 0)
    network.set_linear(Ridge(*own, 0.0, (weight, bias)), is_start=True)
    x = torch.randn(5, L + 3, 2)
    want = torch.zeros(5, 3, 2)
    want[:, 2, 1], want[:, 1, 0] = 2 * x[:, older + 4, 0], 7.0
    torch.testing.assert_close(network(x)[..., 0], want)
    torch.testing.assert_close(network.linear_forecast(x), want)


@pytest.mark.parametrize(
    "given", [{"channels": "shared"}, {"channels": "joint"}, {"target": "1"}], ids=str
)
def test_given_channels_and_single_targets_are_not_compared(
    given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "fastlstm"):
        Forecaster(**QUICK, **given).fit(follower(6))
    assert "from its own past" not in caplog.text
    assert "past of the other targets" not in caplog.text


def test_more_than_64_targets_are_shared() -> None:
    wide = np.tile(follower(6, 200), (1, 33))
    model = Forecaster(**{**QUICK, "steps": 1}).fit(wide)
    assert model.network_.config.channels == "shared"


@pytest.mark.parametrize("share", [0.03, 0.5])  # half: no window has all values to forecast
def test_missing_values_are_left_out_of_the_comparison(share: float) -> None:
    table = follower(6)
    table[100:140, 0] = np.nan
    table[np.random.default_rng(1).random(table.shape) < share] = np.nan
    model = Forecaster(**QUICK, gaps="fill").fit(table)
    assert model.network_.config.channels == "joint"


def test_chosen_channels_may_be_given_when_training_goes_on() -> None:
    model = Forecaster(**QUICK).fit(follower(6))
    model.set_params(channels="joint").partial_fit(follower(6))
    assert model.stored_.given.channels == "joint"
    with pytest.raises(ConfigError, match="`channels` is 'shared' and was 'joint' at fit"):
        model.set_params(channels="shared").partial_fit(follower(6))


def test_a_stopped_run_keeps_its_channels(tmp_path: Path) -> None:
    config, polls = ForecastConfig(**{**QUICK, "steps": 20}), iter([False] * 11)
    with pytest.raises(Stopped):
        train_forecaster(follower(6), config, out=tmp_path, stop=lambda: next(polls, True))
    resumed = train_forecaster(follower(6), config, out=tmp_path, resume=True).stored.network
    whole = train_forecaster(follower(6), config).stored.network
    assert resumed.config.channels == "joint"
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_the_gain_is_that_of_two_ridge_regressions() -> None:
    """Against NumPy: regressions of the values themselves, as nothing is forecast before."""
    config = ForecastConfig(horizon=4, input_size=8, normalize="none", patch=4)
    table = follower(6)
    dataset = prepare(table, config, lambda *_: None)
    split = split_table(dataset.table, dataset.frequency, config.split)
    stored = untrained_forecaster(config, config, dataset, split)
    nothing = Ridge(torch.zeros(4, 8), torch.zeros(4), torch.zeros(4, 0), 1.0)
    gain = joint_gain(stored.network, apply_schema(dataset, stored), split, nothing)

    scaled = (table - table[:630].mean(0)) / table[:630].std(0)
    firsts = range(630 - 12 + 1), range(630 - 8, 720 - 12 + 1)
    train, valid = (np.stack([scaled[row : row + 12] for row in rows]) for rows in firsts)
    older = math.ceil(len(train) * 2 / 3)
    train, valid = train[:older], np.concatenate([train[older:], valid])
    errors = {}
    for name, columns in (("own", ([0], [1])), ("joint", ([0, 1], [0, 1]))):
        errors[name] = sum(
            min(ridge_error(train, valid, used, target, 10.0**k) for k in range(-6, 3))
            for target, used in enumerate(columns)
        )
    assert gain == pytest.approx(1 - errors["joint"] / errors["own"], rel=1e-3)
    assert gain > 0.2


def ridge_error(train: Any, valid: Any, used: list[int], target: int, alpha: float) -> float:
    """The validation error of a target from columns; `alpha` is in mean eigenvalues."""
    x, x_valid = (part[:, :8, used].reshape(len(part), -1) for part in (train, valid))
    y, y_valid = (part[:, 8:, target] for part in (train, valid))
    centered = x - x.mean(0)
    covariance = centered.T @ centered / len(x)
    penalty = alpha * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    weight = np.linalg.solve(covariance + penalty, centered.T @ (y - y.mean(0)) / len(x))
    return float(abs((x_valid - x.mean(0)) @ weight + y.mean(0) - y_valid).sum())
