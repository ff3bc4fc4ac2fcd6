"""Fits the effects of future covariates: a small network, before and apart from the LSTM.

The difference of a target between two steps of a window is explained by the difference of the
effects, so that the level, which drifts, does not matter: "within" estimation, as of fixed effects
(Wooldridge 2010, "Econometric Analysis of Cross Section and Panel Data", section 10.5).
"""

from __future__ import annotations

import copy
import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from fastlstm.errors import DataError
from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.data.splits import Split
from fastlstm.forecast.model.network import CovariateEffects, ForecastNetwork
from fastlstm.training.device import random_numbers_kept
from fastlstm.training.optimizer import OptimizerSet
from fastlstm.training.options import TrainingOptions
from fastlstm.training.schedule import learning_rate_factor
from fastlstm.training.state import WeightAverage

_MAX_ROWS, _MAX_VALUES = 1 << 18, 1 << 25
"""Most rows, and most numbers in them, that are held in memory."""
_HORIZONS = 8
"""Horizons between the steps of a pair, at most."""
_NUM_STEPS, _EVERY = 1000, 50
_PAIRS, _VALID_PAIRS = 512, 4096
_OPTIONS = TrainingOptions(
    learning_rate=1e-2, weight_decay=0.1, ema=0.99, warmup=0.05, cooldown=0.95
)
_CONSTANT = 1e-6
"""Largest range of a constant covariate, whose weights are set to zero."""


class _Rows(NamedTuple):
    """Windows: future covariates ``(N, steps, F)`` and targets ``(N, steps, C)``."""

    known: Tensor
    targets: Tensor

    def pairs(self, number: int) -> tuple[Tensor, Tensor]:
        """Returns future covariates ``(2, number, F)`` and targets ``(2, number, C)`` of pairs of
        steps of random windows."""
        num, steps = self.targets.shape[:2]
        windows = torch.randint(num, (number,))
        first = torch.randint(steps, (number,))
        second = (first + torch.randint(1, steps, (number,))) % steps
        places = torch.stack([windows * steps + first, windows * steps + second])
        return self.known.flatten(0, 1)[places], self.targets.flatten(0, 1)[places]


def fit_effects(
    network: ForecastNetwork, inputs: ScaledWindows, split: Split, seed: int
) -> dict[str, Tensor] | None:
    """Returns the state of `CovariateEffects` for the targets as `network`, on the CPU, reads them.

    Trains on pairs of steps at most eight horizons apart, with the mean absolute error, for 1,000
    steps of AdamW. Returns the averaged weights with the least error on validation pairs; None if
    no effects are best. The state of random numbers is restored.

    Raises:
        DataError: the training or the validation part is too short.
    """
    sizes = network.config
    train, valid = (_rows(network, inputs, split, part) for part in ("train", "valid"))
    with random_numbers_kept(torch.device("cpu")):
        torch.default_generator.manual_seed(seed)
        effects = CovariateEffects(sizes.num_future, network.future.categories, sizes.num_targets)
        numbers = network.future.numbers(train.known).flatten(0, 1)
        with torch.no_grad():
            effects.first.weight[:, : numbers.shape[1]] *= (
                numbers.amax(0) - numbers.amin(0) > _CONSTANT
            )
            effects.last.weight.zero_()
        return _trained(effects, train, valid.pairs(_VALID_PAIRS))


def _trained(
    effects: CovariateEffects, train: _Rows, valid: tuple[Tensor, Tensor]
) -> dict[str, Tensor] | None:
    """Returns the best state; None if no state has a smaller error than no effects."""
    optimizer, average = OptimizerSet(effects, _OPTIONS), WeightAverage(effects, _OPTIONS.ema)
    best, state = _loss(effects.eval(), *valid).item(), dict[str, Tensor]()
    for step in range(_NUM_STEPS):
        loss = _loss(effects.train(), *train.pairs(_PAIRS))
        optimizer.zero_grad()
        loss.backward()
        factor = learning_rate_factor(step / _NUM_STEPS, _OPTIONS.warmup, _OPTIONS.cooldown)
        optimizer.step(factor)
        average.update()
        if (step + 1) % _EVERY == 0:
            with average.applied(), torch.no_grad():
                error = _loss(effects.eval(), *valid).item()
                if error < best:
                    best, state = error, copy.deepcopy(effects.state_dict())
    return state or None


def _loss(effects: torch.nn.Module, known: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean absolute error of the differences between the steps of pairs."""
    left = targets - effects(known)
    errors = left[1] - left[0]
    is_there = ~errors.isnan()
    mean: Tensor = torch.where(is_there, errors, 0.0).abs().sum() / is_there.sum().clamp(min=1)
    return mean


def _rows(network: ForecastNetwork, inputs: ScaledWindows, split: Split, part: str) -> _Rows:
    """Returns evenly spread windows, as long as the part has them."""
    sizes, table = network.config, inputs.table
    steps = max(sizes.horizon, min(_HORIZONS * sizes.horizon, sizes.input_size))
    try:
        index = split.windows(table, part, 1, steps)
    except DataError:
        steps = sizes.horizon
        index = split.windows(table, part, 1, steps)
    limit = min(_MAX_ROWS, _MAX_VALUES // len(table.columns)) // index.length
    # Without `has_missing` a gap stays one.
    sizes = dataclasses.replace(sizes, input_size=1, patch=1, horizon=steps, has_missing=False)
    C, known, targets = sizes.num_targets, list[Tensor](), list[Tensor]()
    for values, _ in inputs.read(index.rows(max(1, limit)), sizes):
        known.append(values[..., C + sizes.num_past :])
        targets.append(network.entered(values[..., :C]))
    return _Rows(torch.cat(known), torch.cat(targets))
