"""Quantiles of distributions for which torch has none."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_MAX_COUNT = 2048
"""Up to which counts are summed one by one; beyond, one more or less does not matter."""
_PART = 512
"""Distributions that are summed at once: 8 MB."""


def student_quantile(degrees: Tensor, level: float) -> Tensor:
    """Returns a quantile of Student's t (Hill 1970, algorithm 396), within 2e-4 of its level."""
    if level == 0.5:
        return torch.zeros_like(degrees)
    n = degrees.double()
    tail = 2 * min(level, 1 - level)
    a = 1 / (n - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * torch.sqrt(a * math.pi / 2) * n
    y = (d * tail) ** (2 / n)
    x = torch.special.ndtri(torch.tensor(tail * 0.5, dtype=torch.float64))
    near = x**2
    c = torch.where(n < 5, c + 0.3 * (n - 4.5) * (x + 0.6), c)
    c = (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b + c
    far = (((((0.4 * near + 6.3) * near + 36) * near + 94.5) / c - near - 3) / b + 1) * x
    wide = torch.expm1(a * far**2)
    small = (
        (1 / (((n + 6) / (n * y) - 0.089 * d - 0.822) * (n + 2) * 3) + 0.5 / (n + 4)) * y - 1
    ) * (n + 1) / (n + 2) + 1 / y
    value = torch.sqrt(n * torch.where(y > 0.05 + a, wide, small))
    return (value if level > 0.5 else -value).to(degrees.dtype)


def negative_binomial_quantiles(
    mean: Tensor, dispersion: Tensor, levels: Sequence[float]
) -> Tensor:
    """Returns the least counts up to which such shares lie.

    Exact where the largest is below some thousand. Beyond, those of the gamma distribution of equal
    mean and variance (Wilson & Hilferty 1931): within 4 % of the deviation, for a dispersion up to
    1; a larger one makes it coarse.

    Args:
        mean: above 0, any shape.
        dispersion: above 0, the same shape; variance = mean + dispersion * mean².
        levels: between 0 and 1.

    Returns:
        Whole numbers, shape ``(…, len(levels))``, of the dtype of `mean`.
    """
    m, d = mean.double().reshape(-1, 1), dispersion.double().reshape(-1, 1)
    shares = torch.tensor(levels, dtype=torch.float64)
    scale = 1 + d * m
    shape = m / scale
    root = 1 - 1 / (9 * shape) + torch.special.ndtri(shares) / (3 * shape.sqrt())
    found = (m * root.clamp(min=0) ** 3 - 0.5).ceil().clamp(min=0)
    # a shape below 1 is below the exponential distribution of equal scale
    longest = torch.maximum(1.3 * found.amax(-1), -scale[:, 0] * (-shares.max()).log1p()) + 30
    order = longest.argsort()
    small = order[longest[order] < _MAX_COUNT]
    for part in small.split(_PART) if len(small) else ():
        counts = torch.arange(int(longest[part[-1]]) + 1, dtype=torch.float64)
        below = torch.distributions.NegativeBinomial(
            1 / d[part], logits=torch.log(m[part] * d[part]), validate_args=False
        )
        shares_below = below.log_prob(counts).exp().cumsum(-1)
        first = torch.searchsorted(shares_below, shares.expand(len(part), -1).contiguous())
        found[part] = first.clamp(max=len(counts) - 1).double()
    whole: Tensor = found.view(*mean.shape, len(levels))
    return whole.to(mean.dtype)
