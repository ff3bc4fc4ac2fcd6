"""Any mask of Keras as lengths: the steps that count are moved to the front of each sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class MaskedSteps(NamedTuple):
    """Where the steps that count lie, and where they are computed.

    Keras leaves the state as it is where the mask is False, and repeats the output of the step
    before, or gives zeros.

    Attributes:
        mask: `(T, B, 1)` bool, True for a step that counts.
        lengths: `(B,)` int64, how many of them each sequence has.
        order: `(T, B, 1)` int64, the steps that count first; None where they are first already.
    """

    mask: Tensor
    lengths: Tensor
    order: Tensor | None

    @classmethod
    def of(cls, mask: Tensor) -> MaskedSteps:
        """Describes a mask `(T, B)`; what a graph is made of is taken to be no plain padding."""
        lengths = mask.sum(0)
        if not torch.compiler.is_compiling() and not bool((mask[1:] > mask[:-1]).any()):
            return cls(mask[:, :, None], lengths, None)
        order = torch.argsort(~mask, dim=0, stable=True)
        return cls(mask[:, :, None], lengths, order[:, :, None])

    def in_front(self, x: Tensor) -> Tensor:
        """Returns `x` `(T, B, I)` with the steps that count at the front."""
        return x if self.order is None else x.gather(0, self.order.expand_as(x))

    def outputs(self, y: Tensor, last: Tensor, *, zero_others: bool) -> Tensor:
        """Returns Keras' outputs `(T, B, H)`.

        Args:
            y: output of the steps that count, at the front.
            last: `(B, H)` output of the last of them.
            zero_others: zeros where the mask is False, else the output of the step before.
        """
        if self.order is None:
            others = torch.zeros_like(last) if zero_others else self._or_zero(last)
            return torch.where(self.mask, y, others)
        places = self.mask.cumsum(0) - 1  # -1 before the first step that counts
        y = y.gather(0, places.clamp(min=0).expand_as(y))
        return torch.where(self.mask if zero_others else places >= 0, y, torch.zeros_like(last))

    def last_output(self, last: Tensor, *, zero_others: bool) -> Tensor:
        """Returns the last of Keras' outputs, `(B, H)`."""
        if zero_others:
            return torch.where(self.mask[-1], last, torch.zeros_like(last))
        return self._or_zero(last)

    def _or_zero(self, last: Tensor) -> Tensor:
        """A sequence in which no step counts has no output, its state is the initial one."""
        return torch.where(self.lengths[:, None] > 0, last, torch.zeros_like(last))
