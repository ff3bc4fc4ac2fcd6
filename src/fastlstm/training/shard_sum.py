"""The gradient of a batch as the sum over its shards, the same bits at any number of processes."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastlstm.distributed.shards import shard_seed
from fastlstm.training.task import even_parts

if TYPE_CHECKING:
    from fastlstm.training.state import TrainingState
    from fastlstm.training.task import Task
    from fastlstm.training.trainer import Trainer

_CHECK_EVERY = 100
"""Steps between comparisons of the weights of all processes."""


class ShardSum:
    """Runs the shards of a batch that are this process's own, and adds the gradients of all.

    A shard's gradient is that of the *sum* of its losses, which is divided once, by the targets of
    the whole batch, after all shards are added (`Shards` has the order). Its random numbers follow
    from the seed, the step and its number.

    Args:
        parameters: that are trained.
        trainer: whose plan has the shards, and the processes that share a step.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], trainer: Trainer) -> None:
        plan, self._rescue = trainer.plan, trainer.rescue
        self._parameters, self._shards, self._world = parameters, plan.shards, plan.step_world
        self._seed, self._device = plan.options.seed, plan.device
        # Sums are divided by about the rows at once, so that fp16 does not overflow; a power of two
        # changes no bit.
        rows = plan.options.batch_size * plan.options.accumulate
        self._scale = 2.0 ** rows.bit_length()
        self._flat = self._new_flat()
        self._unused = list[Tensor]()
        wire = torch.bfloat16 if plan.options.wire == "bf16" else torch.float32
        self._reduce = self._world.reduction(self._flat, wire)

    def passes(self, task: Task, state: TrainingState, batch: Any, num_parts: int) -> float:
        """Leaves the gradient of the mean loss in the parameters; returns the mean loss."""
        started, own = time.perf_counter(), self._shards.own
        rows = self._shards.parts(task.num_places(batch), task.num_rows(batch))
        cut = [
            [
                slice(shard.start + part.start, shard.start + part.stop)
                for part in even_parts(shard.stop - shard.start, num_parts)
            ]
            for shard in rows
        ]
        losses = task.losses(batch, list(chain(*cut)), self._scale)
        report = self._world.report(self._shards.num)
        sums, part_losses = list[tuple[int, Tensor]](), list[Tensor]()
        for shard, inner in zip(own, cut, strict=True):
            self._draw_anew(state.progress.step, shard)
            for _ in inner:
                part_loss = next(losses)
                scaler = state.scaler
                (part_loss if scaler is None else scaler.scale(part_loss)).backward()
                part_losses.append(part_loss.detach())
            sums.append((0, self._taken_gradient(shard == own.start)))
            while len(sums) > 1 and sums[-1][0] == sums[-2][0]:
                level, last = sums.pop()
                sums[-1] = (level + 1, sums[-1][1].add_(last))
                self._unused.append(last)
        next(losses, None)  # the carried state moves on
        values = iter(torch.stack(part_losses).tolist())  # only now: it waits for a GPU
        for shard, inner in zip(own, cut, strict=True):
            report.losses[shard] = sum(islice(values, len(inner)), 0.0)
        self._rescue.begin_step()
        seconds, check = time.perf_counter() - started, self._check(state.progress.step)
        report.set_own(task.num_targets(batch), seconds, check, self._world.signal)
        self._reduce(report.numbers)
        self._rescue.finish_step()
        self._world.received(report)
        self._flat.mul_(self._scale / max(report.num_targets, 1.0))
        for parameter, gradient in zip(self._parameters, self._views(self._flat), strict=True):
            parameter.grad = gradient
        return self._scale * report.loss / max(report.num_targets, 1.0)

    def _check(self, step: int) -> int:
        """Returns a checksum of the weights, now and then; else 0."""
        if step % _CHECK_EVERY or self._world.size == 1:
            return 0
        check = 0
        for parameter in self._parameters:
            check = zlib.crc32(parameter.detach().cpu().contiguous().numpy().tobytes(), check)
        return check

    def _draw_anew(self, step: int, shard: int) -> None:
        seed = shard_seed(self._seed, step, shard)
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _new_flat(self) -> Tensor:
        return torch.zeros(sum(p.numel() for p in self._parameters), device=self._device)

    def _views(self, flat: Tensor) -> list[Tensor]:
        pieces = flat.split([p.numel() for p in self._parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, self._parameters, strict=True)]

    def _taken_gradient(self, is_first: bool) -> Tensor:
        """Returns the gradients of the parameters as a vector, and removes them there."""
        flat = self._flat if is_first else self._unused.pop() if self._unused else self._new_flat()
        views, gradients = list[Tensor](), list[Tensor]()
        for parameter, view in zip(self._parameters, self._views(flat), strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                views.append(view)
                gradients.append(parameter.grad)
                parameter.grad = None
        torch._foreach_copy_(views, gradients)
        return flat
