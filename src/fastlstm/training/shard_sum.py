"""The gradient of a batch as the sum over its shards, the same bits at any number of processes."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastlstm.distributed.shards import shard_seed
from fastlstm.ops.joined_shards import JoinedShards
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
        self._say, self._is_said = trainer.say, False
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
        report = self._world.report(self._shards.num)
        refusal = task.joining_refusal(batch, rows)
        if num_parts > 1:
            refusal = "each is computed in several parts"
        if refusal is None and all(part.stop > part.start for part in rows):
            losses = self._joined(task, state, batch, rows)
        else:
            self._say_once(refusal)
            losses = self._one_by_one(task, state, batch, rows, num_parts)
        report.losses[own.start : own.stop] = losses
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

    def _one_by_one(
        self, task: Task, state: TrainingState, batch: Any, rows: list[slice], num_parts: int
    ) -> Tensor:
        """Adds the gradients of shards that run one after another; returns their losses."""
        cut = [
            [
                slice(shard.start + part.start, shard.start + part.stop)
                for part in even_parts(shard.stop - shard.start, num_parts)
            ]
            for shard in rows
        ]
        parts = task.losses(batch, list(chain(*cut)), self._scale)
        losses, sums = [list[Tensor]() for _ in rows], list[tuple[int, Tensor]]()
        for number, inner in enumerate(cut):
            self._draw_anew(state.progress.step, self._shards.own[number])
            for _ in inner:
                loss = next(parts)
                scaler = state.scaler
                (loss if scaler is None else scaler.scale(loss)).backward()
                losses[number].append(loss.detach().double())
            flat = self._flat if number == 0 else self._spare()
            sums.append((0, self._as_vector([_taken(p) for p in self._parameters], flat)))
            while len(sums) > 1 and sums[-1][0] == sums[-2][0]:
                level, last = sums.pop()
                sums[-1] = (level + 1, sums[-1][1].add_(last))
                self._unused.append(last)
        next(parts, None)  # the carried state moves on
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        return torch.stack([sum(own, zero) for own in losses]).cpu()  # only now: it waits for a GPU

    def _joined(self, task: Task, state: TrainingState, batch: Any, rows: list[slice]) -> Tensor:
        """Adds the gradients of shards that run as one; returns their losses."""
        seeds = [shard_seed(self._seed, state.progress.step, k) for k in self._shards.own]
        shards = JoinedShards(rows, seeds)
        with shards.active():
            parts = task.losses(batch, [slice(rows[0].start, rows[-1].stop)], self._scale)
            losses = next(parts)
            losses.sum().backward()
            next(parts, None)  # the carried state moves on
        self._as_vector([shards.gradient(p) for p in self._parameters], self._flat)
        return losses.detach().double()

    def _say_once(self, refusal: str | None) -> None:
        if self._is_said or refusal is None or len(self._shards.own) == 1:
            return
        self._is_said = True
        self._say("info", f"the shards of a step run one after another: {refusal}")

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

    def _spare(self) -> Tensor:
        return self._unused.pop() if self._unused else self._new_flat()

    def _as_vector(self, gradients: list[Tensor | None], flat: Tensor) -> Tensor:
        """Fills a vector with the gradients of the parameters."""
        views, present = list[Tensor](), list[Tensor]()
        for gradient, view in zip(gradients, self._views(flat), strict=True):
            if gradient is None:
                view.zero_()
            else:
                views.append(view)
                present.append(gradient)
        torch._foreach_copy_(views, present)
        return flat


def _taken(parameter: Tensor) -> Tensor | None:
    """Returns the gradient of a parameter, and removes it there."""
    gradient, parameter.grad = parameter.grad, None
    return gradient
