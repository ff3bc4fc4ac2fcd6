from __future__ import annotations

import statistics

import numpy as np
import pytest

from fastlstm.forecast.data.error_measures import QuantileScores, StepErrors


def test_errors_by_steps_ahead() -> None:
    errors = StepErrors(3, 2)
    actual = np.zeros((2, 3, 2))
    forecast = np.array([[[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]] * 2)
    actual[1, 2, 0] = np.nan
    errors.add(forecast, actual)
    assert errors.result(0) == {"num_values": 5, "mse": 19 / 5, "mae": 9 / 5}
    assert errors.result(0, 2, 2) == {"num_values": 2, "mse": 4.0, "mae": 2.0}
    assert errors.result(0, 3) == {"num_values": 1, "mse": 9.0, "mae": 3.0}
    assert errors.result(1)["mae"] == 0.0
    assert StepErrors(1, 1).result(0) == {"num_values": 0}


def test_an_infinite_quantile_counts_as_the_outermost_finite_one() -> None:
    finite, infinite = (QuantileScores((), (0.99,)) for _ in range(2))
    levels = np.array(finite.levels)
    forecast = levels[None].copy()
    finite.add(forecast, np.array([0.5]))
    forecast[0, 0], forecast[0, -1] = -np.inf, np.inf
    infinite.add(forecast, np.array([0.5]))
    assert infinite.result()["crps"] == pytest.approx(finite.result()["crps"], rel=1e-6)
    assert infinite.coverage() == {0.99: 1.0}


def test_the_crps_of_a_normal_distribution() -> None:
    """Against its closed form (Gneiting & Raftery 2007, equation 21); the mean is off by 1."""
    rng = np.random.default_rng(0)
    actual = rng.normal(size=(500, 4, 2))
    scores = QuantileScores((), ())
    assert scores.levels == tuple(k / 100 for k in range(1, 100))
    normal = statistics.NormalDist()
    forecast = np.array([1 + normal.inv_cdf(level) for level in scores.levels])
    z = actual - 1
    below, density = np.vectorize(normal.cdf)(z), np.vectorize(normal.pdf)(z)
    want = (z * (2 * below - 1) + 2 * density - np.pi**-0.5).mean()
    for part in (slice(0, 100), slice(100, 500)):
        scores.add(np.broadcast_to(forecast, (*actual[part].shape, 99)), actual[part])
    assert scores.result() == {"crps": pytest.approx(want, rel=0.001)}
