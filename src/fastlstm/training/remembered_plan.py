"""Remembers the plan of a run with a budget, so that the same command gets the same plan again.

Timings differ between runs, and the first run of a text also encodes it: two runs of one command
would train models of different sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fastlstm.system import hardware, measurements
from fastlstm.training.options import TrainingOptions
from fastlstm.training.precision import PrecisionChoice
from fastlstm.training.schedule import StopCriterion

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
    time is left: `left_s` of the budget. Nothing is remembered for runs without a budget, or for
    runs on a GPU, whose free memory changes. The plan also depends on the sizes in `data`.
    """
    if StopCriterion.of(options, 1).budget_s is None or device.type != "cpu":
        return make()
    threads = torch.get_num_threads()
    of = {
        **hardware.machine(device.type, threads),
        **data,
        "options": {**dataclasses.asdict(options), "seed": 0},
    }
    known = measurements.recall("plan", of)
    plan = None
    if known is not None and left_s <= _MORE_TIME * known["left_s"]:
        choice, why = known["precision"], known["why"]
        plan = ChosenPlan(
            known["changes"], f"{why} (planned earlier)" if why else "",
            None if choice is None else PrecisionChoice(**choice), known["tokens"],
        )  # fmt: skip
    was_busy = known is not None and known["is_busy"]
    is_busy = (plan is None or was_busy) and measurements.is_machine_busy(threads)
    if plan is not None and is_busy == was_busy:
        return plan
    plan = make()
    is_busy |= measurements.is_machine_busy(threads)
    value = {**dataclasses.asdict(plan), "is_busy": is_busy, "left_s": left_s}
    measurements.remember("plan", of, value)
    return plan
