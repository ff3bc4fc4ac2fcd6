"""The mean of the weights that several processes have trained, and of their moving averages."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastlstm.distributed.step_report import StepReport

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer


class WeightMean:
    """Moves all processes to the mean of what they have trained since they were alike.

    A process counts as much as the targets it has trained on::

        mean = before + sum(targets[r] * (own[r] - before)) / sum(targets[r])

    What has changed since travels, so that a wire of bf16 rounds only that. The state of its
    optimizers stays each process's own.

    Args:
        trainer: whose weights they are, and whose plan has the processes.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._world, self._average = trainer.world, trainer.state.average
        named = dict(trainer.model.named_parameters())
        self._named = {name: p for name, p in named.items() if p.requires_grad}
        device, num = trainer.plan.device, sum(p.numel() for p in self._named.values())
        sizes = [num, 0 if self._average is None else num]
        self._flat = torch.zeros(sum(sizes), device=device)
        self._weights, self._averaged = self._flat.split(sizes)
        self._before = torch.zeros(num, device=device)
        wire = torch.bfloat16 if trainer.plan.options.wire == "bf16" else torch.float32
        self._reduce = self._world.reduction(self._flat, wire)

    def begin(self) -> None:
        """Notes the weights, which are alike in all processes."""
        self._note(self._before, (p.detach() for p in self._named.values()))

    def checksum(self) -> int:
        """Returns the CRC-32 of the weights that were noted."""
        return zlib.crc32(self._before.cpu().numpy().tobytes())

    def take(self, num_targets: int) -> bool:
        """Takes what this process has trained; returns False, and takes none of it, where a number
        is not finite."""
        self._note(self._weights, (p.detach() for p in self._named.values()))
        self._weights.sub_(self._before)
        if self._average is not None:
            averages = self._average.tensors()
            self._note(self._averaged, (averages[name] for name in self._named))
            self._averaged.sub_(self._before)
        is_finite = bool(self._flat.isfinite().all())
        if is_finite:
            self._flat.mul_(num_targets)
        else:
            self._flat.zero_()
        return is_finite

    @torch.no_grad()
    def move(self, report: StepReport, deadline_s: float) -> None:
        """Adds what all have taken, and what they report, and moves to the mean."""
        updates = 0.0 if self._average is None else float(self._average.updates)
        weighted = float(report.targets[report.rank]) * updates
        about = torch.cat([report.numbers, torch.tensor([weighted], dtype=torch.float64)])
        self._reduce(about, deadline_s)
        report.numbers.copy_(about[:-1])
        if not report.num_targets:
            self._set_weights(self._before)
            return
        self._flat.div_(report.num_targets)
        self._set_weights(self._weights.add_(self._before))
        if self._average is not None:
            parts = self._pieces(self._averaged.add_(self._before), self._named.values())
            averages = dict(zip(self._named, parts, strict=True))
            self._average.load(averages, round(float(about[-1]) / report.num_targets))

    def _set_weights(self, flat: Tensor) -> None:
        pieces = self._pieces(flat, self._named.values())
        for parameter, piece in zip(self._named.values(), pieces, strict=True):
            parameter.copy_(piece)

    def _pieces(self, flat: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
        shapes = [tensor.shape for tensor in like]
        pieces = flat.split([shape.numel() for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def _note(self, flat: Tensor, tensors: Iterable[Tensor]) -> None:
        tensors = list(tensors)
        torch._foreach_copy_(self._pieces(flat, tensors), tensors)
