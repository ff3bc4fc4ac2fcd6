"""Muon: momentum whose matrix updates are orthogonalised, for the recurrent matrices.

Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Amsel et
al., "The Polar Express", 2025, for polynomials that differ from step to step.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fastlstm.ops.cuda.training import MuonStep, refusal
from fastlstm.system import hardware

_POLYNOMIALS = ((8.0934, -23.6204, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526))
"""Coefficients of x, x^3, x^5. Each polynomial is the odd quintic nearest to 1 on the range to
which earlier ones map singular values of 0.01 to 1 (found by linear programming). The last one maps
them to 0.73 to 1.27."""
_SAFETY = 1.01
"""bf16 may round a singular value of 1 up, to where the first polynomial rises steeply."""
_NUM_STREAMS = 4


def orthogonalise(update: torch.Tensor) -> torch.Tensor:
    """Returns about the nearest semi-orthogonal matrices, with singular values in 0.7..1.3.

    They have the shape `(N, rows, columns)` of the updates, in bfloat16 if the device multiplies it
    fast, else in float32: emulation is 40x slower.

    Numerics: the polynomials take singular values in 0..1, so each matrix is divided by its
    Frobenius norm first. Singular values below a hundredth of that norm stay smaller, and a zero
    matrix stays zero.
    """
    is_fast = update.is_cuda or hardware.bf16_instructions() is not None
    x = update.to(torch.bfloat16 if is_fast else torch.float32)
    return _orthogonalised(x / (_SAFETY * x.norm(dim=(-2, -1), keepdim=True) + 1e-7))


def _orthogonalised(x: torch.Tensor) -> torch.Tensor:
    """`orthogonalise` for matrices with singular values up to 1."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for a, b, c in _POLYNOMIALS:
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


class Branches:
    """Blocks of GPU work that run concurrently, each on a stream; on a CPU in turn.

    Memory that a block allocates must not be used outside. The streams are reused: cuBLAS keeps a
    workspace of 32 MiB for each.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._streams = device, list[torch.cuda.Stream]()

    def __enter__(self) -> Branches:
        return self

    def __exit__(self, *exc: object) -> None:
        for stream in self._streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)

    def next(self) -> AbstractContextManager[object]:
        if self._device.type != "cuda":
            return nullcontext()
        current = torch.cuda.current_stream(self._device)
        free = [stream for stream in _streams(current.device.index) if stream != current]
        stream = free[len(self._streams) % len(free)]
        stream.wait_stream(current)
        self._streams.append(stream)
        return torch.cuda.stream(stream)


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and refusal(device.index) is None


@functools.cache
def _streams(device: int) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(_NUM_STREAMS)]


class Muon(torch.optim.Optimizer):
    """Nesterov momentum with orthogonalised updates.

    A recurrent weight `(4H, K)` holds four independent matrices, one per gate; each `(H, K)` block
    is orthogonalised alone, so that no gate's update dominates another's.

    Args:
        params: two-dimensional parameters of shape `(4H, K)`.
        lr: spectral norm of an update, times sqrt(H / K) if H > K.
        momentum: decay of the running gradient.
        weight_decay: decoupled.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        moved = [
            (parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if moved and isinstance(moved[0][1]["lr"], torch.Tensor):
            self._step_recorded(moved)
            return
        for parameter, group in moved:
            gradient, kept = parameter.grad, self.state[parameter].get("momentum")
            before = torch.zeros_like(parameter) if kept is None else kept
            running = torch.lerp(before, gradient, 1 - group["momentum"])
            update = torch.lerp(gradient, running, group["momentum"])
            direction = orthogonalise(update.view(4, -1, parameter.shape[1]))
            if group.get("capturable") and kept is not None:  # a CUDA graph has its address
                kept.copy_(running)
            else:
                self.state[parameter]["momentum"] = running
            if group["weight_decay"]:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
            scale = max(1.0, direction.shape[1] / direction.shape[2]) ** 0.5
            direction = direction.to(parameter.dtype).reshape(parameter.shape)
            parameter.add_(direction, alpha=-group["lr"] * scale)

    def _step_recorded(self, moved: list[tuple[torch.Tensor, dict[str, Any]]]) -> None:
        """An update within a CUDA graph, in place.

        As in torch's fused optimizers, `grad_scale` divides the gradients, and nothing changes if
        `found_inf` is 1. Weights of one shape are orthogonalised together.
        """
        device = moved[0][0].device
        if not _has_kernels(device):
            for parameter, group in moved:
                self._move_recorded(parameter, group)
            return
        alike = defaultdict[torch.Size, list[tuple[torch.Tensor, dict[str, Any]]]](list)
        for parameter, group in moved:
            alike[parameter.shape].append((parameter, group))
        with Branches(device) as branches:
            for (rows, columns), members in alike.items():
                with branches.next():
                    H = rows // 4
                    shape = (4 * len(members), H, columns)
                    updates = torch.empty(shape, dtype=torch.bfloat16, device=device)
                    steps = [
                        self._kernels_of(*member, update)
                        for member, update in zip(members, updates.split(4), strict=True)
                    ]
                    for step in steps:
                        step.begin()
                    directions = _orthogonalised(updates).split(4)
                    for step, direction in zip(steps, directions, strict=True):
                        step.end(direction, max(1.0, H / columns) ** 0.5)

    def _kernels_of(
        self, parameter: torch.Tensor, group: dict[str, Any], update: torch.Tensor
    ) -> MuonStep:
        found_inf, inverse = self.found_inf, self.grad_scale  # type: ignore[attr-defined]
        assert parameter.grad is not None
        return MuonStep(
            parameter, update, parameter.grad, self.state[parameter]["momentum"], inverse,
            found_inf, group["lr"], group["momentum"], group["weight_decay"], _SAFETY,
        )  # fmt: skip

    def _move_recorded(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        """Does the same for one weight, by torch's operators."""
        found_inf, inverse = self.found_inf, self.grad_scale  # type: ignore[attr-defined]
        kept, rate, decay = self.state[parameter]["momentum"], group["lr"], group["weight_decay"]
        assert parameter.grad is not None
        scale = max(1.0, parameter.shape[0] / 4 / parameter.shape[1]) ** 0.5
        is_bad, gradient = found_inf != 0, parameter.grad / inverse
        running = torch.lerp(kept, gradient, 1 - group["momentum"])
        update = torch.lerp(gradient, running, group["momentum"])
        direction = orthogonalise(update.view(4, -1, parameter.shape[1]))
        moved = direction.reshape(parameter.shape).to(parameter.dtype) * (rate * scale)
        if decay:
            moved += parameter * (rate * decay)
        kept.copy_(torch.where(is_bad, kept, running))
        parameter.sub_(moved.masked_fill_(is_bad, 0.0))
