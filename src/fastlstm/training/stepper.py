"""One optimizer step: passes over the parts of a batch, clipping, update, average."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch

from fastlstm.training.shard_sum import ShardSum
from fastlstm.training.task import even_parts

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer


class Stepper:
    """Takes optimizer steps on the state of a trainer.

    A batch runs in `accumulate` parts whose losses add up to the mean loss of the whole, so the
    gradient is that of the big batch; with shards, each of them does (`ShardSum`). A GPU that runs
    out of memory gets the same batch again in twice as many parts. Callbacks see the gradients
    before they are clipped, and the weights before they are averaged.

    Attributes:
        seconds: spent so far in forward and backward passes, and in the rest of the steps.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._task, self._state = trainer, trainer.task, trainer.state
        self.seconds = {"forward_backward": 0.0, "optimizer": 0.0}
        self._num_parts = trainer.plan.options.accumulate
        self._parameters = [p for p in trainer.model.parameters() if p.requires_grad]
        shards = trainer.plan.shards
        is_cut = shards.num > 1
        self._shard_sum = ShardSum(self._parameters, trainer) if is_cut else None
        self._pipeline = trainer.task.pipeline

    def step(self, batch: Any, factor: float) -> tuple[float, float]:
        """Takes one step unless something is not finite; then the gradients stay for inspection.

        Returns the mean loss and the gradient norm before clipping; see `Trainer.step`.
        """
        started = time.perf_counter()
        with self._trainer.callbacks.weights_in_use():
            loss = self._forward_backward(batch)
        self.seconds["forward_backward"] += (passed := time.perf_counter()) - started
        norm = self._update(loss, factor)
        self.seconds["optimizer"] += time.perf_counter() - passed
        return loss, norm

    def _update(self, loss: float, factor: float) -> float:
        """Clips the gradients and updates the weights; returns the norm before."""
        scaler, optimizers = self._state.scaler, self._state.optimizers
        if scaler is not None:
            for optimizer in optimizers.members:
                scaler.unscale_(optimizer)
        self._trainer.callbacks.call("on_gradients")
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if self._pipeline is None:
            norm = torch.nn.utils.get_total_norm(gradients)
        else:
            norm = self._pipeline.norm
        is_finite = math.isfinite(loss) and math.isfinite(float(norm))
        if is_finite:
            max_norm = self._trainer.plan.options.grad_clip
            torch.nn.utils.clip_grads_with_norm_(self._parameters, max_norm, norm)
            optimizers.step(factor, scaler)
            optimizers.zero_grad()
            self._trainer.callbacks.call("on_update")
            if self._state.average is not None:
                self._state.average.update()
        if scaler is not None:
            scaler.update()
        return float(norm)

    def _forward_backward(self, batch: Any) -> float:
        while True:
            try:
                return self._passes(batch)
            except torch.cuda.OutOfMemoryError:
                limit = self._task.num_rows(batch)
                if self._num_parts >= limit or self._pipeline is not None:
                    raise
                self._state.optimizers.zero_grad()
                torch.cuda.empty_cache()
                self._num_parts = min(limit, self._num_parts * 2)
                text = f"out of GPU memory: a batch now runs in {self._num_parts} parts"
                self._trainer.say("warning", f"{text}, with the same result")

    def gather(self) -> None:
        """Brings the weights of the stages of a pipeline, if it is one, to rank 0."""
        if self._pipeline is not None:
            self._pipeline.gather(self._state)

    def _passes(self, batch: Any) -> float:
        if self._pipeline is not None:
            return self._pipeline.passes(batch, self._state.progress.step)
        if self._shard_sum is not None:
            return self._shard_sum.passes(self._task, self._state, batch, self._num_parts)
        scaler, losses = self._state.scaler, []
        for loss in self._task.losses(
            batch, even_parts(self._task.num_rows(batch), self._num_parts)
        ):
            (loss if scaler is None else scaler.scale(loss)).backward()
            losses.append(loss.detach())
        return float(torch.stack(losses).sum())
