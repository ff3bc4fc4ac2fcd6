"""One optimizer step of a language model: passes, accumulation, clipping, update."""

from __future__ import annotations

import math

import torch

from fastlstm.runs.events import Observer
from fastlstm.text.config import TrainConfig
from fastlstm.text.data.lanes import Batch
from fastlstm.text.model import LanguageModel, reset_state
from fastlstm.training.precision import autocast
from fastlstm.training.state import TrainingState


class Stepper:
    """Takes optimizer steps on a training state.

    A batch of `batch_size * accumulate` lanes runs in `accumulate` parts; each part's loss is
    divided by the token count of the whole, so the gradient is that of the big batch. A GPU that
    runs out of memory gets the same batch again in twice as many parts.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: LanguageModel,
        device: torch.device,
        state: TrainingState,
        emit: Observer,
    ) -> None:
        self._config, self._model, self._device = config, model, device
        self._state, self._emit = state, emit
        self._num_parts = config.accumulate
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    def step(self, batch: Batch, factor: float) -> tuple[float, float]:
        """Takes one step unless something is not finite; then the gradients stay for inspection.

        Args:
            batch: `(T, B)` tokens and targets.
            factor: share of the peak learning rate.

        Returns:
            Mean loss in nats per token and the gradient norm before clipping.
        """
        loss = self._forward_backward(batch)
        scaler, optimizers = self._state.scaler, self._state.optimizers
        if scaler is not None:
            for optimizer in optimizers.members:
                scaler.unscale_(optimizer)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        is_finite = math.isfinite(loss) and math.isfinite(float(norm))
        if is_finite:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._config.grad_clip, norm)
            optimizers.step(factor, scaler)
            optimizers.zero_grad()
            if self._state.average is not None:
                self._state.average.update()
        if scaler is not None:
            scaler.update()
        return loss, float(norm)

    def _forward_backward(self, batch: Batch) -> float:
        while True:
            try:
                return self._accumulated_pass(batch)
            except torch.cuda.OutOfMemoryError:
                lanes = batch.x.shape[1]
                if self._num_parts >= lanes:
                    raise
                self._state.optimizers.zero_grad()
                torch.cuda.empty_cache()
                self._num_parts = min(lanes, self._num_parts * 2)
                text = (
                    f"out of GPU memory: a batch now runs in {self._num_parts} parts, same result"
                )
                self._emit({"event": "message", "level": "warning", "text": text})

    def _accumulated_pass(self, batch: Batch) -> float:
        x = batch.x.to(self._device, non_blocking=True)
        y = batch.y.to(self._device, non_blocking=True)
        hidden, cell = self._state.carried
        hidden, cell = reset_state((hidden, cell), batch.reset)
        losses, states = [], []
        for lanes in torch.arange(x.shape[1]).tensor_split(self._num_parts):
            part = slice(int(lanes[0]), int(lanes[-1]) + 1)
            state = (hidden[:, part].contiguous(), cell[:, part].contiguous())
            with autocast(self._config.precision, self._device):
                loss, new_state = self._model.loss(x[:, part], y[:, part], state)
            mean = loss / y.numel()
            (mean if self._state.scaler is None else self._state.scaler.scale(mean)).backward()
            losses.append(mean.detach())
            states.append(new_state)
        self._state.carried = (
            torch.cat([h.detach().float() for h, _ in states], dim=1),
            torch.cat([c.detach().float() for _, c in states], dim=1),
        )
        return float(torch.stack(losses).sum())
