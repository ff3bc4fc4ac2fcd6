"""Dropout with a mask of any shape, and of recurrent weights (`WeightDrop`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastlstm.nn.lengths import Lanes, is_inside
from fastlstm.ops.cuda.training import can_mask, masked


class WeightDrop(nn.Module):
    """A `weight_hook` that drops recurrent weights in training, with a new mask per call.

    Args:
        p: probability that a weight is dropped.

    Source:
        DropConnect on hidden-to-hidden matrices: Merity et al. 2017, "Regularizing and Optimizing
        LSTM Language Models", section 3.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, name: str, weight: Tensor) -> Tensor:
        """Returns `weight`, or in training a recurrent weight with dropped entries."""
        if not self.training or not name.startswith("weight_hh"):
            return weight
        return dropped(weight, self.p, tuple(weight.shape))

    def extra_repr(self) -> str:
        return f"p={self.p}"


def dropped(x: Tensor, p: float, mask_shape: tuple[int, ...]) -> Tensor:
    """Inverted dropout with probability `p` and a mask of `mask_shape`, which broadcasts."""
    mask = torch.empty(mask_shape, dtype=x.dtype, device=x.device).bernoulli_(1.0 - p)
    mask.div_(1.0 - p)
    return masked(x, mask) if can_mask(x, mask) else x * mask


def dropped_between_layers(x: Tensor, p: float, lanes: Lanes | None) -> Tensor:
    """Dropout of `x` `(T, B, ·)`; with `lanes`, torch's draws for a PackedSequence."""
    if lanes is None:
        return nn.functional.dropout(x, p)
    is_real = is_inside(x, lanes)
    rows = nn.functional.dropout(x[is_real], p)
    return torch.zeros_like(x).masked_scatter(is_real[:, :, None], rows)
