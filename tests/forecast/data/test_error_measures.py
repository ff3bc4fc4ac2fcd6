from __future__ import annotations

import numpy as np
import pytest

from fastlstm.forecast.data.error_measures import QuantileScores, Scores, StepErrors


def test_errors_are_those_of_their_definitions() -> None:
    actual = np.array([1.0, 2.0, np.nan, 4.0])
    forecast = np.array([2.0, 2.0, 9.0, 2.0])
    naive = np.array([3.0, 3.0, 9.0, 3.0])
    scores = Scores()
    scores.add(forecast, actual, naive, np.array([0.5]))
    found = scores.result()
    assert found["num_values"] == 3
    assert found["mae"] == pytest.approx(1.0)
    assert found["mse"] == pytest.approx(5 / 3)
    assert found["rmse"] == pytest.approx((5 / 3) ** 0.5)
    assert found["smape"] == pytest.approx((2 / 3 + 0 + 4 / 6) / 3)
    assert found["rel_mae"] == pytest.approx(3 / 4)
    assert found["mase"] == pytest.approx(2.0)


def test_batches_add_up() -> None:
    rng = np.random.default_rng(2)
    forecast, actual, naive = rng.normal(size=(3, 40))
    whole, parts = Scores(), Scores()
    whole.add(forecast, actual, naive)
    parts.add(forecast[:7], actual[:7], naive[:7])
    parts.add(forecast[7:], actual[7:], naive[7:])
    assert parts.result() == pytest.approx(whole.result())


@pytest.mark.parametrize("scale", [0.0, np.nan])
def test_values_without_a_scale_have_no_mase(scale: float) -> None:
    scores = Scores()
    scores.add(np.ones(2), np.zeros(2), np.ones(2), np.array([scale, 2.0]))
    found = scores.result()
    assert (found["mase"], found["num_without_scale"]) == (0.5, 1)
    scores = Scores()
    scores.add(np.ones(2), np.zeros(2), np.zeros(2), np.full(2, scale))
    assert not {"mase", "rel_mae"} & scores.result().keys()


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


def test_pinball_losses_and_coverage_are_those_of_their_definitions() -> None:
    scores = QuantileScores([0.1], [0.8], has_crps=False)
    assert scores.levels == (0.1, 0.9)
    forecast = np.array([[0.0, 2.0], [0.0, 2.0], [0.0, 2.0]])
    scores.add(forecast, np.array([1.0, 2.0, -5.0]))
    found = scores.result()
    assert found["pinball_0.1"] == pytest.approx((0.1 * 1 + 0.1 * 2 + 0.9 * 5) / 3)
    assert found["coverage_80"] == pytest.approx(2 / 3)
    assert "crps" not in found


def test_the_crps_of_a_point_is_its_absolute_error() -> None:
    """Up to the steps of 0.01 in which levels are summed."""
    scores = QuantileScores((), ())
    scores.add(np.full((4, 99), 3.0), np.array([1.0, 4.0, 3.0, np.nan]))
    assert scores.num_values == 3
    assert scores.result()["crps"] == pytest.approx(0.99 * (2 + 1 + 0) / 3)


def test_an_infinite_quantile_counts_as_the_outermost_finite_one() -> None:
    finite, infinite = (QuantileScores((), (0.99,)) for _ in range(2))
    levels = np.array(finite.levels)
    forecast = levels[None].copy()
    finite.add(forecast, np.array([0.5]))
    forecast[0, 0], forecast[0, -1] = -np.inf, np.inf
    infinite.add(forecast, np.array([0.5]))
    assert infinite.result()["crps"] == pytest.approx(finite.result()["crps"], rel=1e-6)
    assert infinite.coverage() == {0.99: 1.0}
