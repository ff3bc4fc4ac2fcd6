"""Losses, centers and quantiles of outputs; those of distributions against SciPy's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastlstm.forecast.model import outputs
from fastlstm.forecast.model.outputs import (
    QUANTILES,
    NegativeBinomial,
    Output,
    StudentT,
    make_output,
    negative_binomial_quantiles,
    student_quantile,
)

KINDS = ("point", "quantiles", "student_t", "negative_binomial")


def parameters(output: Output, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
    """Returns network outputs of five values, in units of ``value * scale + shift``."""
    raw = torch.randn(5, output.num_parameters, generator=torch.Generator().manual_seed(3))
    whole = torch.ones(5)
    return output.restored(raw, scale * whole, shift * whole)


@pytest.mark.parametrize("kind", KINDS)
def test_every_output_has_a_loss_a_center_and_quantiles(kind: str) -> None:
    output = make_output(kind)
    found = parameters(output)
    target = torch.arange(5.0)
    assert output.loss(found, target).shape == (5,)
    assert output.loss(found, target).isfinite().all()
    assert output.center(found).shape == (5,)
    quantiles = output.quantiles(found, (0.1, 0.5, 0.9))
    assert quantiles.shape == (5, 1 if kind == "point" else 3)
    assert (quantiles.diff(dim=-1) >= 0).all()


@pytest.mark.parametrize("kind", ["point", "quantiles", "student_t"])
def test_centers_and_quantiles_follow_scale_and_shift(kind: str) -> None:
    output = make_output(kind)
    plain, moved = parameters(output), parameters(output, 3.0, -7.0)
    torch.testing.assert_close(output.center(moved), 3 * output.center(plain) - 7)
    levels = (0.05, 0.5, 0.8)
    expected = 3 * output.quantiles(plain, levels) - 7
    torch.testing.assert_close(output.quantiles(moved, levels), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("loss", "expected"), [("mae", [0.0, 1.0, 2.0]), ("mse", [0, 1, 4]), ("huber", [0, 0.75, 1.75])]
)
def test_losses_of_a_point(loss: str, expected: list[float]) -> None:
    found = make_output("point", loss).loss(
        torch.tensor([[1.0], [1.0], [1.0]]), torch.tensor([1.0, 2, 3])
    )
    assert found.tolist() == pytest.approx(expected)


def test_quantiles_interpolate_the_learned_ones() -> None:
    output = make_output("quantiles")
    found = torch.tensor([sorted(range(7), reverse=True)], dtype=torch.float32)  # crossing ones
    assert output.quantiles(found, QUANTILES).tolist() == [[0, 1, 2, 3, 4, 5, 6]]
    assert output.quantiles(found, (0.001, 0.375, 0.999)).tolist() == [[0, 2.5, 6]]


def test_the_pinball_loss_is_least_at_the_quantiles() -> None:
    output = make_output("quantiles")
    target = torch.rand(4000, generator=torch.Generator().manual_seed(0))
    at = torch.tensor(QUANTILES).expand(4000, -1)
    best = output.loss(at, target).mean()
    for change in (-0.05, 0.05):
        assert output.loss(at + change, target).mean() > best


pytestmark = pytest.mark.usefixtures("poisoned_memory")

stats = pytest.importorskip("scipy.stats")

LEVELS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975, 0.99, 0.995)
MEANS = (1e-3, 0.5, 3.0, 40.0, 300.0, 700.0, 1000.0, 5000.0, 3e4, 1e6)
DISPERSIONS = (1e-4, 1e-3, 0.03, 0.0624, 0.0626, 0.2, 1.0, 2.0, 10.0, 50.0, 1000.0)


@pytest.mark.parametrize("mean", MEANS)
def test_quantiles_of_negative_binomials(mean: float) -> None:
    dispersions = np.array(DISPERSIONS)
    means = torch.full((len(DISPERSIONS),), mean, dtype=torch.float64)
    found = negative_binomial_quantiles(means, torch.tensor(DISPERSIONS).double(), LEVELS).numpy()
    shape, share = 1 / dispersions[:, None], 1 / (1 + mean * dispersions[:, None])
    want = stats.nbinom.ppf(np.array(LEVELS), shape, share)
    np.testing.assert_allclose(found, want, rtol=0.01, atol=0)
    if mean <= 40:  # summed, but where the largest is beyond a thousand
        is_summed = want.max(1) < 900
        np.testing.assert_array_equal(found[is_summed], want[is_summed])


def test_many_percentiles_of_many_distributions() -> None:
    """Rows of very different lengths keep their order."""
    rng = np.random.default_rng(0)
    mean, dispersion = 10 ** rng.uniform(-2, 6, 700), 10 ** rng.uniform(-3, 3, 700)
    levels = [k / 100 for k in range(1, 100)]
    found = negative_binomial_quantiles(
        torch.tensor(mean).view(7, 100), torch.tensor(dispersion).view(7, 100), levels
    )
    want = stats.nbinom.ppf(levels, 1 / dispersion[:, None], 1 / (1 + (mean * dispersion))[:, None])
    np.testing.assert_allclose(found.view(700, 99).numpy(), want, rtol=0.01, atol=0)


def test_counts_go_on_until_the_largest_level_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first estimate of the number of counts is far too small."""
    for name in ("_long", "_short"):
        monkeypatch.setattr(outputs, name, lambda mean, _, levels: mean.new_zeros(len(mean), 13))
    mean, dispersion = np.array([3.0, 40.0, 200.0]), np.array([0.2, 1.0, 0.05])
    found = negative_binomial_quantiles(torch.tensor(mean), torch.tensor(dispersion), LEVELS)
    shape, share = 1 / dispersion[:, None], 1 / (1 + mean * dispersion)[:, None]
    np.testing.assert_array_equal(found.numpy(), stats.nbinom.ppf(LEVELS, shape, share))


@pytest.mark.parametrize("degrees", [2.0, 2.01, 2.5, 3.0, 4.0, 5.0, 8.0, 30.0, 1000.0, 1e6])
def test_quantiles_of_students_t(degrees: float) -> None:
    found = [float(student_quantile(torch.tensor(degrees).double(), q)) for q in LEVELS]
    np.testing.assert_allclose(found, stats.t.ppf(LEVELS, degrees), rtol=0.01, atol=1e-9)
    near = (0.49, 0.499, 0.501)
    found = [float(student_quantile(torch.tensor(degrees).double(), q)) for q in near]
    np.testing.assert_allclose(found, stats.t.ppf(near, degrees), rtol=0.01, atol=0)


@pytest.mark.parametrize("degrees", [2.0, 2.2, 2.5, 3.0, 3.5, 4.0, 4.4, 4.6, 5.0, 7.0])
def test_quantiles_of_students_t_are_within_their_level(degrees: float) -> None:
    levels = [k / 200 for k in range(1, 200)]
    found = [float(student_quantile(torch.tensor(degrees).double(), q)) for q in levels]
    np.testing.assert_allclose(stats.t.cdf(found, degrees), levels, rtol=0, atol=3e-4)


def test_likelihood_of_counts_in_float32_is_that_of_the_distribution() -> None:
    mean, dispersion, y = np.meshgrid((0.3, 40.0, 3e4), (1e-4, 0.03, 2.0), (0.0, 35.0, 31_000.0))
    parameters = torch.tensor(np.stack([mean, dispersion], -1)).float()
    found = NegativeBinomial().loss(parameters, torch.tensor(y).float())
    assert found.dtype == torch.float32
    mean, dispersion = parameters.double().numpy().transpose(3, 0, 1, 2)
    want = -stats.nbinom.logpmf(y, 1 / dispersion, 1 / (1 + mean * dispersion))
    np.testing.assert_allclose(found.numpy(), want, rtol=1e-5)


def test_likelihood_and_quantiles_of_students_t_agree() -> None:
    rng = np.random.default_rng(0)
    parameters = torch.tensor(rng.normal(size=(20, 3)) * 2)
    degrees = 2 + np.log1p(np.exp(parameters[:, 0].numpy()))
    location = parameters[:, 1].numpy()
    scale = np.log1p(np.exp(parameters[:, 2].numpy()))
    target = torch.tensor(rng.normal(size=20))
    output = StudentT()
    want = -stats.t.logpdf(target.numpy(), degrees, location, scale)
    np.testing.assert_allclose(output.loss(parameters, target).numpy(), want, rtol=1e-4)
    found = output.quantiles(parameters, LEVELS).numpy()
    want = stats.t.ppf(LEVELS, degrees[:, None], location[:, None], scale[:, None])
    np.testing.assert_allclose((found - want) / scale[:, None], 0, atol=0.02)
