"""Forecasts of windows in the table's units, with intervals calibrated on validation windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.errors import ConfigError
from fastlstm.nn.forecaster import ForecasterConfig, ForecastNetwork
from fastlstm.series.inputs import Inputs
from fastlstm.series.windows import WindowIndex

LEVELS = np.linspace(0.005, 0.995, 199)
"""At which residuals are kept; between them linear."""
_MAX_WINDOWS = 5_000
_MAX_VALUES = 1 << 24
"""Residuals held at once, 64 MB; torch's quantiles take no more."""
_LEAST_SPREAD = 0.05
"""Of a standard deviation: a window that stands still is no promise that it will go on so."""


@dataclass(frozen=True)
class Calibration:
    """Quantiles of what validation values were above their forecasts, over their window's spread.

    Split conformal intervals with normalised residuals (Lei et al. 2018, section 5.2): a stretch
    that moves more has wider intervals, so that they keep their level when the series calms down.

    Attributes:
        residuals: shape ``(199, h, C)``, float32, at `LEVELS`, in units of `spread`.
    """

    residuals: Tensor

    @staticmethod
    def none(config: ForecasterConfig) -> Calibration:
        """Returns intervals without width, before there is a trained network."""
        return Calibration(torch.zeros(len(LEVELS), config.horizon, config.num_targets))

    def at(self, levels: Sequence[float]) -> Tensor:
        """Returns residual quantiles, shape ``(len(levels), h, C)``.

        Raises:
            ConfigError: a level that validation says nothing about.
        """
        for level in levels:
            if not LEVELS[0] <= level <= LEVELS[-1]:
                raise ConfigError(f"quantile {level} lies outside {LEVELS[0]} to {LEVELS[-1]:g}")
        place = (np.asarray(levels, dtype=np.float64) - LEVELS[0]) / (LEVELS[1] - LEVELS[0])
        below = np.clip(np.floor(place).astype(np.int64), 0, len(LEVELS) - 2)
        share = torch.from_numpy((place - below).astype(np.float32))[:, None, None]
        return torch.lerp(self.residuals[below], self.residuals[below + 1], share)


def spread(values: Tensor, config: ForecasterConfig) -> Tensor:
    """Returns how much the targets of each window move in its input, ``(B, C)``, never 0."""
    past = values[:, : config.input_size, : config.num_targets]
    mean = past.nanmean(1, keepdim=True)
    return torch.sqrt(((past - mean) ** 2).nanmean(1)).nan_to_num(1.0) + _LEAST_SPREAD


@torch.no_grad()
def calibrate(network: ForecastNetwork, inputs: Inputs, valid: WindowIndex) -> Calibration:
    """Collects residuals of at most 5,000 windows, evenly spread."""
    config = network.config
    most = min(_MAX_WINDOWS, max(1, _MAX_VALUES // (config.horizon * config.num_targets)))
    found = []
    for values, statics in inputs.read(valid.rows(most), config.input_size + config.horizon):
        target = values[:, config.input_size :, : config.num_targets]
        error = target - network.output.center(network(values, statics))
        found.append(error / spread(values, config)[:, None])
    residuals = torch.cat(found)
    levels = torch.from_numpy(LEVELS.astype(np.float32))
    by_step = [torch.nanquantile(residuals[:, t], levels, dim=0) for t in range(config.horizon)]
    return Calibration(torch.stack(by_step, 1).nan_to_num(0.0))


@torch.no_grad()
def forecast(
    network: ForecastNetwork, inputs: Inputs, rows: NDArray[np.int64]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields forecasts and what came, both ``(B, h, C)`` in scaled units, of windows at `rows`,
    and their spread, ``(B, 1, C)``."""
    config = network.config
    for values, statics in inputs.read(rows, config.input_size + config.horizon):
        target = values[:, config.input_size :, : config.num_targets]
        center = network.output.center(network(values, statics))
        yield center, target, spread(values, config)[:, None]
