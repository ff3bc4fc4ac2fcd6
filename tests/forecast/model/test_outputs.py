from __future__ import annotations

import pytest
import torch

from fastlstm.forecast.model.outputs import QUANTILES, Output, make_output

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


def test_counts_have_whole_quantiles_and_a_likelihood() -> None:
    output = make_output("negative_binomial")
    assert output.counts
    assert not output.is_calibrated
    found = torch.tensor([[4.0, 0.5]])
    assert (output.quantiles(found, (0.1, 0.5, 0.9)) % 1 == 0).all()
    chances = torch.exp(-output.loss(found.expand(200, -1), torch.arange(200.0)))
    assert float(chances.sum()) == pytest.approx(1.0, abs=1e-4)
    assert float((chances * torch.arange(200.0)).sum()) == pytest.approx(4.0, rel=1e-3)
