"""Quantiles of Student's t and the negative binomial distribution, which torch lacks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_MAX_COUNT = 1024
"""Limit for summing probabilities count by count; beyond it an error of one is negligible."""
_PART = 512
"""Distributions per summation: 4 MB."""
_HEAD = 128
"""In larger distributions, gamma quantiles are within 0.2 % from this count on."""
_LARGE_SHAPE = 16.0
"""From this shape on, Wilson & Hilferty's gamma quantiles are within 0.1 %."""
_SMALL_SHAPE = 1e-4
_NODES = 193


def student_quantile(degrees: Tensor, level: float) -> Tensor:
    """Returns a quantile of Student's t (Hill 1970, algorithm 396), within 3e-4 of its level."""
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
    """Returns quantiles of negative binomial distributions.

    Quantiles up to about 1,000, and below 128 in larger distributions, are exact (summed
    probabilities). Others use gamma distributions and are within 1 % for means up to 1e6 and
    dispersions from 1e-3 to 1e3.

    Args:
        mean: above 0, any shape.
        dispersion: above 0, same shape; variance = mean + dispersion * mean².
        levels: between 0 and 1.

    Returns:
        Whole numbers, shape ``(…, len(levels))``, dtype of `mean`.

    Cost: up to 20 us per distribution for all levels.
    """
    m, d = mean.double().reshape(-1, 1), dispersion.double().reshape(-1, 1)
    shares = torch.tensor(levels, dtype=torch.float64)
    counts_at = torch.where(d * _LARGE_SHAPE > 1, _long(m, d, levels), _short(m, d, shares))
    counts_at = (counts_at - 1e-9).ceil().clamp(min=0)
    longest = 1.1 * counts_at.amax(-1) + 30
    large = (longest >= _MAX_COUNT).nonzero()[:, 0]
    for part in large.split(_PART) if len(large) else ():
        first = torch.searchsorted(_below(m[part], d[part], _HEAD), shares.repeat(len(part), 1))
        counts_at[part] = torch.where(
            first < _HEAD, first.double(), counts_at[part].clamp(min=_HEAD)
        )
    left = (longest < _MAX_COUNT).nonzero()[:, 0]
    while len(left):  # repeat with more counts until the largest level is reached
        left, missed = left[longest[left].argsort()], []
        for part in left.split(_PART):
            counts = int(longest[part[-1]]) + 1
            below = _below(m[part], d[part], counts)
            first = torch.searchsorted(below, shares.repeat(len(part), 1))
            counts_at[part] = first.double()
            missed.append(part[(first == counts).any(-1)])
        left = torch.cat(missed)
        longest[left] *= 4
    whole: Tensor = counts_at.view(*mean.shape, len(levels))
    return whole.to(mean.dtype)


def _below(mean: Tensor, dispersion: Tensor, counts: int) -> Tensor:
    """Returns the cumulative probability of each of the first counts, shape ``(N, counts)``."""
    product = mean * dispersion
    k = torch.arange(1, counts, dtype=torch.float64)
    # log P(k) - log P(k - 1), expanded by the dispersion, which may be small
    ratio = torch.log((1 + (k - 1) * dispersion) / k * (mean / (1 + product)))
    first = -torch.log1p(product) / dispersion
    logs = torch.cat([first, first + ratio.cumsum(-1)], -1)
    return logs.exp().cumsum(-1)


def _short(mean: Tensor, dispersion: Tensor, shares: Tensor) -> Tensor:
    """Returns quantiles of the gamma distribution with equal mean and variance, of large shape."""
    shape = mean / (1 + dispersion * mean)
    root = 1 - 1 / (9 * shape) + torch.special.ndtri(shares) / (3 * shape.sqrt())
    counts_at: Tensor = mean * root.clamp(min=0) ** 3 - 0.5
    return counts_at


def _long(mean: Tensor, dispersion: Tensor, levels: Sequence[float]) -> Tensor:
    """Returns quantiles of the gamma distribution that approximates a long tail.

    For large k, P(k) is proportional to ``(k + r/2) ** (r - 1) * exp(-rate * k)`` with
    ``r = 1 / dispersion`` and ``rate = log(1 + 1 / (mean * dispersion))``; count k ends at
    ``k + 1/2``.
    """
    table = _gamma_table(tuple(levels))
    shape = 1 / dispersion
    step = math.log(_LARGE_SHAPE / _SMALL_SHAPE) / (_NODES - 1)
    place = (torch.log(shape / _SMALL_SHAPE) / step).clamp(0, _NODES - 1.001)[:, 0]
    node = place.long()
    curve = torch.lerp(table[node], table[node + 1], (place - node)[:, None])
    quantile: Tensor = torch.exp(curve * (1 + shape) / shape)
    return quantile / torch.log1p(1 / (mean * dispersion)) - (shape + 1) / 2


@lru_cache(maxsize=8)
def _gamma_table(levels: tuple[float, ...]) -> Tensor:
    """Returns ``log(quantile) * shape / (1 + shape)`` of gamma distributions, ``(_NODES, levels)``.

    Shapes are spaced evenly in logarithm from 1e-4 to 16, the scale is 1; solved by bisection.
    """
    shape = torch.logspace(
        math.log10(_SMALL_SHAPE), math.log10(_LARGE_SHAPE), _NODES, dtype=torch.float64
    )[:, None]
    share = torch.tensor(levels, dtype=torch.float64).expand(_NODES, -1)
    a = shape.expand_as(share)
    low = (share.log() + torch.lgamma(a + 1)) / a  # x ** a / gamma(a + 1) is never below the share
    high = torch.log(a + 12 * a.sqrt() + 40).expand_as(share).clone()
    for _ in range(50):
        middle = (low + high) / 2
        x = middle.exp()
        tail = torch.special.gammaincc(a, x) - (1 - share)
        is_below = torch.where(share > 0.5, tail > 0, torch.special.gammainc(a, x) < share)
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    return high * a / (1 + a)
