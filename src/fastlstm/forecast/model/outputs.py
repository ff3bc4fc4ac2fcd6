"""Outputs of a forecaster: a point, quantiles or a distribution; their losses and quantiles."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastlstm.forecast.config import Loss, OutputKind

QUANTILES = (0.025, 0.1, 0.25, 0.5, 0.75, 0.9, 0.975)
"""Levels of the quantile output: the median and the ends of 50, 80 and 95 % intervals."""
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


class Output(ABC):
    """The meaning of the last layer's outputs.

    Attributes:
        num_parameters: outputs per forecast value.
        center_at: index of the point forecast among these outputs.
        locations: parameters that shift with the values: all, or the location of a distribution.
        is_calibrated: quantiles are calibrated on validation windows.
        counts: targets are counts, neither scaled nor shifted.
        is_median: the point forecast is a median.
    """

    num_parameters: int
    center_at = 0
    locations = slice(None)
    is_calibrated = True
    counts = False
    is_median = True

    @abstractmethod
    def loss(self, parameters: Tensor, target: Tensor) -> Tensor:
        """Returns the losses ``(…)`` of parameters ``(…, num_parameters)`` for a target ``(…)``
        without NaN."""

    def center(self, parameters: Tensor) -> Tensor:
        """Returns the point forecast, shape ``(…)``."""
        return parameters[..., self.center_at]

    @abstractmethod
    def quantiles(self, parameters: Tensor, levels: Sequence[float]) -> Tensor:
        """Returns quantiles, shape ``(…, len(levels))``, or ``(…, 1)`` for a point output."""

    def restored(self, parameters: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """Returns parameters of ``value * scale + shift``; by default all count as locations."""
        return parameters * scale[..., None] + shift[..., None]

    def moved(self, parameters: Tensor, offset: Tensor) -> Tensor:
        """Returns the parameters of ``value + offset``; by default all count as locations."""
        return parameters + offset[..., None]


class Point(Output):
    """One number: the median (mae), the mean (mse), or in between (huber, beta 0.5)."""

    num_parameters = 1

    def __init__(self, loss: Loss = "mae") -> None:
        self._loss, self.is_median = loss, loss == "mae"

    def loss(self, parameters: Tensor, target: Tensor) -> Tensor:
        forecast = parameters[..., 0]
        if self._loss == "mae":
            return F.l1_loss(forecast, target, reduction="none")
        if self._loss == "mse":
            return F.mse_loss(forecast, target, reduction="none")
        return F.smooth_l1_loss(forecast, target, reduction="none", beta=0.5)

    def quantiles(self, parameters: Tensor, levels: Sequence[float]) -> Tensor:
        return parameters


class Quantiles(Output):
    """Seven quantiles, trained by the pinball loss (Koenker & Bassett 1978), sorted when read."""

    num_parameters = len(QUANTILES)
    center_at = QUANTILES.index(0.5)

    def loss(self, parameters: Tensor, target: Tensor) -> Tensor:
        error = target[..., None] - parameters
        levels = error.new_tensor(QUANTILES)
        return 2 * torch.maximum(levels * error, (levels - 1) * error).mean(-1)

    def quantiles(self, parameters: Tensor, levels: Sequence[float]) -> Tensor:
        """Interpolates between the seven levels; returns the outermost quantile beyond them."""
        ordered = parameters.sort(-1).values
        above = [min(max(bisect_left(QUANTILES, p), 1), len(QUANTILES) - 1) for p in levels]
        below = [place - 1 for place in above]
        grid, wanted = np.asarray(QUANTILES), np.asarray(levels)
        share = ((wanted - grid[below]) / (grid[above] - grid[below])).clip(0.0, 1.0)
        return torch.lerp(
            ordered[..., below], ordered[..., above], torch.from_numpy(share).to(ordered)
        )


class StudentT(Output):
    """Degrees of freedom, location and scale of Student's t, trained by its likelihood."""

    num_parameters = 3
    center_at = 1
    locations = slice(1, 2)

    def loss(self, parameters: Tensor, target: Tensor) -> Tensor:
        degrees, location, scale = self.read(parameters)
        distribution = torch.distributions.StudentT(degrees, location, scale, validate_args=False)
        likelihood: Tensor = distribution.log_prob(target)
        return -likelihood

    def quantiles(self, parameters: Tensor, levels: Sequence[float]) -> Tensor:
        degrees, location, scale = self.read(parameters)
        quantiles = [location + scale * student_quantile(degrees, level) for level in levels]
        return torch.stack(quantiles, -1)

    def samples(self, parameters: Tensor, count: int) -> Tensor:
        """Returns random values of every distribution, shape ``(…, count)``."""
        degrees, location, scale = self.read(_repeated(parameters, count))
        values: Tensor = torch.distributions.StudentT(
            degrees, location, scale, validate_args=False
        ).rsample()
        return values

    def moved(self, parameters: Tensor, offset: Tensor) -> Tensor:
        degrees, location, width = parameters.unbind(-1)
        return torch.stack([degrees, location + offset, width], -1)

    def restored(self, parameters: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        degrees, location, width = parameters.unbind(-1)
        # softplus(width) * scale, expressed as a softplus
        wide = F.softplus(width) * scale
        return torch.stack(
            [degrees, location * scale + shift, wide + torch.log(-torch.expm1(-wide))], -1
        )

    def read(self, parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns degrees of freedom, location and scale, each of shape ``(…)``."""
        degrees, location, scale = parameters.unbind(-1)
        return 2 + F.softplus(degrees), location, F.softplus(scale) + 1e-6


class NegativeBinomial(Output):
    """Mean and dispersion of counts, trained by likelihood; variance = mean + dispersion * mean².

    As in DeepAR (Salinas et al. 2020, section 3), the input is divided by the window's scale and
    ``mean = scale * softplus(a)``, so the loss is on the counts. As in GluonTS, the dispersion is
    ``softplus(b)`` at any scale, so that similar series share it.
    """

    num_parameters = 2
    is_calibrated = False
    counts = True

    def loss(self, parameters: Tensor, target: Tensor) -> Tensor:
        mean, dispersion = parameters.double().unbind(-1)  # float32 loses lgamma(y + r) - lgamma(r)
        distribution = torch.distributions.NegativeBinomial(
            1 / dispersion, logits=torch.log(mean * dispersion), validate_args=False
        )
        likelihood: Tensor = distribution.log_prob(target.double())
        return -likelihood.to(parameters.dtype)

    def quantiles(self, parameters: Tensor, levels: Sequence[float]) -> Tensor:
        return negative_binomial_quantiles(parameters[..., 0], parameters[..., 1], levels)

    def samples(self, parameters: Tensor, count: int) -> Tensor:
        """Returns random counts of every distribution, shape ``(…, count)``."""
        mean, dispersion = _repeated(parameters, count).unbind(-1)
        rate = torch._standard_gamma(1 / dispersion) * (mean * dispersion)
        return torch.poisson(rate)

    def restored(self, parameters: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        mean, dispersion = F.softplus(parameters).unbind(-1)
        return torch.stack([mean * scale + 1e-6, dispersion + 1e-4], -1)


def _repeated(parameters: Tensor, count: int) -> Tensor:
    """Returns parameters ``(…, p)`` as ``(…, count, p)``."""
    return parameters[..., None, :].expand(*parameters.shape[:-1], count, -1)


def make_output(kind: OutputKind, loss: Loss = "mae") -> Output:
    """Returns the output of a kind; `loss` is for point forecasts."""
    kinds: dict[str, Callable[[], Output]] = {
        "point": partial(Point, loss), "quantiles": Quantiles,
        "student_t": StudentT, "negative_binomial": NegativeBinomial,
    }  # fmt: skip
    return kinds[kind]()


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
