"""Quantiles of forecasts: calibrated on validation, in order, and true where the noise changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fastlstm import Forecaster
from fastlstm.errors import ConfigError
from fastlstm.infer.forecasts import LEVELS, Calibration, calibrate, forecast
from fastlstm.series.inputs import Inputs

HORIZON, INPUT = 6, 24
QUICK: dict[str, Any] = {
    "horizon": HORIZON, "input_size": INPUT, "segment": 6, "hidden_size": 16, "steps": 150,
    "dropout": 0.0, "learning_rate": 0.01, "split": "60/20/20", "normalize": "standard",
}  # fmt: skip


def deviations(num_rows: int = 2400) -> NDArray[np.float32]:
    """Noise of every row: half of the day is eight times as loud as the other half."""
    return np.where(np.arange(num_rows) % 24 < 12, 0.1, 0.8).astype(np.float32)


def noisy(num_rows: int = 2400) -> NDArray[np.float32]:
    noise = np.random.default_rng(0).normal(size=num_rows)
    wave = np.sin(np.arange(num_rows) * (2 * np.pi / 24))
    return (wave + deviations(num_rows) * noise).astype(np.float32)


def inside(model: Forecaster, level: float) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Returns which test values lie in their interval, and which are of the quiet hours."""
    rows = model._origins("test", 1)
    ends = ((1 - level) / 2, (1 + level) / 2)
    found = []
    for q, y in forecast(model.network_, model._inputs, rows, model.calibration_, ends):
        found.append((q[..., 0] <= y) & (y <= q[..., 1]))
    quiet = deviations()[rows[:, None] + INPUT + np.arange(HORIZON)] < 0.5
    return torch.cat(found)[..., 0].numpy(), quiet


@pytest.mark.parametrize("output", ["quantiles", "student_t"])
def test_learned_quantiles_cover_where_the_noise_changes(output: Any) -> None:
    model = Forecaster(**QUICK, output=output).fit(noisy())
    is_inside, quiet = inside(model, 0.8)
    assert is_inside.mean() == pytest.approx(0.8, abs=0.05)
    assert is_inside[quiet].mean() == pytest.approx(0.8, abs=0.12)
    assert is_inside[~quiet].mean() == pytest.approx(0.8, abs=0.12)


def test_residuals_of_a_point_cover_on_the_whole_only() -> None:
    model = Forecaster(**QUICK).fit(noisy())
    is_inside, quiet = inside(model, 0.8)
    assert is_inside.mean() == pytest.approx(0.8, abs=0.05)
    assert is_inside[quiet].mean() > 0.95
    assert is_inside[~quiet].mean() < 0.7


@pytest.mark.parametrize("output", ["point", "quantiles", "student_t"])
def test_validation_values_lie_below_each_quantile_as_often_as_it_says(output: Any) -> None:
    """Even of a network that has learned nothing: what it is off by is added."""
    model = Forecaster(**{**QUICK, "steps": 1}, output=output).fit(noisy(600))
    rows = model._origins("valid", 1)
    levels = (0.025, 0.1, 0.3, 0.5, 0.825, 0.975)
    below = [
        (y[..., None] <= q)[:, :, 0].double()
        for q, y in forecast(model.network_, model._inputs, rows, model.calibration_, levels)
    ]
    share = torch.cat(below).mean(0)  # per step
    for step in range(HORIZON):
        assert share[step].tolist() == pytest.approx(levels, abs=0.03)


@pytest.mark.parametrize("size", [1, len(LEVELS)])
def test_quantiles_never_cross(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(5, 3, 2, size, generator=generator)
    calibration = Calibration(torch.randn(len(LEVELS), 3, 2, generator=generator))
    levels = [k / 200 for k in range(1, 200)]
    found = calibration.quantiles(base, torch.ones(5, 2), levels)
    assert found.shape == (5, 3, 2, 199)
    assert (found.diff(dim=-1) >= 0).all()
    few = calibration.quantiles(base, torch.ones(5, 2), levels[10:100:7])
    assert torch.equal(few, found[..., 10:100:7])


def test_residuals_are_added_at_their_step_and_target_in_units_of_spread() -> None:
    base = torch.tensor(LEVELS).expand(1, 3, 2, -1)
    residuals = torch.arange(6.0).view(1, 3, 2).expand(len(LEVELS), -1, -1)
    wide = torch.tensor([[1.0, 10.0]])
    found = Calibration(residuals).quantiles(base, wide, [0.1, 0.925])
    shift = torch.tensor([[0.0, 10.0], [2.0, 30.0], [4.0, 50.0]])
    torch.testing.assert_close(found[0], shift[..., None] + torch.tensor([0.1, 0.925]))
    for level in (0.001, 0.999, float("nan")):
        with pytest.raises(ConfigError, match=f"quantile {level} lies outside 0.005 to 0.995"):
            Calibration(residuals).quantiles(base, wide, [level])


def test_missing_values_do_not_count_in_calibration() -> None:
    y = noisy(600)
    y[::7] = np.nan
    model = Forecaster(**{**QUICK, "steps": 2}, output="quantiles").fit(y)
    assert model.calibration_.residuals.isfinite().all()
    assert model.calibration_.residuals.abs().sum() > 0
    assert model.coverage((0.8,), part="valid")[0.8] == pytest.approx(0.8, abs=0.03)


def test_calibration_takes_windows_evenly_where_they_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Forecaster(**{**QUICK, "steps": 1}, output="quantiles").fit(noisy(1200))
    monkeypatch.setattr("fastlstm.infer.forecasts._MAX_VALUES", 100 * HORIZON * 7)
    taken: list[NDArray[np.int64]] = []
    read = Inputs.read

    def recorded(inputs: Inputs, rows: NDArray[np.int64], length: int) -> Any:
        taken.append(rows)
        return read(inputs, rows, length)

    monkeypatch.setattr(Inputs, "read", recorded)
    valid = model.split_.windows(model.dataset_.table, "valid", INPUT, HORIZON)
    calibrate(model.network_, model._inputs, valid)
    assert len(taken[0]) == 100
    assert (taken[0][0], taken[0][-1]) == (valid.rows()[0], valid.rows()[-1])


@pytest.mark.parametrize("output", ["quantiles", "student_t"])
def test_files_keep_the_quantiles(tmp_path: Path, output: Any) -> None:
    table = noisy(400)
    model = Forecaster(**{**QUICK, "steps": 3}, output=output).fit(table)
    model.save(tmp_path)
    want, again = model.predict_quantiles(), Forecaster.load(tmp_path, table)
    assert again.predict_quantiles().equals(want)
