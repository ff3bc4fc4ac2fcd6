"""Remembers what a run with a budget chose, so that the same command chooses the same again.

Timings differ from run to run on a busy machine, and the first run of a text spends a part of its
budget on encoding it. Two runs of one command would train models of different sizes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import torch

from fastlstm.system import hardware, measurements
from fastlstm.system.fields import Precision
from fastlstm.training.options import TrainingOptions
from fastlstm.training.precision import PrecisionChoice
from fastlstm.training.schedule import StopCriterion


@dataclass(frozen=True)
class ChosenPlan:
    """What a run with a budget chose by timing its steps.

    Attributes:
        changes: values of the options that were chosen, by name.
        why: one sentence with the measurements behind them; empty if none was chosen.
        precision: of the steps, where it was chosen along.
        tokens: that the budget has time for, about; only of texts.
    """

    changes: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    precision: PrecisionChoice | None = None
    tokens: float = 0.0


def changes(before: TrainingOptions, after: TrainingOptions) -> dict[str, Any]:
    """Returns the options of `after` that differ from those of `before`, by name."""
    values = ((f.name, getattr(after, f.name)) for f in dataclasses.fields(after))
    return {name: value for name, value in values if value != getattr(before, name)}


def remembered_plan(
    options: TrainingOptions,
    data: Mapping[str, object],
    device: torch.device,
    make: Callable[[], ChosenPlan],
) -> ChosenPlan:
    """Returns the plan of an earlier run with the same options on this machine, else a new one.

    A plan that was made on a busy machine is made anew once the machine is quiet.

    Args:
        options: of the run; a run without a budget plans nothing that is worth keeping.
        data: the sizes that the plan depends on.
        device: of the run.
        make: times steps and chooses.
    """
    if StopCriterion.of(options, 1).budget_s is None:
        return make()
    threads = torch.get_num_threads()
    of = {
        **hardware.machine(device.type, threads),
        **data,
        "options": {**dataclasses.asdict(options), "seed": 0},
    }
    known = measurements.recall("plan", of)
    plan = None if known is None else _decoded(known, options)

    def is_busy() -> bool:  # while a GPU computes, the cores are idle
        return device.type == "cpu" and measurements.is_machine_busy(threads)

    if known is not None and plan is not None and (not known.get("is_busy") or is_busy()):
        return plan
    plan = make()
    measurements.remember("plan", of, {**dataclasses.asdict(plan), "is_busy": is_busy()})
    return plan


def _decoded(value: Mapping[str, Any], options: TrainingOptions) -> ChosenPlan | None:
    """Returns a plan that was stored for these options, or None if its file is damaged."""
    try:
        precision = value["precision"] and PrecisionChoice(**value["precision"])
        tokens, why = float(value["tokens"]), value["why"]
        dataclasses.replace(options, **value["changes"])
        is_valid = 0 <= tokens < math.inf and isinstance(why, str)
        if precision is not None:
            is_valid &= precision.name in get_args(Precision) and 0 <= precision.step_s < math.inf
    except (KeyError, TypeError, ValueError):
        return None
    told = f"{why} (planned earlier)" if why else ""
    return ChosenPlan(value["changes"], told, precision, tokens) if is_valid else None
