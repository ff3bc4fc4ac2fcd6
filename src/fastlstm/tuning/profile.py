"""`fastlstm profile`: finds the bottlenecks of a training run by changing it."""

from __future__ import annotations

import math
import random
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastlstm.forecast.plan import LEARNING_RATES
from fastlstm.system import environment, hardware
from fastlstm.system.machine_usage import MachineUsage
from fastlstm.text.quality_law import (
    MOST_LAYERS,
    OPTIMIZERS,
    Length,
    QualityPrediction,
    relative_bits,
)
from fastlstm.text.task import TextTask
from fastlstm.training.events import PhaseTimes
from fastlstm.training.optimizer import DEFAULT_LEARNING_RATE
from fastlstm.tuning.op_times import OpTime, op_times
from fastlstm.tuning.planned_run import describe_machine, plan_run
from fastlstm.tuning.turns import TURN_S, Candidate, Timed, time_in_turns, time_until
from fastlstm.tuning.variants import (
    CHANGES_LEARNING,
    Variant,
    as_it_is,
    candidates,
    changed_run,
    without_loader,
)
from fastlstm.tuning.verdicts import (
    Verdict,
    between_steps,
    is_known,
    of_pairs,
    ranked,
    training_seconds,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from fastlstm.training.trainer import Trainer

_FIRST_TURNS = 3
_RANKING_SHARE, _LATE_SHARE = 0.5, 1.2
"""Shares of the time: all variants are timed until the first, variants with too few pairs for an
interval are timed until the second. The rest is for one variant alone."""
_LONG_TURN_S, _ALONE_S = 0.25, 4.0
"""For the variant that is timed alone: seconds of a turn, and least seconds of all turns."""
_RATE_SHARE = 0.3
"""Share of the time for a learning rate that looks too high."""
_MIN_WAIT = 0.02
"""Share of steps outside passes and optimizer, above which the loader is timed."""

_LAW_ERROR = 0.012
"""Relative error of the bits per character of the law (benchmarks/log)."""
_HIGH_RATE = 2.0
"""Ratio to the default learning rate from which a lower one is tried."""
_PROBE_STEPS, _MIN_PROBE_STEPS = 48, 24


@dataclass(frozen=True)
class Profile:
    """The profile of a run.

    Attributes:
        units_per_s: speed of the steps, in units of a batch, such as "tokens".
        ceiling_share: floating-point operations per second over the measured ceiling, or None.
        phases: share of each phase in the time of the run.
        verdicts: one on each cause, recommended ones first, by worth.
        not_timed: variants that could not be timed, with the reason.
        others: share of the cores that other processes used, or None.
        ops: operations of a step, longest first; may be empty.
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

    def to_dict(self) -> dict[str, object]:
        verdicts = [verdict.to_dict() for verdict in self.verdicts]
        return {**asdict(self), "verdicts": verdicts, "is_undecided": self.is_undecided}


def profile_run(
    source: Any, config: Any, given: Collection[str], seconds: float = 12.0,
    with_ops: bool = False, trace: Path | None = None,
) -> tuple[Profile, Any]:  # fmt: skip
    """Profiles a run instead of training it, for about so many seconds, and throws it away.

    Source, options and names of the given options are as for `train`. A few steps are recorded for
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

    The gain of that variant is the gain in its second measurement, because the first one chose it.
    Slow steps that take all `seconds` since `started` leave no time for it. Returns all verdicts,
    with the `others` (which need no turns), and why some variants were not timed.
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


def quality_gain(
    trainer: Trainer, units_per_s: float, options: Mapping[str, Any], ratios: tuple[float, float]
) -> tuple[float, float] | None:
    """Returns how much sooner a run with other options reaches the final quality of this run:
    expected, and at least; None if not known.

    For texts the law of quality predicts it. For tables the options move towards their defaults,
    and the gain of speed counts. `ratios` are the relative speed of the variant: expected, and at
    least.
    """
    task, run = trainer.task, trainer.plan.options
    if not isinstance(task, TextTask):
        return ratios[0] - 1.0, ratios[1] - 1.0
    model, text, own_step = task.model.config, len(task.loader.ids), task.step_units
    has_law = task.config.vocab != "bpe" and model.num_layers <= MOST_LAYERS
    optimizer = options.get("optimizer", run.optimizer)
    if not has_law or not {run.optimizer, optimizer} <= OPTIMIZERS.keys():
        return None
    if "output_rank" in options:
        return None
    sizes = [n for n in ("batch_size", "seq_length") if n in options]
    step = own_step * math.prod(options[name] / getattr(task.config, name) for name in sizes)

    run_s = training_seconds(trainer, own_step / units_per_s)

    def law(rate: float, step: float, optimizer: str) -> QualityPrediction:
        size, length = (model.rnn_size, model.num_layers), Length(rate * run_s, rate * run_s / step)
        bits = relative_bits(*size, length.tokens, length.steps, optimizer, text)
        return QualityPrediction(*size, optimizer, text, length, bits, rate, setup_s=0.0)

    own = law(units_per_s, own_step, run.optimizer).measured_bits

    def gain(ratio: float, error: float) -> float:
        changed = law(max(ratio, 1e-3) * units_per_s, step, optimizer)
        needed_s = changed.seconds_to(own / (1.0 + error))
        return -1.0 if needed_s is None else run_s / needed_s - 1.0

    return gain(ratios[0], 0.0), gain(ratios[1], _LAW_ERROR)


def lower_rate(trainer: Trainer, default_rate: float, seconds: float) -> Verdict | None:
    """Returns the verdict on a quarter of the learning rate, for a rate far above the default.

    Both rates take the same steps from the same weights; a rate that is too high ends with the
    higher loss. Restores the weights. Returns None if too few steps of both fit into `seconds`.
    """
    rate = trainer.plan.options.learning_rate
    if rate is None or rate < _HIGH_RATE * default_rate:
        return None
    start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    losses, lower = dict[float, list[float]](), rate / 4.0
    count, threads = _PROBE_STEPS, torch.get_num_threads()
    for value in (rate, lower):
        trainer.model.load_state_dict(start)
        options = {"learning_rate": value}
        variant = changed_run(trainer, "learning rate", CHANGES_LEARNING, options, threads)
        try:
            if value == rate:
                variant.warm_up()
                trainer.model.load_state_dict(start)
                count = min(count, int(seconds / 2.0 / max(variant.step_s, 1e-6)))
                if count < _MIN_PROBE_STEPS:
                    return None
            losses[value] = _losses(variant.trainer, count)
        finally:
            variant.close()
    trainer.model.load_state_dict(start)
    return _of_losses(losses[rate], losses[lower], lower)


def _losses(trainer: Trainer, count: int) -> list[float]:
    """Returns the losses of steps at the peak learning rate; the first infinite one is the last."""
    found = list[float]()
    for _ in range(count):
        loss, _ = trainer.step(trainer.task.loader.next())
        if not math.isfinite(loss):
            return [*found, *[math.inf] * (count - len(found))]
        found.append(loss)
    return found


def _of_losses(own: list[float], other: list[float], rate: float) -> Verdict:
    """Returns the verdict: how much sooner the lower rate reaches the loss of the higher one."""
    window = max(4, len(own) // 6)
    ends = [sum(losses[-window:]) / window for losses in (own, other)]
    means = [sum(other[i : i + window]) / window for i in range(len(other) - window + 1)]
    reached = next((i + window for i, mean in enumerate(means) if mean <= ends[0]), None)
    gain = -1.0 if reached is None else len(own) / reached - 1.0
    evidence = (
        f"loss after {len(own)} steps from the same weights: {ends[0]:.3f} ->"
        f" {ends[1]:.3f} at a quarter of the rate"
    )
    share = max(0.0, 1.0 - 1.0 / (1.0 + gain)) if gain > -1.0 else 0.0
    return Verdict(
        "learning rate", share, 0.0, 0.0, 0.0, CHANGES_LEARNING, {"learning_rate": rate},
        evidence, False, gain, gain,
    )  # fmt: skip
