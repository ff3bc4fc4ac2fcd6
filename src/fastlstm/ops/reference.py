"""The obvious loop. It defines what "correct" means; run it in float64 to judge a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fastlstm.ops.call import LSTMOutput, LSTMWeights

if TYPE_CHECKING:
    from torch import Tensor


def lstm_step_reference(
    x: Tensor, h: Tensor, c: Tensor, weights: LSTMWeights
) -> tuple[Tensor, Tensor]:
    """One step: `x` `(B, I)`, `h` and `c` `(B, H)`; returns the new `h` and `c`."""
    gates = x @ weights.w_ih.t() + h @ weights.w_hh.t()
    if weights.b_ih is not None and weights.b_hh is not None:
        gates = gates + weights.b_ih + weights.b_hh
    i, f, g, o = gates.chunk(4, dim=1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def lstm_reference(x: Tensor, h0: Tensor, c0: Tensor, weights: LSTMWeights) -> LSTMOutput:
    """Runs one layer over `x` `(T, B, I)` from `h0`, `c0` `(B, H)`.

    Source: Hochreiter & Schmidhuber 1997 with the forget gate of Gers et al. 2000; gate order and
    the two biases are torch's.
    """
    h, c, steps = h0, c0, []
    for x_t in x.unbind(0):
        h, c = lstm_step_reference(x_t, h, c, weights)
        steps.append(h)
    return LSTMOutput(torch.stack(steps), h, c)
