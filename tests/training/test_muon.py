import pytest
import torch

from fastlstm.training import muon
from fastlstm.training.muon import Muon, orthogonalise

pytestmark = pytest.mark.isa


@pytest.mark.parametrize("shape", [(4, 64, 64), (4, 64, 32), (4, 32, 64), (1, 7, 5)])
def test_singular_values_come_near_one(shape):
    torch.manual_seed(0)
    singular = torch.linalg.svdvals(orthogonalise(torch.randn(shape)).float())
    assert singular.median() > 0.65
    assert singular.max() < 1.3


def test_zero_gradient_stays_zero():
    assert torch.count_nonzero(orthogonalise(torch.zeros(4, 8, 8))) == 0


def test_scale_of_the_gradient_does_not_matter():
    torch.manual_seed(0)
    gradient = torch.randn(4, 16, 16)
    torch.testing.assert_close(
        orthogonalise(gradient), orthogonalise(gradient * 1024), atol=1e-3, rtol=0
    )


def test_gates_are_updated_independently():
    torch.manual_seed(0)
    results = []
    for scale in (1.0, 100.0):
        weight = torch.nn.Parameter(torch.zeros(32, 8))
        torch.manual_seed(1)
        weight.grad = torch.randn(32, 8)
        weight.grad[:8] *= scale
        Muon([weight], lr=0.1).step()
        results.append(weight.detach()[8:].clone())
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("columns", [4, 8, 12])
def test_it_learns_a_linear_map(columns):
    torch.manual_seed(0)
    target, weight = torch.randn(32, columns), torch.nn.Parameter(torch.zeros(32, columns))
    optimizer = Muon([weight], lr=0.3)
    first = last = 0.0
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 0.3 * (1 - step / 200)
        loss = (weight - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first, last = first or loss.item(), loss.item()
    assert last < 0.02 * first


class KernelsByTorch:
    """`MuonStep` for CPUs: the same update by torch's operators."""

    def __init__(
        self, weight, update, gradient, momentum, inverse, is_bad, rate, decay, weight_decay, safety
    ):
        self._tensors = weight, update, gradient, momentum
        self._scalars = inverse, is_bad, rate, decay, weight_decay, safety

    def begin(self):
        _, update, gradient, momentum = self._tensors
        inverse, _, _, decay, _, safety = self._scalars
        gradient = gradient / inverse
        self._running = torch.lerp(momentum, gradient, 1 - decay)
        found = torch.lerp(gradient, self._running, decay).view(update.shape).to(update.dtype)
        norm = found.float().norm(dim=(-2, -1), keepdim=True)
        update.copy_(found / (safety * norm + 1e-7))

    def end(self, direction, scale):
        weight, _, _, momentum = self._tensors
        _, is_bad, rate, _, weight_decay, _ = self._scalars
        if not is_bad:
            momentum.copy_(self._running)
            weight.mul_(1 - rate * weight_decay)
            weight.sub_(direction.reshape(weight.shape).float() * (rate * scale))


@pytest.mark.parametrize("is_bad", [0.0, 1.0])
def test_recorded_weights_of_one_shape_move_together_as_they_do_alone(monkeypatch, is_bad):
    torch.manual_seed(0)
    shapes = [(48, 12), (48, 5), (48, 12), (48, 12), (48, 5)]
    weights = [torch.randn(shape) for shape in shapes]
    gradients = [torch.randn(shape) for shape in shapes]
    found = []
    for has_kernels in (False, True):
        own = [w.clone().requires_grad_() for w in weights]
        optimizer = Muon(own, lr=torch.tensor(0.1), weight_decay=0.01)
        for weight, gradient in zip(own, gradients, strict=True):
            weight.grad = gradient.clone()
            optimizer.state[weight]["momentum"] = gradient.sin()
        optimizer.found_inf, optimizer.grad_scale = torch.tensor(is_bad), torch.tensor(2.0)
        monkeypatch.setattr(muon, "_has_kernels", lambda device, value=has_kernels: value)
        monkeypatch.setattr(muon, "MuonStep", KernelsByTorch)
        optimizer.step()
        found.append(own + [optimizer.state[w]["momentum"] for w in own])
    for mine, want, before in zip(*found[::-1], weights + weights, strict=True):
        torch.testing.assert_close(mine, want, atol=0.02, rtol=0.02)
        assert mine.shape == before.shape
    assert all(torch.equal(a, b) == bool(is_bad) for a, b in zip(found[1], weights, strict=False))
