"""Forecasts of windows agree with forecasts of tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastlstm import Forecaster
from fastlstm.errors import ConfigError
from fastlstm.forecast import forecaster
from fastlstm.forecast.model.network import ForecastNetwork
from fastlstm.forecast.window_forecaster import WindowForecaster, load_window_forecaster
from forecast_server import fit_plain, h, past_of, save, waves


@pytest.fixture(scope="module")
def model() -> Forecaster:
    return fit_plain()


@pytest.fixture(scope="module")
def windows(model: Forecaster) -> WindowForecaster:
    return WindowForecaster(model.stored_, "waves")


def ends_of(model: WindowForecaster) -> np.ndarray:
    return np.stack([past_of(waves(), n, 120, model.past.names) for n in range(3)])


def test_windows_are_forecast_as_their_table_is(
    model: Forecaster, windows: WindowForecaster
) -> None:
    numbers = np.arange(3, dtype=np.float32)[:, None]
    forecasts = windows.run(ends_of(windows).astype(np.float32), statics=numbers)
    expected = model.predict()["y"].to_numpy().reshape(3, h, 1)
    np.testing.assert_allclose(forecasts.arrays()["forecast"], expected, rtol=1e-4)
    table = model.predict_quantiles(quantiles=(0.1, 0.9))
    quantiles = forecasts.arrays((0.1, 0.9))["quantiles"]
    assert quantiles.shape == (3, h, 1, 2)
    for n, name in enumerate(("y-q0.1", "y-q0.9")):
        due = table[name].to_numpy().reshape(3, h, 1)
        np.testing.assert_allclose(quantiles[..., n], due, rtol=1e-4)
    with pytest.raises(ConfigError, match="outside"):
        forecasts.arrays((0.0001,))


def test_windows_beyond_the_memory_are_forecast_in_halves(
    windows: WindowForecaster, model: Forecaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = windows.run(ends_of(windows).astype(np.float32)).arrays()["forecast"]
    forward, sizes = ForecastNetwork.forward, list[int]()

    def bounded(self: ForecastNetwork, values: torch.Tensor, *rest: Any) -> Any:
        sizes.append(len(values))
        if len(values) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, values, *rest)

    monkeypatch.setattr(ForecastNetwork, "forward", bounded)
    found = windows.run(ends_of(windows).astype(np.float32)).arrays()["forecast"]
    np.testing.assert_allclose(found, want, rtol=1e-5)
    assert sizes == [3, 1, 2, 1, 1]


def test_a_network_goes_to_the_gpu_for_many_windows(
    model: Forecaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, places = save(model, tmp_path), list[str]()
    for name in ("has_gpu", "check_device"):
        monkeypatch.setattr(forecaster, name, lambda *_: True)
    monkeypatch.setattr(ForecastNetwork, "to", lambda self, device: places.append(device))
    for device in ("auto", "cpu", "cuda"):
        loaded = Forecaster.load(path, device=device)  # type: ignore[arg-type]
        loaded.predict(waves())  # of three series
        loaded.backtest("train", frame=waves())
    assert places == ["cpu", "cuda", "cpu", "cpu", "cuda", "cuda"]


def test_a_missing_gpu_is_an_error(model: Forecaster, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    path = save(model, tmp_path)
    with pytest.raises(ConfigError, match="no usable NVIDIA GPU"):
        Forecaster.load(path, device="cuda")
    with pytest.raises(ConfigError, match="no usable NVIDIA GPU"):
        load_window_forecaster(path, "cuda")
