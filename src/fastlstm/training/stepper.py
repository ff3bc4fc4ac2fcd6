"""One optimizer step: passes over the parts of a batch, clipping, update, average."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fastlstm.training.options import TrainingOptions
from fastlstm.training.state import TrainingState
from fastlstm.training.task import Task


class Stepper:
    """Takes optimizer steps on a training state.

    A batch runs in `accumulate` parts whose losses add up to the mean loss of the whole, so the
    gradient is that of the big batch. A GPU that runs out of memory gets the same batch again in
    twice as many parts.

    Args:
        task: gives the losses.
        options: for accumulation and clipping.
        state: what is changed.
        on_gradients: called when the gradients are complete, before they are clipped.
        on_update: called after the optimizer, before the average.
        say: receives a warning.
    """

    def __init__(
        self,
        task: Task,
        options: TrainingOptions,
        state: TrainingState,
        on_gradients: Callable[[], None],
        on_update: Callable[[], None],
        say: Callable[[str, str], None],
    ) -> None:
        self._task, self._options, self._state = task, options, state
        self._on_gradients, self._on_update, self._say = on_gradients, on_update, say
        self._num_parts = options.accumulate
        self._parameters = [p for p in task.model.parameters() if p.requires_grad]

    def step(self, batch: Any, factor: float) -> tuple[float, float]:
        """Takes one step unless something is not finite; then the gradients stay for inspection.

        Args:
            batch: of the task's loader.
            factor: share of the peak learning rate.

        Returns:
            Mean loss and the gradient norm before clipping.
        """
        loss = self._forward_backward(batch)
        scaler, optimizers = self._state.scaler, self._state.optimizers
        if scaler is not None:
            for optimizer in optimizers.members:
                scaler.unscale_(optimizer)
        self._on_gradients()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        is_finite = math.isfinite(loss) and math.isfinite(float(norm))
        if is_finite:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._options.grad_clip, norm)
            optimizers.step(factor, scaler)
            optimizers.zero_grad()
            self._on_update()
            if self._state.average is not None:
                self._state.average.update()
        if scaler is not None:
            scaler.update()
        return loss, float(norm)

    def _forward_backward(self, batch: Any) -> float:
        while True:
            try:
                return self._passes(batch)
            except torch.cuda.OutOfMemoryError:
                limit = self._task.max_parts(batch)
                if self._num_parts >= limit:
                    raise
                self._state.optimizers.zero_grad()
                torch.cuda.empty_cache()
                self._num_parts = min(limit, self._num_parts * 2)
                text = f"out of GPU memory: a batch now runs in {self._num_parts} parts"
                self._say("warning", f"{text}, with the same result")

    def _passes(self, batch: Any) -> float:
        scaler, losses = self._state.scaler, []
        num_parts = min(self._num_parts, self._task.max_parts(batch))
        for loss in self._task.losses(batch, num_parts):
            (loss if scaler is None else scaler.scale(loss)).backward()
            losses.append(loss.detach())
        return float(torch.stack(losses).sum())
