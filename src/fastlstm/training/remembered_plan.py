"""Remembers the plan of a run with a budget, so that the same command gets the same plan again.

Timings differ between runs, and the first run of a text also encodes it: two runs of one command
would train models of different sizes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fastlstm.system import hardware, measurements
from fastlstm.training.options import TrainingOptions
from fastlstm.training.precision import PrecisionChoice
from fastlstm.training.schedule import StopCriterion

_PLANNED = frozenset(
    {"rnn_size", "num_layers", "embed_size", "batch_size", "seq_length", "optimizer", "hidden_size"}
)
"""Options that a plan may choose."""
_MORE_TIME = 1.25
"""A plan is made anew if more than so many times its seconds are left."""


@dataclass(frozen=True)
class ChosenPlan:
    """What a run with a budget chose by timing its steps.

    Attributes:
        changes: values of the chosen options, by name.
        why: the measurements behind the choices; empty if no option was chosen.
        precision: precision of the steps, if it was chosen too.
        tokens: about how many tokens the budget has time for; texts only.
    """

    changes: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    precision: PrecisionChoice | None = None
    tokens: float = 0.0


def changes(before: TrainingOptions, after: TrainingOptions) -> dict[str, Any]:
    """Returns the options of `after` that differ from `before`, by name."""
    values = ((f.name, getattr(after, f.name)) for f in dataclasses.fields(after))
    return {name: value for name, value in values if value != getattr(before, name)}


def remembered_plan(
    options: TrainingOptions,
    data: Mapping[str, object],
    device: torch.device,
    left_s: float,
    make: Callable[[], ChosenPlan],
) -> ChosenPlan:
    """Returns the remembered plan for these options on this machine, else a new one.

    A plan made on a busy machine is made anew on a quiet one. Any plan is made anew if clearly more
    time is left. Nothing is remembered for runs without a budget, or for runs on a GPU, whose free
    memory changes.

    Args:
        options: options of the run.
        data: sizes that the plan depends on.
        device: where the run trains.
        left_s: seconds of the budget that are left for training.
        make: returns a new plan.
    """
    if StopCriterion.of(options, 1).budget_s is None or device.type != "cpu":
        return make()
    threads = torch.get_num_threads()
    of = {
        **hardware.machine(device.type, threads),
        **data,
        "options": {**dataclasses.asdict(options), "seed": 0},
    }
    known = measurements.recall("plan", of) or {}
    plan, was_busy = _decoded(known, options, left_s), known.get("is_busy", False)
    is_busy = (plan is None or was_busy) and measurements.is_machine_busy(threads)
    if plan is not None and is_busy == was_busy:
        return plan
    plan = make()
    is_busy |= measurements.is_machine_busy(threads)
    value = {**dataclasses.asdict(plan), "is_busy": is_busy, "left_s": left_s}
    measurements.remember("plan", of, value)
    return plan


def _decoded(
    value: Mapping[str, Any], options: TrainingOptions, left_s: float
) -> ChosenPlan | None:
    """Returns a stored plan; None if its file is damaged or there is clearly more time now."""
    try:
        choice, changes, why = value["precision"], value["changes"], value["why"]
        precision = None if choice is None else PrecisionChoice(**choice)
        tokens, enough_s = float(value["tokens"]), _MORE_TIME * float(value["left_s"])
        dataclasses.replace(options, **changes)
        is_valid = 0 <= tokens < math.inf and isinstance(why, str) and changes.keys() <= _PLANNED
        is_valid &= isinstance(value["is_busy"], bool) and left_s <= enough_s
        if precision is not None:
            is_valid &= precision.name in ("fp32", "bf16") and isinstance(precision.why, str)
            is_valid &= 0 <= precision.step_s < math.inf
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        return None
    told = f"{why} (planned earlier)" if why else ""
    return ChosenPlan(changes, told, precision, tokens) if is_valid else None
