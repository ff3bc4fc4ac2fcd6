"""The linear path: ridge regression on lags and on the future covariates of each step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from fastlstm import Forecaster
from fastlstm.forecast.data.window_index import read_windows
from fastlstm.forecast.model.network import ForecasterConfig, ForecastNetwork
from fastlstm.forecast.ridge import _ALPHAS, _LEAST, Ridge, best_share, fit_ridges

INPUT, HORIZON, ROWS = 8, 3, 500
SPLIT = (300, 100, 100)
QUICK: dict[str, Any] = {
    "horizon": HORIZON, "input_size": INPUT, "hidden_size": 8, "steps": 1, "split": SPLIT,
    "target": ("y",), "future": ("plan", "other"),
}  # fmt: skip


def table(effect: float, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    plan, other = rng.normal(size=(2, ROWS))
    y = np.convolve(rng.normal(size=ROWS), [1, 0.7, 0.4], "same") + effect * plan
    return pa.table({"y": y, "plan": plan, "other": other})


def fitted(effect: float) -> Any:
    return Forecaster(**QUICK).fit(table(effect))


def weights_of(model: Any) -> list[torch.Tensor]:
    network = model.network_
    return [network.linear_weight, network.linear_bias, network.linear_future]


def test_the_linear_path_solves_the_regression_of_each_step() -> None:
    model = fitted(2.0)
    scaler = model.stored_.scaler
    values = read_windows(model.dataset_.table, np.arange(400), INPUT + HORIZON).double().numpy()
    values = (values + model.dataset_.table.origin - scaler.mean) / scaler.std
    level = values[:, INPUT - 1, 0]
    lags, ahead = values[:, :INPUT, 0] - level[:, None], values[:, INPUT:, 0] - level[:, None]
    starts = np.arange(len(values))
    is_train = starts <= SPLIT[0] - INPUT - HORIZON
    is_valid = (starts >= SPLIT[0] - INPUT) & (starts <= SPLIT[0] + SPLIT[1] - INPUT - HORIZON)
    unit = np.linalg.eigvalsh(np.cov(lags[is_train].T, bias=True)).mean()
    found = []
    for alpha in _ALPHAS:
        error, steps = 0.0, []
        penalty = np.diag([alpha * unit] * INPUT + [_LEAST] * 2)
        for step in range(HORIZON):
            x = np.concatenate([lags, values[:, INPUT + step, 1:]], 1)
            mean, target = x[is_train].mean(0), ahead[is_train, step].mean()
            own, n = x[is_train] - mean, is_train.sum()
            right = own.T @ (ahead[is_train, step] - target) / n
            solved = np.linalg.solve(own.T @ own / n + penalty, right)
            steps.append((solved, target - mean @ solved))
            error += np.abs(x[is_valid] @ solved + steps[-1][1] - ahead[is_valid, step]).sum()
        found.append((error, steps))
    _, best = min(found, key=lambda each: each[0])
    weight, bias, future = (each.numpy() for each in weights_of(model))
    for step, (solved, constant) in enumerate(best):
        np.testing.assert_allclose(weight[step], solved[:INPUT], atol=1e-4)
        np.testing.assert_allclose(future[step], solved[INPUT:], atol=1e-4)
        assert bias[step] == pytest.approx(constant, abs=1e-4)


@pytest.mark.parametrize("normalize", ["standard", "none"])
def test_scattered_missing_rows_cost_the_linear_path_little(normalize: Any) -> None:
    """Each is the value before it: the mean of a window, far from it, would cost more."""
    rng, t = np.random.default_rng(1), np.arange(1000)
    y = np.sin(t * 2 * np.pi / 24) + 0.1 * rng.normal(size=1000) + 0.02 * t
    gone = np.where(np.isin(t, rng.choice(t[10:-30], 20, replace=False)), np.nan, y)
    sizes = {"horizon": 12, "input_size": 48, "patch": 12, "hidden_size": 8, "steps": 1}
    errors = [
        Forecaster(**sizes, normalize=normalize).fit(pa.table({"y": v})).backtest()["ridge"]["mae"]
        for v in (y, gone)
    ]
    assert errors[1] < 1.05 * errors[0]


def test_useless_future_covariates_are_left_out() -> None:
    """Weights on noise cost on validation windows; the regression on lags alone is better."""
    for seed in range(8):
        model = Forecaster(**QUICK).fit(table(0.0, seed))
        *_, future = weights_of(model)
        if (future == 0).all():
            break
    else:
        pytest.fail("noise was used in every table")
    split, _ = model._windows(model.dataset_, "train", 1)
    alone = fit_ridges(model.network_, model._inputs, split)[0]
    assert torch.equal(alone[0], model.network_.linear_weight)


def test_the_forecast_follows_the_plan_before_the_lstm_learns() -> None:
    found = fitted(5.0).backtest()
    assert found["forecaster"]["mae"] < 0.5 * found["seasonal_naive"]["mae"]


@pytest.mark.parametrize("plan", ["plan", "other"])
def test_the_ridge_of_the_figures_sees_the_future_covariates(plan: str) -> None:
    options = {**QUICK, "future": (plan,), "past": (), "normalize": "last"}
    model, without = (
        Forecaster(**options, linear=linear, effects=False).fit(table(5.0))
        for linear in (True, False)
    )
    found = model.backtest(scaled=True)
    ratio = found["ridge"]["mae"] / found["naive"]["mae"]
    assert ratio < 0.4 if plan == "plan" else ratio > 0.6
    rows = model._windows(model.dataset_, "test", 1)[1].rows()
    values, _ = next(model._inputs.read(rows, model.network_.config, 1000))
    error = model.network_.linear_forecast(values) - values[:, INPUT:, :1]
    assert found["ridge"]["mae"] == pytest.approx(float(error.abs().mean()), rel=1e-5)
    alone = without.backtest(scaled=True)["ridge"]["mae"]
    assert found["ridge"]["mae"] == pytest.approx(alone, rel=1e-3)


@pytest.mark.parametrize("output", ["point", "quantiles", "student_t"])
def test_an_average_with_the_linear_path(output: Any) -> None:
    sizes = ForecasterConfig(
        input_size=8, horizon=3, num_targets=2, patch=2, hidden_size=4, embed_size=4, linear=True,
        output=output, dropout=0.0,
    )  # fmt: skip
    torch.default_generator.manual_seed(0)
    network, values = ForecastNetwork(sizes).eval(), torch.randn(5, 11, 2)
    for is_start in (False, True):
        weight, bias = torch.randn(3, 8), torch.randn(3)
        network.set_linear(Ridge(weight, bias, torch.zeros(3, 0), 0.0), is_start)
        torch.nn.init.normal_(network.head.weight)
        before, linear = network(values), network.linear_forecast(values)
        level = values[:, 7:8]
        lags = (values[:, :8] - level).transpose(1, 2)
        torch.testing.assert_close(linear, (lags @ weight.T + bias).transpose(1, 2) + level)
        network.average_with_linear(0.25)
        after, at = network(values), network.output.locations
        expected = before.detach().clone()
        expected[..., at] = 0.25 * before[..., at] + 0.75 * linear[..., None]
        torch.testing.assert_close(after, expected)


def test_the_share_has_the_least_loss_on_validation_windows() -> None:
    model = Forecaster(**QUICK | {"future": (), "past": ()}).fit(table(0.0))
    network, valid = model.network_, model._windows(model.dataset_, "valid", 1)[1]
    network.zero_head()  # the last value; of the linear path too much
    network.linear_share.zero_()
    network.linear_weight *= 1.6
    errors = []
    values, _ = next(model._inputs.read(valid.rows(), network.config, 1000))
    target, whole = values[:, INPUT:, :1], network(values).detach()[..., 0]
    for k in range(21):
        mixed = whole * k / 20 + network.linear_forecast(values) * (1 - k / 20)
        errors.append(float((mixed - target).abs().mean()))
    share, ratio = best_share(network, model._inputs, valid)
    assert share == min(range(21), key=lambda k: errors[k]) / 20
    assert 0 < share < 1
    assert ratio == pytest.approx(min(errors) / errors[-1], rel=1e-5)


def test_several_targets_are_averaged_at_the_end(tmp_path: Any) -> None:
    rng, notes = np.random.default_rng(0), list[str]()
    names = ("a", "b")
    walks = np.convolve(rng.normal(size=2 * ROWS), [1, 0.7, 0.4], "same").reshape(2, ROWS)
    model = Forecaster(
        **QUICK | {"target": names, "future": ()},
        observers=[lambda event: notes.append(str(event.get("text")))],
    ).fit(pa.table(dict(zip(names, walks, strict=True))), out=tmp_path / "run")  # fmt: skip
    assert any("linear path: this lowers the validation error" in note for note in notes)
    assert 0 < float(model.network_.linear_share) <= 1
    found = model.backtest()
    assert found["forecaster"]["mae"] < 1.05 * found["ridge"]["mae"]
    stored = Forecaster.load(tmp_path / "run").network_.state_dict()
    for name, tensor in model.network_.state_dict().items():
        assert torch.equal(tensor, stored[name]), name
