"""Exponential moving average of the weights (EMA), used for evaluation and for the saved model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class WeightAverage:
    """Keeps `average = decay * average + (1 - decay) * weight`, bias-corrected at the start.

    The effective decay is `min(decay, (1 + n) / (10 + n))` after n updates, so that early averages
    do not remember the initialisation.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self._weights = dict(model.named_parameters())
        self._average = {name: p.detach().clone() for name, p in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        averages, weight = list(self._average.values()), self.weight_of(self.updates)
        torch._foreach_lerp_(averages, [p.detach() for p in self._weights.values()], weight)

    def weight_of(self, update: int) -> float:
        """Returns the weight of the new values in an update, counted from 1."""
        return 1 - min(self.decay, (1 + update) / (10 + update))

    @torch.no_grad()
    def update_recorded(self, weight: torch.Tensor) -> None:
        """As `update`, with the weight of the new values as a scalar on the GPU."""
        averages = list(self._average.values())
        moves = torch._foreach_sub([p.detach() for p in self._weights.values()], averages)
        torch._foreach_mul_(moves, weight)
        torch._foreach_add_(averages, moves)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Puts the averaged weights into the model for the length of the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        # In place: cuDNN wants the weights of a layer to stay in one buffer, a CUDA graph both.
        for name, parameter in self._weights.items():
            kept = parameter.detach().clone()
            parameter.copy_(self._average[name])
            self._average[name].copy_(kept)

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self._average)

    def load(self, tensors: dict[str, torch.Tensor], updates: int) -> None:
        self.updates = updates
        for name, value in tensors.items():
            self._average[name].copy_(value)
