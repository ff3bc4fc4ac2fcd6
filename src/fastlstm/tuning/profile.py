"""`fastlstm profile`: what holds a training run back, found by changing it."""

from __future__ import annotations

import itertools
import random
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastlstm.errors import BudgetError, FastLSTMError
from fastlstm.system.machine_usage import MachineUsage
from fastlstm.training.callbacks import Callback
from fastlstm.training.phases import PhaseTimes
from fastlstm.tuning.machine import describe_machine
from fastlstm.tuning.turns import in_turns
from fastlstm.tuning.variants import as_it_is, candidates, without_loader
from fastlstm.tuning.verdicts import Verdict, between_steps, of_pairs, ranked

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer

TURN_S = 0.25
_VERIFYING_BLOCKS = 2


@dataclass(frozen=True)
class Profile:
    """What was found about a run.

    Attributes:
        unit: what a batch is counted in.
        units_per_s: speed of its steps.
        ceiling_share: floating-point operations per second over the measured ceiling, or None.
        phases: share of each phase of the time of the run.
        verdicts: on all causes, largest gain first; those that are recommended and keep what is
            learned come before those that change it.
        not_timed: variants that could not be timed, with the reason.
        seconds: that it took.
        others: share of the machine's cores that other processes used, or None.
        machine: CPU and versions.
    """

    unit: str
    units_per_s: float
    ceiling_share: float | None
    phases: dict[str, float]
    verdicts: tuple[Verdict, ...]
    not_timed: tuple[str, ...]
    seconds: float
    others: float | None
    machine: dict[str, object]

    @property
    def recommended(self) -> list[Verdict]:
        """The verdicts with a gain of at least 5 % that surely is one."""
        return [verdict for verdict in self.verdicts if verdict.is_recommended]

    def to_dict(self) -> dict[str, object]:
        """Returns all of it for JSON."""
        return {**asdict(self), "verdicts": [verdict.to_dict() for verdict in self.verdicts]}


class Profiled(BudgetError):
    """Ends a run that was set up to be profiled."""


class Profiler(Callback):
    """Profiles a run of a text model in place of its training, and ends it with `Profiled`.

    Args:
        seconds: for all measurements.

    Attributes:
        result: the profile; None until the run is ended.
        options: of the run, with everything chosen.
    """

    def __init__(self, seconds: float = 15.0) -> None:
        self._seconds = seconds
        self.result: Profile | None = None
        self.options: Any = None

    def on_begin(self, trainer: Trainer) -> None:
        self.options = trainer.plan.options
        try:
            self.result = profile_steps(trainer, self._seconds)
        finally:
            trainer.task.loader.close()
        raise Profiled("profiled")


def profile_steps(trainer: Trainer, seconds: float) -> Profile:
    """Times the steps of a run in turns with variants of it.

    Args:
        trainer: of a text model, before its first step. Its weights change.
        seconds: for all measurements, about.
    """
    started, usage, rng = time.perf_counter(), MachineUsage(), random.Random(0)
    end = started + seconds
    base = as_it_is(trainer)
    base.warm_up(3)
    phases = PhaseTimes(trainer)
    speeds = [base.turn(TURN_S) for _ in range(3)]
    step_phases = phases.take()
    del step_phases["evaluation"], step_phases["checkpoint"]
    unit_s = min(speeds)
    step_s = unit_s * trainer.task.step_units
    between = between_steps(trainer, step_s)
    total_s = step_s + between.evaluation_s + between.checkpoint_s
    step_share, step_total = step_s / total_s, sum(step_phases.values())
    shares = {name: s / step_total * step_share for name, s in step_phases.items()}
    shares |= {
        "evaluation": between.evaluation_s / total_s,
        "checkpoint": between.checkpoint_s / total_s,
    }
    verdicts, not_timed = list(between.verdicts), list[str]()
    with_loader, cached = without_loader(trainer)
    makers = [lambda: cached, *candidates(trainer)]
    for place, make in enumerate(makers):
        turn_end = time.perf_counter() + (end - time.perf_counter()) / (len(makers) - place)
        try:
            variant = make()
        except FastLSTMError as error:
            not_timed.append(str(error))
            continue
        try:
            own_base = with_loader if variant is cached else base
            own_base.step_s = step_s
            times = in_turns(own_base, variant, turn_end, rng, TURN_S)
        finally:
            if variant is not cached:
                variant.close()
        verdicts.append(of_pairs(variant, *times, trainer.task.unit, step_share))
    flops = trainer.task.flop_per_unit / unit_s / 1e9
    ceiling = trainer.plan.ceiling_gflops
    return Profile(
        trainer.task.unit, 1.0 / unit_s, flops / ceiling if ceiling else None, shares,
        tuple(ranked(verdicts)), tuple(not_timed), time.perf_counter() - started,
        usage.read().get("others_share"), describe_machine(),
    )  # fmt: skip


def measured_gain(a: str, b: str, max_time_s: float = 120.0) -> float:
    """Returns how much faster the steps of training command `b` are, by running both briefly.

    Raises:
        CommandError: a command failed.
    """
    from fastlstm.tuning.ab import TrainingSteps
    from fastlstm.tuning.command import parse_command
    from fastlstm.tuning.process import stop_all

    source = TrainingSteps((parse_command("A", a), parse_command("B", b)), max_time_s)
    try:
        with closing(source.blocks(random.Random(0), time.perf_counter() + max_time_s)) as blocks:
            pairs = [
                pair for block in itertools.islice(blocks, _VERIFYING_BLOCKS) for pair in block
            ]
    finally:
        stop_all()
    return float(np.exp(np.mean([np.log(pair.a / pair.b) for pair in pairs]))) - 1.0
