"""Quantization-aware training: rounded weights in the passes, full precision in the update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastlstm.compression.options import WeightFormat, in_steps
from fastlstm.compression.pruning import position
from fastlstm.runs.weight_formats import GROUP
from fastlstm.training.callbacks import Callback

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer


@torch.no_grad()
def fake_quantized(weight: Tensor, weight_format: WeightFormat) -> Tensor:
    """Returns a float32 weight after a file of this format was written and read.

    Equal to `runs.weight_formats.rounded`, bit for bit, on any device. int8 and int4 round
    matrices only, fp16 every weight.
    """
    if weight_format == "fp16":
        return weight.half().float()
    if weight_format == "fp32" or weight.dim() != 2:
        return weight.clone()
    if weight_format == "int8":
        return _on_grid(weight, _largest(weight) / 127, 127)
    rows, columns = weight.shape
    groups = nn.functional.pad(weight, (0, -columns % GROUP)).view(rows, -1, GROUP)
    scales = _largest(groups) / 7
    fraction, exponent = torch.frexp(scales.clamp(min=2.0**-24))  # fp16's smallest
    power = torch.ldexp(torch.ones_like(scales), exponent - (fraction == 0.5).int())
    is_small = (scales > 0) & (scales < 2.0**-14)  # where fp16 has fewer bits
    scales = torch.where(is_small, power, scales).half().float()
    return _on_grid(groups, scales, 7).view(rows, -1)[:, :columns].contiguous()


def _largest(weight: Tensor) -> Tensor:
    low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    return torch.maximum(high.abs(), low.abs())  # both much faster than aminmax


def _on_grid(weight: Tensor, scales: Tensor, largest: int) -> Tensor:
    """Returns the nearest multiples of the scales, at most `largest` times; NaN for no scale."""
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    codes = weight / torch.where(scales > 0, scales, 1.0)  # a scale of 0 gives 0
    codes.round_().clamp_(-largest, largest)
    return codes.add_(0.0).mul_(scales)  # a code has no -0


@contextmanager
def rounded_weights(model: nn.Module, weight_format: WeightFormat) -> Iterator[None]:
    """Replaces the weights of a model by rounded ones within the block.

    The block finds the gradients of the rounded weights: the straight-through estimator.
    """
    masters = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        for parameter, master in masters:
            parameter.data = fake_quantized(master, weight_format)
        yield
    finally:
        for parameter, master in masters:
            parameter.data = master


class FakeQuantization(Callback):
    """Quantization-aware training for a weight format.

    From `begin` on, a number of steps (int) or a share of the run (float), passes and evaluations
    use rounded weights. The optimizer updates the float32 weights with the gradients of the rounded
    ones (the straight-through estimator of Bengio et al. 2013). The best weights are rounded; no
    evaluation before `begin` is accepted. Zeros stay zeros.

    Activations are not rounded. Decoding in int8 and int4 also rounds the state to 8 bits: without
    training, weights and state together cost 0.0003 bits/char in int8 (benchmarks/log).
    """

    def __init__(self, weight_format: WeightFormat, begin: float = 0.6) -> None:
        self.weight_format, self._begin = weight_format, begin
        self._is_started, self.is_on = False, False

    def on_begin(self, trainer: Trainer) -> None:
        if not self._is_started:
            self._is_started = True
            self._begin = in_steps(self._begin, trainer.plan.stop_criterion.total_steps)
            self.is_on = self._begin <= 0

    def on_update(self, trainer: Trainer) -> None:
        step = trainer.progress.step + 1  # this one is counted after it
        self.is_on = self.is_on or position(trainer, self._begin, step) >= self._begin

    def weights_in_use(self, trainer: Trainer) -> AbstractContextManager[None]:
        return rounded_weights(trainer.model, self.weight_format) if self.is_on else nullcontext()

    def accepts(self, trainer: Trainer) -> bool:
        return self.is_on

    def state_dict(self) -> dict[str, Any]:
        return {"begin": self._begin, "is_on": self.is_on}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._is_started = True
        self._begin, self.is_on = state["begin"], state["is_on"]
