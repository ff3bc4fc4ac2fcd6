"""Chooses the hidden units of a forecaster: as many as a budget has enough steps for.

On small tables every size ends within 2 % of the best that takes enough steps; too large a size is
the only mistake that costs more (docs/log.md). So a few training steps of the default size are
timed, and smaller ones while the budget has too few steps.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fastlstm.errors import counted
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.plan import HIDDEN_SIZES
from fastlstm.forecast.step_time import step_seconds
from fastlstm.forecast.untrained import untrained_forecaster
from fastlstm.system import hardware, measurements
from fastlstm.training.schedule import StopCriterion

if TYPE_CHECKING:
    from fastlstm.forecast.data.dataset import SeriesDataset
    from fastlstm.forecast.data.splits import Split

ENOUGH_STEPS = 250
"""From here on more steps gain less than a larger size (docs/log.md)."""
MIN_BUDGET_S = 10.0
TRAINING_SHARE = 0.65
"""Of what is left of a budget, without evaluations, calibration, the test part and the report."""
_QUIET_SHARE = 0.7
_SIZES = ("hidden_size", "num_layers")


def can_choose_size(config: ForecastConfig, chosen: Collection[str], device: torch.device) -> bool:
    """Returns whether the size is free and the end a budget.

    Args:
        config: the options.
        chosen: names of those that were given.
        device: where the run will be.
    """
    budget_s = StopCriterion.of(config, 1).budget_s
    is_default = config.hidden_size == ForecastConfig.hidden_size
    is_open = is_default and not any(name in chosen for name in _SIZES)
    return is_open and device.type == "cpu" and budget_s is not None and budget_s >= MIN_BUDGET_S


def choose_size(
    config: ForecastConfig, dataset: SeriesDataset, split: Split, started: float
) -> tuple[ForecastConfig, str]:
    """Returns the configuration with the hidden units that suit its budget, and why.

    Args:
        config: the options.
        dataset: the table.
        split: its parts.
        started: `time.perf_counter()` when the budget began.
    """
    budget_s = StopCriterion.of(config, 1).budget_s
    assert budget_s is not None
    left_s = TRAINING_SHARE * max(budget_s - (time.perf_counter() - started), 1.0)
    tried, is_any_recalled = list[str](), False
    sizes = sorted((n for n in HIDDEN_SIZES if n <= config.hidden_size), reverse=True)
    sized, steps = config, 0
    for size in sizes:
        if tried and size != sizes[-1] and steps * (sized.hidden_size / size) ** 2 < ENOUGH_STEPS:
            continue  # even if a step took a time in proportion to the weights
        sized = replace(config, hidden_size=size)
        seconds, is_recalled = _step_s(sized, dataset, split)
        is_any_recalled |= is_recalled
        steps = int(left_s / seconds)
        tried.append(f"{size} units: about {counted(steps, 'step')}")
        if steps >= ENOUGH_STEPS:
            break
    *larger, chosen = tried
    why = f"the budget chooses {chosen}"
    if steps < ENOUGH_STEPS:
        why += ", which are few: a longer budget would help"
    if larger:
        why += f" (a larger size has too few; {'; '.join(larger)})"
    return sized, f"{why} (steps measured earlier)" if is_any_recalled else why


def _step_s(config: ForecastConfig, dataset: SeriesDataset, split: Split) -> tuple[float, bool]:
    """Returns the seconds of a step, and whether they were measured earlier on this machine."""
    precision = "fp32" if config.precision == "auto" else config.precision
    untrained = untrained_forecaster(replace(config, precision=precision), config, dataset, split)
    threads = torch.get_num_threads()
    names = ("precision", "optimizer", "batch_size", "accumulate", "tbptt", "ema")
    of = {
        **hardware.machine("cpu", threads),
        "model": vars(untrained.network.config),
        **{name: getattr(untrained.config, name) for name in names},
    }
    known = (measurements.recall("forecast-step", of) or {}).get("seconds")
    if isinstance(known, float) and 0 < known < float("inf"):
        return known, True
    with measurements.CpuTimer(threads) as timer:
        seconds = step_seconds(untrained, dataset, split)
    if not timer.was_busy(_QUIET_SHARE):
        measurements.remember("forecast-step", of, {"seconds": seconds})
    return seconds, False
