"""Linear layers beside an LSTM: no slow path under autocast."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastlstm.ops.call import compute_dtype, torchs_dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `F.linear`, but bf16 autocast has no effect on a CPU without fast bf16 products
    (`hardware.has_bf16_products`).
    """
    if torchs_dtype(x) is compute_dtype(x):
        return F.linear(x, weight, bias)
    with torch.autocast("cpu", enabled=False):
        return F.linear(x.to(weight.dtype), weight, bias)


class Linear(nn.Linear):
    """`nn.Linear`, computed by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)
