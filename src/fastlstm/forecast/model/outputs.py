"""Outputs of a forecaster: a point, quantiles or a distribution, and their losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastlstm.forecast.config import Loss, OutputKind
from fastlstm.forecast.model.distribution_quantiles import (
    negative_binomial_quantiles,
    student_quantile,
)

QUANTILES = (0.025, 0.1, 0.25, 0.5, 0.75, 0.9, 0.975)
"""Levels of the quantile output: the median and the ends of 50, 80 and 95 % intervals."""


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
        """Returns the loss of every value.

        Args:
            parameters: shape ``(…, num_parameters)``.
            target: shape ``(…)``, without NaN.
        """

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
