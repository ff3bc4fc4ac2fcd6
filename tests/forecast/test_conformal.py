"""Intervals hold a further value as often as they say, however few validation values there are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fastlstm import Forecaster
from fastlstm.forecast.calibration import LEVELS, Calibration, conformal

stats = pytest.importorskip("scipy.stats")

TRIALS = 20_000


def trials(n: int) -> tuple[Calibration, torch.Tensor]:
    """Calibrations on n values each, and a further value of the same distribution for each."""
    generator = torch.Generator().manual_seed(n)
    errors = torch.randn(n + 1, TRIALS, 1, generator=generator) ** 3
    return Calibration(conformal(errors[:n])[:, None]), errors[n, :, 0]


@pytest.mark.parametrize("n", [12, 30, 100])
@pytest.mark.parametrize("level", [0.5, 0.8, 0.9, 0.95, 0.99])
def test_central_intervals_hold_what_they_say(n: int, level: float) -> None:
    """At least the level, at most the level and 2 / (n + 1); by the exact binomial law."""
    calibration, value = trials(n)
    ends = ((1 - level) / 2, (1 + level) / 2)
    zeros = torch.zeros(1, 1, TRIALS, 1)
    found = calibration.quantiles(zeros, torch.ones(1, TRIALS), ends)[0, 0]
    inside = int(((found[:, 0] <= value) & (value <= found[:, 1])).sum())
    assert inside >= stats.binom.ppf(1e-6, TRIALS, level)
    if (n + 1) * ends[0] < 1:
        assert inside == TRIALS  # infinite
        assert found.isinf().all()
    else:
        # the exact share of ranks 1 … n + 1 that lie between the two order statistics
        share = 1 - 2 * np.floor(round((n + 1) * ends[0], 6)) / (n + 1)
        assert level <= share + 1e-9 <= level + 2 / (n + 1)
        low, high = stats.binom.ppf((1e-6, 1 - 1e-6), TRIALS, share)
        assert low <= inside <= high


@pytest.mark.parametrize("n", [1, 2, 9, 10, 39, 199, 200])
def test_order_statistics_are_those_of_the_law(n: int) -> None:
    errors = torch.randperm(n, generator=torch.Generator().manual_seed(0)).float()[:, None, None]
    found = conformal(errors + 1)[:, 0]  # the order statistic of rank k is k
    for level, value in zip(LEVELS, found.tolist(), strict=True):
        place = round((n + 1) * level, 6)
        rank = np.floor(place) if level < 0.5 else np.ceil(place)
        if level == 0.5:
            rank = place
        want = -np.inf if rank < 1 else np.inf if rank > n else rank
        assert value == want, level


def test_missing_errors_do_not_count_and_levels_keep_their_own() -> None:
    errors = torch.randn(40, 2, len(LEVELS), generator=torch.Generator().manual_seed(0))
    whole = conformal(errors[:25])
    errors[25:] = torch.nan
    shuffled = errors[torch.randperm(40, generator=torch.Generator().manual_seed(1))]
    assert torch.equal(conformal(shuffled), whole)
    for number in range(len(LEVELS)):
        assert torch.equal(conformal(errors[..., number : number + 1])[number], whole[number])
    none = conformal(errors[25:])
    assert none[:, 0].tolist() == [-np.inf] * 12 + [0.0] + [np.inf] * 12


def test_levels_between_are_infinite_where_one_of_their_neighbours_is() -> None:
    calibration = Calibration(conformal(torch.randn(30, 1, 1))[:, None])
    zeros = torch.zeros(1, 1, 1, 1)
    levels = (0.04, 0.05, 0.06, 0.5, 0.95, 0.951)
    found = calibration.quantiles(zeros, torch.ones(1, 1), levels)[0, 0, 0]
    assert found.isinf().tolist() == [True, False, False, False, False, True]
    assert calibration.unsupported((0.05, 0.5, 0.95)) is None
    text = calibration.unsupported((0.025, 0.5, 0.99))
    assert text is not None
    assert text.startswith("quantiles 0.025, 0.99 are infinite: validation has too few values")
    assert "(99 per step" in text
    between = calibration.unsupported((0.04,))
    assert between is not None
    assert "(39 per step" in between


def test_what_few_validation_values_cannot_tell_is_infinite_and_a_warning() -> None:
    y = np.random.default_rng(0).normal(size=160).astype(np.float32)
    given: dict[str, Any] = {"horizon": 4, "input_size": 8, "patch": 4, "hidden_size": 8}
    model = Forecaster(**given, steps=2, split=(90, 30, 40)).fit(y)  # 27 validation windows
    found = model.predict_quantiles(quantiles=(0.05, 0.5, 0.95))
    assert np.isfinite(found).all()
    with pytest.warns(UserWarning, match=r"quantiles 0\.025, 0\.975 are infinite"):
        found = model.predict_quantiles(quantiles=(0.025, 0.5, 0.975))
    assert (found[:, 0] == -np.inf).all()
    assert (found[:, 2] == np.inf).all()
    with pytest.warns(UserWarning, match="or levels nearer to 0.5"):
        assert model.coverage((0.95,)) == {0.95: 1.0}
    report = model.backtest()["forecaster"]
    assert report["coverage_95"] == 1.0
    assert np.isfinite(report["crps"])
