"""The mean of what several processes have trained: weights, their moving average, optimizers."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastlstm.distributed.step_report import StepReport

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer


class StateMean:
    """Moves all processes to the mean of what they have trained since they were alike.

    A process counts as much as the targets it has trained on::

        mean = before + sum(targets[r] * (own[r] - before)) / sum(targets[r])

    Weights and their moving average travel as what has changed since, so that a wire of bf16 rounds
    only that; the tensors of optimizers, where `before` is zero, as they are. The counters of
    optimizers travel with the report, exact.

    Args:
        trainer: whose state it is, and whose plan has the processes.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._world, self._state = trainer.world, trainer.state
        named = dict(trainer.model.named_parameters())
        self._named = {name: p for name, p in named.items() if p.requires_grad}
        shapes = self._state.optimizers.shapes()
        self._shapes = {name: shape for name, shape in shapes.items() if shape}
        self._counters = [name for name, shape in shapes.items() if not shape]
        device, num = trainer.plan.device, sum(p.numel() for p in self._named.values())
        moments = sum(shape.numel() for shape in self._shapes.values())
        sizes = [num, 0 if self._state.average is None else num, moments]
        self._flat = torch.zeros(sum(sizes), device=device)
        self._weights, self._average, self._moments = self._flat.split(sizes)
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
        state, own = self._state, self._state.optimizers.tensors()
        self._note(self._weights, (p.detach() for p in self._named.values()))
        self._weights.sub_(self._before)
        if state.average is not None:
            averages = state.average.tensors()
            self._note(self._average, (averages[name] for name in self._named))
            self._average.sub_(self._before)
        # Where every step was skipped there is nothing yet; it counts nothing then.
        moments = (
            own[name] if name in own else torch.zeros(shape) for name, shape in self._shapes.items()
        )
        self._note(self._moments, moments)
        is_finite = bool(self._flat.isfinite().all())
        if is_finite:
            self._flat.mul_(num_targets)
        else:
            self._flat.zero_()
        return is_finite

    @torch.no_grad()
    def move(self, report: StepReport, deadline_s: float) -> None:
        """Adds what all have taken, and what they report, and moves to the mean."""
        state, own = self._state, self._state.optimizers.tensors()
        targets = float(report.targets[report.rank])
        counts = [float(own[name]) if name in own else 0.0 for name in self._counters]
        counts.append(0.0 if state.average is None else state.average.updates)
        about = torch.cat([report.numbers, targets * torch.tensor(counts, dtype=torch.float64)])
        self._reduce(about, deadline_s)
        numbers, counters = about.split([len(report.numbers), len(counts)])
        report.numbers.copy_(numbers)
        if not report.num_targets:
            self._set_weights(self._before)
            return
        self._flat.div_(report.num_targets)
        counters /= report.num_targets
        self._set_weights(self._weights.add_(self._before))
        if state.average is not None:
            parts = self._pieces(self._average.add_(self._before), self._named.values())
            averages = dict(zip(self._named, parts, strict=True))
            state.average.load(averages, round(float(counters[-1])))
        sizes = [shape.numel() for shape in self._shapes.values()]
        pieces = zip(self._shapes.items(), self._moments.split(sizes), strict=True)
        tensors = {name: piece.view(shape) for (name, shape), piece in pieces}
        for name, count in zip(self._counters, counters.float(), strict=False):
            tensors[name] = count.to(own[name].device) if name in own else count
        state.optimizers.load(tensors)

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
