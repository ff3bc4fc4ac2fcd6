"""What holds a training run back: one verdict per cause, each with the gain that was measured."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fastlstm.training.schedule import SPREAD_SHARE, EvaluationSchedule
from fastlstm.tuning.turns import MIN_PAIRS, estimate
from fastlstm.tuning.variants import CHANGES_LEARNING, EXACT, Variant

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer

MIN_GAIN = 0.05
"""A smaller gain is no recommendation."""
MIN_MENTIONED = 0.1
"""A larger gain that is not recommended is printed with the reason."""
_KNOWN = 0.04
"""Half of the interval of a gain, from which on it is known well enough."""
_KEPT_SHARE = 0.02
"""Of the time, what evaluations or checkpoints may take after the change that is recommended."""
_CHECKPOINT_S = 60.0
"""Between checkpoints, where no number of steps is given."""
_EVALUATED_S = 1.0
_TRAINING_SHARE = 0.9
"""Of a budget, what steps take."""


@dataclass(frozen=True)
class Verdict:
    """What one cause costs.

    Attributes:
        share: of the time of the run that the change takes away, 0..1.
        gain: units per second with the change over those without it, less 1.
        low, high: interval of the gain; infinite where there are too few pairs, equal to the gain
            where it was not timed in turns.
        options: to change, by name; empty where there is no option to change.
        is_in_steps: whether it makes steps faster; else it takes time between steps.
        quality_gain, quality_low: of a change that changes learning: how much sooner the run is
            expected to reach what it ends at, and at least; None where nothing is known.
        command_prefix: goes before the command that makes the change.
        axis: of `fastlstm tune`, which finds out what a change of learning ends at.
        is_held_back: whether other processes had the cores of the threads that it adds.
    """

    cause: str
    share: float
    gain: float
    low: float
    high: float
    effect: str
    options: Mapping[str, Any] = field(default_factory=dict)
    evidence: str = ""
    is_in_steps: bool = True
    quality_gain: float | None = None
    quality_low: float | None = None
    command_prefix: str = ""
    axis: str = ""
    is_held_back: bool = False

    @property
    def is_recommended(self) -> bool:
        """Whether the gain is large enough and surely there; of what changes learning, whether the
        run surely reaches the same quality sooner."""
        if self.effect == CHANGES_LEARNING:
            return self.quality_low is not None and self.quality_low >= MIN_GAIN
        return self.gain >= MIN_GAIN and self.low > 0.0

    @property
    def is_mentioned(self) -> bool:
        """Whether it makes steps faster but is not recommended: the reason is printed."""
        return (
            not (self.is_recommended or self.is_to_try)
            and self.is_in_steps
            and (self.gain > MIN_MENTIONED or self.is_undecided)
        )

    @property
    def is_undecided(self) -> bool:
        """Whether other processes forbid a verdict by speed: they had the cores, or their noise
        makes the interval too wide to exclude a gain of 5 %."""
        if self.is_recommended or self.is_to_try or not self.is_in_steps:
            return False
        if self.effect == CHANGES_LEARNING and not self.axis and self.quality_gain != self.gain:
            return False
        is_wide = self.gain >= MIN_GAIN or not is_known(self.low, self.high)
        return self.is_held_back or (self.high >= MIN_GAIN and is_wide)

    @property
    def is_to_try(self) -> bool:
        """Whether the change surely makes the run faster, and `fastlstm tune` must say what it
        ends at."""
        is_surely_faster = self.low > 0.0 and math.isfinite(self.high) and self.gain >= MIN_GAIN
        return bool(self.axis) and is_surely_faster and not self.is_recommended

    @property
    def worth(self) -> float:
        """What verdicts are ranked by: the gain of the time to the same quality."""
        return self.gain if self.quality_gain is None else self.quality_gain

    def to_dict(self) -> dict[str, object]:
        """Returns all of it for JSON."""
        flags = {"is_recommended": self.is_recommended, "is_to_try": self.is_to_try}
        return {**asdict(self), **flags}


def of_pairs(
    variant: Variant | Verdict, base: list[float], other: list[float], unit: str,
    step_share: float = 1.0,
) -> Verdict:  # fmt: skip
    """Returns the verdict on a variant that was timed in turns with the run as it is, from the
    seconds per unit of both; of the run's time, its steps take `step_share`."""
    gain, low, high = gains_of(base, other, step_share)
    rates = [1.0 / statistics.median(side) for side in (base, other)]
    few = " (too few for an interval)" if len(base) < MIN_PAIRS else ""
    pairs = f"{len(base)} pairs of turns{few}"
    evidence = f"{rates[0]:,.0f} -> {rates[1]:,.0f} {unit}/s in steps, {pairs}"
    share = 1.0 - 1.0 / (1.0 + gain) if gain > 0 else 0.0
    options = dict(variant.options)
    return Verdict(variant.cause, share, gain, low, high, variant.effect, options, evidence)


def gains_of(
    base: list[float], other: list[float], step_share: float
) -> tuple[float, float, float]:
    """Returns the gain of the whole run with its interval; arguments as of `of_pairs`."""
    found = estimate(other, base)

    def of_whole(ratio: float) -> float:
        if not ratio or math.isinf(ratio):
            return ratio - 1.0
        return 1.0 / (1.0 - step_share + step_share / ratio) - 1.0

    return of_whole(found.ratio), of_whole(found.low), of_whole(found.high)


def is_known(low: float, high: float) -> bool:
    """Returns whether the interval of a gain is so short that more turns would say little."""
    return high - low <= 2.0 * _KNOWN


def ranked(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Returns the best verdict of each cause, an undecided one before one that is not worth it:
    recommended ones first, then the ones for `tune` to try, each by what they are worth."""
    standing = sorted(verdicts, key=lambda v: (v.is_recommended, v.is_undecided, v.worth))
    best = {v.cause: v for v in standing}
    return sorted(best.values(), key=lambda v: (not v.is_recommended, not v.is_to_try, -v.worth))


def training_seconds(trainer: Trainer, step_s: float) -> float:
    """Returns about how long the steps of a run take, at `step_s` each."""
    stop = trainer.plan.stop_criterion
    if stop.total_steps is not None:
        return stop.total_steps * step_s
    assert stop.budget_s is not None
    return _TRAINING_SHARE * stop.budget_s


def steps_wanted(cost: float, now: int, total: float) -> int:
    """Returns the steps between evaluations, or checkpoints, that leave them a small share of the
    time, where they cost so many steps and come after `now`; not more than the `total` of the run,
    as one comes at its end."""
    wanted = math.ceil(cost * (1.0 - _KEPT_SHARE) / _KEPT_SHARE)
    return max(now, min(wanted, math.ceil(total)))


def between_steps(trainer: Trainer, step_s: float) -> tuple[float, float, list[Verdict]]:
    """Evaluates and saves once; returns the seconds per step of the run that evaluations and
    checkpoints take, and the verdicts on both. At least one step has been taken."""
    options, progress, task = trainer.plan.options, trainer.progress, trainer.task
    stop, total = trainer.plan.stop_criterion, training_seconds(trainer, step_s) / step_s
    schedule = EvaluationSchedule(trainer.plan.eval_every, trainer.plan.evaluations, stop)
    unit_s = task.forward_share * step_s / task.step_units
    scored = schedule.limit(task, progress, unit_s)
    progress.scored = timed = min(scored, max(task.min_scored, int(_EVALUATED_S / unit_s)))
    started = time.perf_counter()
    trainer.evaluate()
    evaluation_s = (time.perf_counter() - started) * max(1.0, scored / timed)
    started = time.perf_counter()
    trainer.saver.save()
    save_s = time.perf_counter() - started
    spread = total / max(1, trainer.plan.evaluations)
    if stop.budget_s is not None:  # evaluations that are spread take a bounded share of a budget
        spread = max(spread, evaluation_s / (SPREAD_SHARE * step_s))
    every = trainer.plan.eval_every or max(1, round(spread))
    saves_every = options.checkpoint_every or max(1, round(_CHECKPOINT_S / step_s))
    found, total_s = list[Verdict](), step_s + evaluation_s / every + save_s / saves_every
    for cause, option, steps, seconds, name in (
        ("evaluation", "eval_every", every, evaluation_s, "an evaluation"),
        ("checkpoints", "checkpoint_every", saves_every, save_s, "a checkpoint"),
    ):
        wanted = steps_wanted(seconds / step_s, steps, total)
        gain = total_s / (total_s - seconds / steps + seconds / wanted) - 1.0
        evidence = f"{name} takes {seconds:.2f} s, every {steps:,} steps of {step_s:.3f} s"
        share, changed = seconds / steps / total_s, {option: wanted}
        found.append(Verdict(cause, share, gain, gain, gain, EXACT, changed, evidence, False))
    return evaluation_s / every, save_s / saves_every, found
