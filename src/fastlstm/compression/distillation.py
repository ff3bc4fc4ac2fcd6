"""Learning from a teacher: the loss of a student, formed chunk by chunk of its rows.

The loss of a row is ``alpha T^2 KL(teacher || student at temperature T) + (1 - alpha) nats``
(Hinton et al. 2015): T^2 keeps the teacher's share of the gradient the same at any temperature.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastlstm.nn.loss import CHUNK_ELEMENTS
from fastlstm.ops.call import torchs_dtype


class OutputLayer(NamedTuple):
    """An output layer with weight `(V, H)`, bias `(V,)` and input features `(N, H)`."""

    features: Tensor
    weight: Tensor
    bias: Tensor

    def logits(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Returns the logits of some rows, `(n, V)`, computed in `dtype`."""
        features, weight, bias = (t.to(dtype) for t in (self.features[rows], *self[1:]))
        return torch.addmm(bias, features, weight.t())


class Logits(NamedTuple):
    """The logits of an output layer, `(N, V)`."""

    values: Tensor

    def logits(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Returns the logits of some rows, `(n, V)`."""
        return self.values[rows].to(dtype)


def distillation_loss(
    student: OutputLayer, teacher: Logits | OutputLayer, targets: Tensor, temperature: float,
    alpha: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the summed loss of all rows, and the nats of their targets.

    Logits of an `OutputLayer` are computed in chunks of rows, never all at once. Only the student
    gets gradients. Targets are `(N,)` int64. Both scalars are float32 (float64 for float64
    features). Under autocast the products run in its dtype, the rest in float32.
    """
    total, nats = _Distillation.apply(  # type: ignore[no-untyped-call]
        *student, type(teacher)(*(t.detach() for t in teacher)), targets, temperature, alpha
    )
    return total, nats


class _Distillation(torch.autograd.Function):
    """Computes all gradients in forward, chunk by chunk; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, bias: Tensor,
        teacher: Logits | OutputLayer, targets: Tensor, temperature: float, alpha: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        student = OutputLayer(features, weight, bias)
        kind, dtype = features.device.type, torchs_dtype(features)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        gradients = [torch.zeros_like(t, dtype=wide) for t in student]
        total, nats = (torch.zeros((), dtype=wide, device=features.device) for _ in range(2))
        step = max(64, CHUNK_ELEMENTS // weight.shape[0])
        with torch.autocast(kind, enabled=False):
            for start in range(0, len(targets), step):
                rows = slice(start, start + step)
                own, other = (o.logits(rows, dtype).to(wide) for o in (student, teacher))
                d, loss, nats_of_rows = _chunk(own, other, targets[rows], temperature, alpha)
                total += loss
                nats += nats_of_rows
                gradients[2] += d.sum(0)
                d = d.to(dtype)
                gradients[0][rows] = d @ weight.to(dtype)
                gradients[1] += d.t() @ features[rows].to(dtype)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [t.dtype for t in student]
        ctx.mark_non_differentiable(nats)
        return total, nats

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return (*((t * grads[0]).to(dtype) for t, dtype in pairs), None, None, None, None)


def _chunk(
    student: Tensor, teacher: Tensor, targets: Tensor, temperature: float, alpha: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradient of the logits of the student `(n, V)`, the loss, and the nats."""
    log_p = torch.log_softmax(student, 1)
    nats = -log_p.gather(1, targets.unsqueeze(1)).sum()
    d = log_p.exp_().mul_(1 - alpha)
    d.scatter_add_(1, targets.unsqueeze(1), d.new_full((len(targets), 1), alpha - 1))
    soft, aim = (torch.log_softmax(logits / temperature, 1) for logits in (student, teacher))
    divergence = F.kl_div(soft, aim, reduction="sum", log_target=True)
    d.add_(soft.exp_().sub_(aim.exp_()), alpha=alpha * temperature)
    return d, alpha * temperature**2 * divergence + (1 - alpha) * nats, nats
