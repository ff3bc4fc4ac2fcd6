"""`fastlstm profile`: finds the bottlenecks of a training run by changing it."""

from __future__ import annotations

import random
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastlstm.forecast.plan import LEARNING_RATES
from fastlstm.system import environment, hardware
from fastlstm.system.machine_usage import MachineUsage
from fastlstm.text.task import TextTask
from fastlstm.training.events import PhaseTimes
from fastlstm.training.optimizer import DEFAULT_LEARNING_RATE
from fastlstm.tuning.op_times import OpTime, op_times
from fastlstm.tuning.planned_run import describe_machine, plan_run
from fastlstm.tuning.quality_gain import lower_rate, quality_gain
from fastlstm.tuning.turns import TURN_S, Candidate, Timed, time_in_turns, time_until
from fastlstm.tuning.variants import CHANGES_LEARNING, Variant, as_it_is, candidates, without_loader
from fastlstm.tuning.verdicts import Verdict, between_steps, is_known, of_pairs, ranked

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from fastlstm.training.trainer import Trainer

_FIRST_TURNS = 3
_RANKING_SHARE, _LATE_SHARE = 0.5, 1.2
"""Shares of the time: all variants are timed until the first (the rest is for one variant alone),
those with too few pairs for an interval until the second."""
_LONG_TURN_S, _ALONE_S = 0.25, 4.0
"""Of the variant that is timed alone: seconds of a turn, and least seconds of all turns."""
_RATE_SHARE = 0.3
"""Share of the time for a learning rate that looks too high."""
_MIN_WAIT = 0.02
"""Share of steps outside passes and optimizer, above which the loader is timed."""


@dataclass(frozen=True)
class Profile:
    """The profile of a run.

    Attributes:
        unit: unit of a batch, such as "tokens".
        units_per_s: speed of the steps.
        ceiling_share: floating-point operations per second over the measured ceiling, or None.
        phases: share of each phase in the time of the run.
        verdicts: one on each cause, recommended ones first, by worth.
        not_timed: variants that could not be timed, with the reason.
        others: share of the cores that other processes used, or None.
        ops: operations of a step, longest first; may be empty.
        kernels: the kernels of each layer.
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
    ops: tuple[OpTime, ...] = ()
    kernels: tuple[str, ...] = ()
    ceiling_how: str | None = None

    @property
    def recommended(self) -> list[Verdict]:
        """The verdicts with a significant gain of at least 5 %."""
        return [verdict for verdict in self.verdicts if verdict.is_recommended]

    @property
    def is_undecided(self) -> bool:
        """Whether nothing is recommended, and other processes prevent a verdict."""
        return not self.recommended and any(verdict.is_undecided for verdict in self.verdicts)

    @property
    def to_try(self) -> list[Verdict]:
        """The verdicts on faster changes with a quality that `fastlstm tune` can find."""
        return [verdict for verdict in self.verdicts if verdict.is_to_try]

    @property
    def step_share(self) -> float:
        """The share of steps in the time of the run."""
        return 1.0 - self.phases.get("evaluation", 0.0) - self.phases.get("checkpoint", 0.0)

    def to_dict(self) -> dict[str, object]:
        """Returns the profile for JSON."""
        verdicts = [verdict.to_dict() for verdict in self.verdicts]
        return {**asdict(self), "verdicts": verdicts, "is_undecided": self.is_undecided}


def profile_run(
    source: Any, config: Any, given: Collection[str], seconds: float = 12.0,
    with_ops: bool = False, trace: Path | None = None,
) -> tuple[Profile, Any]:  # fmt: skip
    """Profiles a run instead of training it, for about so many seconds, and throws it away.

    Source, options and names of the given options are as of `train`. A few steps are recorded for
    the operations, or for a `trace` as Chrome's JSON. Returns the profile, and the options with
    every choice made.
    """
    found = list[Profile]()

    def look(trainer: Trainer) -> None:
        profile = profile_steps(trainer, seconds)
        if with_ops or trace is not None:
            profile = replace(profile, ops=tuple(op_times(trainer, trace)))
        found.append(profile)

    planned = plan_run(source, config, given, look)
    kernels, how = tuple(planned.start.get("kernels", ())), planned.start.get("ceiling_how")
    return replace(found[0], kernels=kernels, ceiling_how=how), planned.options


def profile_steps(trainer: Trainer, seconds: float) -> Profile:
    """Times the steps of a run that was set up, in turns with its variants, for about so many
    seconds in all; changes its weights."""
    started, usage = time.perf_counter(), MachineUsage()
    rates = DEFAULT_LEARNING_RATE if isinstance(trainer.task, TextTask) else LEARNING_RATES
    default_rate = rates[trainer.plan.options.optimizer]
    of_rate = lower_rate(trainer, default_rate, _RATE_SHARE * seconds)
    base = as_it_is(trainer)
    base.warm_up(3)
    in_steps, step_s = _phases_of_steps(trainer, base)
    evaluation_s, checkpoint_s, verdicts = between_steps(trainer, step_s)
    total_s, all_steps_s = step_s + evaluation_s + checkpoint_s, max(sum(in_steps.values()), 1e-9)
    phases = {name: s / all_steps_s * step_s / total_s for name, s in in_steps.items()}
    phases |= {"evaluation": evaluation_s / total_s, "checkpoint": checkpoint_s / total_s}
    units_per_s, makers = trainer.task.step_units / step_s, candidates(trainer)
    gflops = trainer.task.flop_per_unit * units_per_s / 1e9
    working_s = in_steps["forward_backward"] + in_steps["optimizer"]
    if 1.0 - working_s / all_steps_s > _MIN_WAIT:
        makers.insert(0, without_loader(trainer))

    def verdict_on(timed: Timed) -> Verdict:
        return _verdict(trainer, timed, units_per_s, step_s / total_s, base.threads)

    others = [*verdicts, *([of_rate] if of_rate else [])]
    try:
        verdicts, not_timed = _verdicts_by_turns(
            base, makers, others, verdict_on, started, seconds
        )  # fmt: skip
    finally:
        torch.set_num_threads(base.threads)  # the last turn may have been a variant's
    forced, widest = environment.forced_isa(), hardware.widest_isa()
    if forced not in (None, widest):
        kernels = f"FASTLSTM_ISA limits the kernels to {forced}"
        not_timed.append(f"instruction set: {kernels}, this CPU has {widest}; unset it")
    return Profile(
        trainer.task.unit, units_per_s, hardware.ceiling_share(gflops, trainer.plan.ceiling_gflops),
        phases, tuple(ranked(verdicts)), tuple(not_timed), time.perf_counter() - started,
        usage.read().get("others_share"), describe_machine(),
    )  # fmt: skip


def _verdicts_by_turns(
    base: Variant, makers: list[Candidate], others: list[Verdict],
    verdict_on: Callable[[Timed], Verdict], started: float, seconds: float,
) -> tuple[list[Verdict], list[str]]:  # fmt: skip
    """Times all variants, then the first recommended one alone, else the best undecided one.

    The gain of the latter is the one of the second measurement, as it was chosen by the first. Slow
    steps that take all `seconds` since `started` leave no time for it. Returns all verdicts, with
    the `others` (which need no turns), and why some variants were not timed.
    """
    rng, end = random.Random(0), started + seconds
    ranked_at, late = started + _RANKING_SHARE * seconds, started + _LATE_SHARE * seconds
    timed, not_timed = time_in_turns(base, makers, ranked_at, late, rng, TURN_S)
    found = [verdict_on(each) for each in timed]
    first = next((v for v in ranked(found) if v.is_recommended or v.is_undecided), None)
    place = next((number for number, verdict in enumerate(found) if verdict is first), None)
    if place is not None and time.perf_counter() < end:

        def is_enough(again: Timed) -> bool:
            verdict = verdict_on(again)
            return is_known(verdict.low, verdict.high)

        candidate, end = timed[place].candidate, max(end, time.perf_counter() + _ALONE_S)
        again = time_until(base, candidate, is_enough, end, rng, _LONG_TURN_S)
        found[place] = verdict_on(again)
    return [*others, *found], not_timed


def _phases_of_steps(trainer: Trainer, base: Variant) -> tuple[dict[str, float], float]:
    """Returns the seconds of each phase in a few turns, and the seconds of a step."""
    phases = PhaseTimes(trainer)
    unit_s = min(base.turn(TURN_S) for _ in range(_FIRST_TURNS))
    found = phases.take()
    del found["evaluation"], found["checkpoint"]
    return found, unit_s * trainer.task.step_units


def _verdict(
    trainer: Trainer, timed: Timed, units_per_s: float, step_share: float, threads: int
) -> Verdict:
    """Returns the verdict on a variant; for a change of learning with the time to equal quality."""
    variant = timed.variant
    assert isinstance(variant, Variant)
    verdict = of_pairs(variant, timed.base, timed.other, trainer.task.unit, step_share)
    if variant.threads > threads and variant.is_held_back:
        verdict = replace(verdict, is_held_back=True)
    if verdict.effect != CHANGES_LEARNING:
        return verdict
    ratios = 1.0 + verdict.gain, 1.0 + verdict.low
    gains = quality_gain(trainer, units_per_s, verdict.options, ratios)
    if gains is not None:
        return replace(verdict, quality_gain=gains[0], quality_low=gains[1])
    return replace(verdict, axis="output-rank" if verdict.cause == "output layer" else "")
