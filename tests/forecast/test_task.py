"""The validation loss of a forecaster."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fastlstm import Forecaster
from fastlstm.errors import DataError
from fastlstm.forecast.calibration import forecast
from fastlstm.forecast.data.scaled_windows import ScaledWindows

QUICK: dict[str, Any] = {
    "horizon": 4, "input_size": 8, "patch": 4, "hidden_size": 8, "steps": 2, "dropout": 0.0,
    "split": (100, 60, 40), "ema": 0.0,
}  # fmt: skip


def values(most_missing: float = 0.9) -> NDArray[np.float32]:
    """Much is missing, and more at the end of the validation part than at its beginning."""
    rng = np.random.default_rng(0)
    y = rng.normal(size=200) + np.linspace(0, 8, 200)
    y[rng.random(200) < np.linspace(0, most_missing, 200)] = np.nan
    return y.astype(np.float32)


@pytest.mark.parametrize(("size", "most_missing"), [(1, 0.9), (7, 0.9), (64, 0.9), (7, 0.0)])
def test_the_validation_loss_is_the_mean_of_present_values(
    monkeypatch: pytest.MonkeyPatch, size: int, most_missing: float
) -> None:
    read = ScaledWindows.read

    def parted(
        inputs: ScaledWindows, rows: NDArray[np.int64], length: int, _: int = 0
    ) -> Iterator[Any]:
        return read(inputs, rows, length, size)

    monkeypatch.setattr(ScaledWindows, "read", parted)
    model = Forecaster(**QUICK).fit(values(most_missing))
    rows = model._windows(model.dataset_, "valid", 1)[1].rows()
    errors = [
        np.abs(found[..., 0].numpy() - target.numpy()).ravel()
        for found, target in forecast(model.network_, model._inputs, rows)
    ]
    assert model.fitted_.best_loss == pytest.approx(float(np.nanmean(np.concatenate(errors))))


def test_a_validation_part_without_values_is_no_loss_of_zero() -> None:
    y = values()
    y[100:160] = np.nan
    with pytest.raises(DataError, match="the validation part has no value of the targets"):
        Forecaster(**QUICK).fit(y)
    assert math.isfinite(Forecaster(**QUICK).fit(values()).fitted_.best_loss)
