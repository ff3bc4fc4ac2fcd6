"""Ridge regression on lags: a linear forecast in closed form.

The forecast to beat in every backtest, and the linear path of the network, whose LSTM learns what
is left (Zeng et al. 2023, "Are Transformers Effective for Time Series Forecasting?", NLinear).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.data.splits import Split
from fastlstm.forecast.data.window_index import WindowIndex
from fastlstm.forecast.model.network import ForecastNetwork

MAX_LAGS = 2048
"""The cost of a solution grows with their third power: 0.2 s for 720 on two cores."""
_MAX_ROWS = 1 << 15
_MAX_VALID_ROWS = 1 << 12
_SIZE = 256
_ALPHAS = tuple(10.0**k for k in range(-6, 3))
"""Penalties over the mean of the squared lags."""


@torch.no_grad()
def fit_ridge(
    network: ForecastNetwork, inputs: ScaledWindows, train: WindowIndex, valid: WindowIndex
) -> tuple[Tensor, Tensor]:
    """Returns weights ``(h, L)`` and bias ``(h,)`` of a target's forecast from its last L lags.

    Both are normalised as the network does. The penalty is the one with the least error on
    validation windows. Solved for up to 32,768 windows of single targets, evenly spread over the
    training part.

    Missing values of the input are at its level; windows with missing values to forecast are left
    out.

    Args:
        network: not trained; on the CPU.
        inputs: the table.
        train: training windows.
        valid: validation windows.
    """
    L, h = min(network.config.input_size, MAX_LAGS), network.config.horizon
    squares = torch.zeros(L + 1, L + 1, dtype=torch.float64)
    products = torch.zeros(L + 1, h, dtype=torch.float64)
    for x, y in _rows(network, inputs, train, _MAX_ROWS):
        squares += (x.T @ x).double()
        products += (x.T @ y).double()
    count = squares[0, 0].clamp(min=1)
    mean, target = squares[0] / count, products[0] / count
    squares = squares / count - mean[:, None] * mean
    products = products / count - mean[:, None] * target
    values, vectors = torch.linalg.eigh(squares[1:, 1:])
    values = values.clamp(min=0)
    turned = vectors.T @ products[1:]
    unit = values.mean().clamp(min=1e-12)
    parts = list(_rows(network, inputs, valid, _MAX_VALID_ROWS))
    best, least = _ALPHAS[-1], float("inf")
    for alpha in _ALPHAS:
        weight = (vectors @ (turned / (values + alpha * unit)[:, None])).float()
        bias = target.float() - mean[1:].float() @ weight
        errors = [(x[:, 1:] @ weight + bias - y).abs().sum() for x, y in parts]
        if parts and (error := float(sum(errors))) < least:
            best, least = alpha, error
    weight = vectors @ (turned / (values + best * unit)[:, None])
    return weight.T.float().contiguous(), (target - mean[1:] @ weight).float()


class RidgeForecast:
    """The ridge regression that a network is compared with.

    Args:
        network: its linear path, where it has one, is the regression.
        inputs: the table.
        split: of the table; without a linear path, regression is over its training windows.

    Raises:
        DataError: the training or the validation part is too short for a window.
    """

    def __init__(self, network: ForecastNetwork, inputs: ScaledWindows, split: Split) -> None:
        self._network, sizes = network, network.config
        if sizes.linear:
            self._weight, self._bias = network.linear_weight.cpu(), network.linear_bias.cpu()
        else:
            train, valid = (
                split.windows(inputs.table, part, sizes.input_size, sizes.horizon)
                for part in ("train", "valid")
            )
            self._weight, self._bias = fit_ridge(network, inputs, train, valid)

    def forecast(self, values: Tensor) -> NDArray[np.float32]:
        """Returns the forecasts ``(B, h, C)`` of scaled windows ``(B, L + h, columns)``."""
        config = self._network.config
        targets = values[:, : config.input_size, : config.num_targets]
        lags, shift, scale = self._network.normalised(targets)
        ahead = lags.transpose(1, 2)[..., -self._weight.shape[1] :] @ self._weight.T + self._bias
        answer: NDArray[np.float32] = (ahead * scale[..., None] + shift[..., None]).numpy()
        return answer.transpose(0, 2, 1)


def _rows(
    network: ForecastNetwork, inputs: ScaledWindows, windows: WindowIndex, limit: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields 1 and the last lags, ``(N, 1 + lags)``, and what follows, ``(N, h)``, normalised."""
    config = network.config
    L, C = config.input_size, config.num_targets
    for values, _ in inputs.read(windows.rows(max(1, limit // C)), config, _SIZE):
        lags, shift, scale = network.normalised(values[:, :L, :C])
        lags = lags[:, -MAX_LAGS:]
        ahead = (values[:, L:, :C] - shift[:, None]) / scale[:, None]
        x, y = (part.transpose(1, 2).flatten(0, 1) for part in (lags, ahead))
        is_there = ~y.isnan().any(1)
        yield torch.cat([torch.ones(len(x), 1), x], 1)[is_there], y[is_there]
