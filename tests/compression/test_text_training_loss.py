"""The loss of a student, beside what torch computes with all logits at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastlstm.compression import text_training
from fastlstm.compression.text_training import OutputLayer, distillation_loss

N, V = 150, 11


def outputs(dtype: torch.dtype = torch.float64) -> tuple[OutputLayer, OutputLayer, Tensor]:
    """A student of width 5, a teacher of width 7, and targets."""
    rng = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)

    student = OutputLayer(random(N, 5), random(V, 5), random(V))
    for tensor in student:
        tensor.requires_grad_()
    teacher = OutputLayer(random(N, 7), random(V, 7), random(V))
    return student, teacher, torch.randint(V, (N,), generator=rng)


def plain(
    student: OutputLayer, teacher: OutputLayer, targets: Tensor, temperature: float, alpha: float
) -> Tensor:
    own, other = (F.linear(o.features, o.weight, o.bias) for o in (student, teacher))
    soft = F.log_softmax(own / temperature, 1)
    aim = F.softmax(other / temperature, 1)
    divergence = F.kl_div(soft, aim, reduction="sum")
    nats = F.cross_entropy(own, targets, reduction="sum")
    return alpha * temperature**2 * divergence + (1 - alpha) * nats


@pytest.mark.parametrize(("temperature", "alpha"), [(2.0, 0.5), (1.0, 1.0), (0.7, 0.0), (4.0, 0.9)])
@pytest.mark.parametrize("chunk", [1 << 22, 64 * V])
def test_loss_and_gradients_are_torchs(
    temperature: float, alpha: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_training, "CHUNK_ELEMENTS", chunk)  # 3 chunks of 64, 64 and 22 rows
    student, teacher, targets = outputs()
    total, nats = distillation_loss(student, teacher, targets, temperature, alpha)
    want = plain(student, teacher, targets, temperature, alpha)
    torch.testing.assert_close(total, want)
    torch.testing.assert_close(nats, plain(student, teacher, targets, 1.0, 0.0))
    assert not nats.requires_grad
    got = torch.autograd.grad(3 * total, list(student))
    for own, other in zip(got, torch.autograd.grad(3 * want, list(student)), strict=True):
        torch.testing.assert_close(own, other)


def test_the_teacher_gets_no_gradient() -> None:
    student, teacher, targets = outputs()
    for tensor in teacher:
        tensor.requires_grad_()
    distillation_loss(student, teacher, targets, 2.0, 0.5)[0].backward()
    assert all(tensor.grad is None for tensor in teacher)
    assert all(tensor.grad is not None for tensor in student)


def test_a_student_equal_to_its_teacher_has_no_loss() -> None:
    student, _, targets = outputs()
    total, _ = distillation_loss(student, student, targets, 3.0, 1.0)
    assert total.item() == pytest.approx(0.0, abs=1e-12)
    for gradient in torch.autograd.grad(total, list(student)):
        assert float(gradient.abs().max()) < 1e-12


def test_autocast_rounds_products_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastlstm.system.hardware.has_bf16_products", lambda: True)
    student, teacher, targets = outputs(torch.float32)
    want = distillation_loss(student, teacher, targets, 2.0, 0.5)[0]
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = distillation_loss(student, teacher, targets, 2.0, 0.5)
    assert total.dtype == torch.float32
    assert 0 < abs(total.item() - want.item()) / want.item() < 0.01
    total.backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in student)


@pytest.mark.usefixtures("no_bf16_products")
def test_bf16_avoids_products_that_torch_lacks() -> None:
    student, teacher, targets = outputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = distillation_loss(student, teacher, targets, 2.0, 0.5)
    torch.testing.assert_close(
        torch.autograd.grad(total, student.weight)[0],
        torch.autograd.grad(plain(student, teacher, targets, 2.0, 0.5), student.weight)[0],
    )
