"""What a forecaster gives per value: a point, quantiles or a distribution, and their losses."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlstm.errors import ConfigError

QUANTILES = (0.025, 0.1, 0.25, 0.5, 0.75, 0.9, 0.975)
"""Levels of the quantile output: the median and the ends of 50, 80 and 95 % intervals."""
LOSSES = ("mae", "mse", "huber")


class Output(ABC):
    """How the numbers of the last layer are read.

    Attributes:
        num_parameters: numbers per forecast value.
    """

    num_parameters: int

    @abstractmethod
    def loss(self, parameters: Tensor, target: Tensor) -> Tensor:
        """Returns the loss of every value.

        Args:
            parameters: shape ``(…, num_parameters)``.
            target: shape ``(…)``, without NaN.
        """

    @abstractmethod
    def center(self, parameters: Tensor) -> Tensor:
        """Returns the forecast itself, shape ``(…)``."""

    @abstractmethod
    def quantiles(self, parameters: Tensor, levels: Sequence[float]) -> Tensor:
        """Returns quantiles, shape ``(…, len(levels))``, or ``(…, 1)`` of a point: one for all."""

    def restored(self, parameters: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """Returns the parameters of ``value * scale + shift``; all are locations unless said."""
        return parameters * scale[..., None] + shift[..., None]


class Point(Output):
    """One number: the median (mae), the mean (mse), or between (huber, beta 0.5)."""

    num_parameters = 1

    def __init__(self, loss: str = "mae") -> None:
        if loss not in LOSSES:
            raise ConfigError(f"loss is {loss!r}, expected one of {', '.join(LOSSES)}")
        self._loss = loss

    def loss(self, parameters: Tensor, target: Tensor) -> Tensor:
        forecast = parameters[..., 0]
        if self._loss == "mae":
            return F.l1_loss(forecast, target, reduction="none")
        if self._loss == "mse":
            return F.mse_loss(forecast, target, reduction="none")
        return F.smooth_l1_loss(forecast, target, reduction="none", beta=0.5)

    def center(self, parameters: Tensor) -> Tensor:
        return parameters[..., 0]

    def quantiles(self, parameters: Tensor, levels: Sequence[float]) -> Tensor:
        return parameters


class Quantiles(Output):
    """Seven quantiles, by the pinball loss (Koenker & Bassett 1978); they never cross."""

    num_parameters = len(QUANTILES)

    def __init__(self) -> None:
        self._levels = torch.tensor(QUANTILES)

    def loss(self, parameters: Tensor, target: Tensor) -> Tensor:
        error = target[..., None] - parameters
        levels = self._levels.to(error)
        return 2 * torch.maximum(levels * error, (levels - 1) * error).mean(-1)

    def center(self, parameters: Tensor) -> Tensor:
        return parameters[..., QUANTILES.index(0.5)]

    def quantiles(self, parameters: Tensor, levels: Sequence[float]) -> Tensor:
        """Between the seven levels linear; beyond the outer ones the outer one."""
        ordered = parameters.sort(-1).values
        found = []
        for level in levels:
            above = min(max(bisect_left(QUANTILES, level), 1), len(QUANTILES) - 1)
            low, high = QUANTILES[above - 1], QUANTILES[above]
            share = min(max((level - low) / (high - low), 0.0), 1.0)
            found.append(torch.lerp(ordered[..., above - 1], ordered[..., above], share))
        return torch.stack(found, -1)


class StudentT(Output):
    """Degrees of freedom, location and scale of Student's t, by its likelihood."""

    num_parameters = 3

    def loss(self, parameters: Tensor, target: Tensor) -> Tensor:
        degrees, location, scale = self._read(parameters)
        distribution = torch.distributions.StudentT(degrees, location, scale, validate_args=False)
        likelihood: Tensor = distribution.log_prob(target)
        return -likelihood

    def center(self, parameters: Tensor) -> Tensor:
        return parameters[..., 1]

    def quantiles(self, parameters: Tensor, levels: Sequence[float]) -> Tensor:
        degrees, location, scale = self._read(parameters)
        found = [location + scale * student_quantile(degrees, level) for level in levels]
        return torch.stack(found, -1)

    def restored(self, parameters: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        degrees, location, width = parameters.unbind(-1)
        # softplus(width) * scale, written as the softplus of another number
        wide = F.softplus(width) * scale
        return torch.stack(
            [degrees, location * scale + shift, wide + torch.log(-torch.expm1(-wide))], -1
        )

    def _read(self, parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        degrees, location, scale = parameters.unbind(-1)
        return 2 + F.softplus(degrees), location, F.softplus(scale) + 1e-6


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


def make_output(kind: str, loss: str = "mae") -> Output:
    """Returns the output called `kind`: point, quantiles or student_t.

    Raises:
        ConfigError: there is none of that name.
    """
    if kind == "point":
        return Point(loss)
    if kind == "quantiles":
        return Quantiles()
    if kind == "student_t":
        return StudentT()
    raise ConfigError(f"output is {kind!r}, expected point, quantiles or student_t")
