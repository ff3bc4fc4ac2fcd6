"""Chooses the hidden units of a forecaster: the most for which a budget has enough steps.

On small tables every size with enough steps ends within 2 % of the best; only a size that is too
large costs more (benchmarks/log). So a few training steps of the default size are timed, then steps
of smaller sizes while the budget has time for too few. On a GPU a small batch takes as long as a
large one, so precisions and larger batches are timed too; the fastest must win by a clear margin.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from fastlstm.errors import counted
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.splits import Split
from fastlstm.forecast.files import StoredForecaster
from fastlstm.forecast.plan import (
    HIDDEN_SIZES,
    choose_architecture,
    training_loader,
    untrained_forecaster,
)
from fastlstm.forecast.table_schema import apply_schema
from fastlstm.forecast.task import ForecastTask
from fastlstm.system import hardware, measurements
from fastlstm.training.device import random_numbers_kept
from fastlstm.training.plan import TrainingPlan
from fastlstm.training.precision import MIN_GAIN, allow_tf32, precisions_of
from fastlstm.training.schedule import StopCriterion
from fastlstm.training.session import RunSession
from fastlstm.training.step_time import fastest_step_s
from fastlstm.training.trainer import Trainer

CPU = torch.device("cpu")
ENOUGH_STEPS = 250
"""From this number of steps on, more gain less than a larger size (benchmarks/log)."""
MIN_BUDGET_S = 10.0
TRAINING_SHARE = 0.65
"""Share of the rest of a budget that training gets; evaluations and closing take the remainder."""
_SIZES = ("hidden_size", "num_layers")
CHOSEN = (*_SIZES, "batch_size", "precision")
"""Options that a budget chooses, and options that prevent a choice when set."""
_BATCHES = (4, 16)
"""Multiples of the default batch to try on a GPU."""
_BATCH_GAIN = 1.3
"""Least speedup, in windows/s, that justifies a larger batch: it takes fewer steps."""
_MIN_STEPS_PER_EPOCH = 8


def can_choose_size(config: ForecastConfig, chosen: Collection[str]) -> bool:
    """Returns whether the run has a budget and its size is open; `chosen` are the options set."""
    budget_s = StopCriterion.of(config, 1).budget_s
    is_default = config.hidden_size == ForecastConfig.hidden_size
    is_open = is_default and not any(name in chosen for name in _SIZES)
    return is_open and budget_s is not None and budget_s >= MIN_BUDGET_S


def choose_size(
    config: ForecastConfig,
    dataset: SeriesDataset,
    split: Split,
    started: float,
    device: torch.device = CPU,
    chosen: Collection[str] = (),
) -> tuple[ForecastConfig, str]:
    """Returns the configuration with the hidden units for its budget, and why; on a GPU also with
    precision and batch size.

    The budget began at `started`, by `time.perf_counter()`; `chosen` are the options set.
    """
    budget_s = StopCriterion.of(config, 1).budget_s
    assert budget_s is not None
    left_s = TRAINING_SHARE * max(budget_s - (time.perf_counter() - started), 1.0)
    tried, is_any_recalled = list[str](), False
    slowdowns = list[float]()
    sizes = sorted((n for n in HIDDEN_SIZES if n <= config.hidden_size), reverse=True)
    sized, steps, seconds = config, 0, math.inf
    for size in sizes:
        if tried and size != sizes[-1] and steps * (sized.hidden_size / size) ** 2 < ENOUGH_STEPS:
            continue  # too slow even if a step takes time in proportion to the weights
        sized = replace(config, hidden_size=size)
        seconds, is_recalled = _step_s(sized, dataset, split, device, slowdowns)
        is_any_recalled |= is_recalled
        steps = int(left_s / (seconds * min(slowdowns, default=1.0)))  # beside other processes
        tried.append(f"{size} units: about {counted(steps, 'step')}")
        if steps >= ENOUGH_STEPS:
            break
    *larger, best = tried
    why = f"the budget chooses {best}"
    if steps < ENOUGH_STEPS:
        why += ", which are few: a longer budget would help"
    if larger:
        why += f" (a larger size has too few; {'; '.join(larger)})"
    if device.type == "cuda":
        sized, rate = _filling(sized, seconds, dataset, split, device, chosen)
        why += f"; {sized.precision} and batch {sized.batch_size} read {rate:,.0f} windows/s"
    return sized, f"{why} (steps measured earlier)" if is_any_recalled else why


def _filling(
    config: ForecastConfig, seconds: float, dataset: SeriesDataset, split: Split,
    device: torch.device, chosen: Collection[str],
) -> tuple[ForecastConfig, float]:  # fmt: skip
    """Returns the configuration with precision and batch size for a GPU, and its windows/s."""

    def rate_of(timed: ForecastConfig) -> float:
        step_s = _step_s(timed, dataset, split, device)[0]
        return timed.batch_size * timed.accumulate / step_s

    full, *faster = precisions_of(device)
    is_open = config.precision == "auto" or "precision" not in chosen
    best = replace(config, precision=full) if is_open else config
    rate = rate_of(best) if is_open else config.batch_size * config.accumulate / seconds
    changes: list[tuple[str, Any, float]] = []
    if is_open:
        changes += [("precision", name, MIN_GAIN) for name in faster]
    if "batch_size" not in chosen and config.tbptt is None:
        sizes = choose_architecture(best, dataset, split)
        windows = split.windows(dataset.table, "train", sizes.input_size, sizes.horizon)
        most = len(windows) // (_MIN_STEPS_PER_EPOCH * config.accumulate)
        batches = (config.batch_size * times for times in _BATCHES)
        changes += [("batch_size", size, _BATCH_GAIN) for size in batches if size <= most]
    for name, value, gain in changes:
        timed = replace(best, **{name: value})
        if (timed_rate := rate_of(timed)) > gain * rate:
            best, rate = timed, timed_rate
    return best, rate


def _step_s(
    config: ForecastConfig, dataset: SeriesDataset, split: Split, device: torch.device,
    slowdowns: list[float] | None = None,
) -> tuple[float, bool]:  # fmt: skip
    """Returns the seconds of a step (infinite if a single window exceeds the memory), and whether
    they were measured earlier on this machine."""
    precision = precisions_of(device)[0] if config.precision == "auto" else config.precision
    untrained = untrained_forecaster(replace(config, precision=precision), config, dataset, split)
    names = ["precision", "optimizer", "batch_size", "accumulate", "tbptt", "ema"]
    names += ["memory_limit_gb"] if device.type == "cuda" else []
    of = {
        **hardware.machine(device.type, torch.get_num_threads()),
        "model": vars(untrained.network.config),
        **{name: getattr(untrained.config, name) for name in names},
    }
    return measurements.timed_seconds(
        "forecast-step", of, device.type,
        lambda: step_seconds(untrained, dataset, split, device, slowdowns),
    )  # fmt: skip


def step_seconds(
    stored: StoredForecaster, dataset: SeriesDataset, split: Split, device: torch.device = CPU,
    slowdowns: list[float] | None = None,
) -> float:  # fmt: skip
    """Returns the seconds of the fastest of a few training steps of a copy of the network.

    The precision is not auto. The state of random numbers is restored. Raises
    torch.cuda.OutOfMemoryError: a single window exceeds the memory.
    """
    config = stored.config
    allow_tf32(config.precision)
    with random_numbers_kept(device):
        network = copy.deepcopy(stored.network).to(device)
        inputs = apply_schema(dataset, stored)
        loader = training_loader(config, network.config, dataset.table, split, None)
        timed = replace(stored, network=network)
        session = RunSession(None, [])
        task = ForecastTask(session, timed, dataset, split, inputs, loader, device)
        plan = TrainingPlan(config, StopCriterion.of(config, loader.steps_per_epoch), device)
        return fastest_step_s(Trainer(task, plan, emit=lambda _: None), slowdowns)
