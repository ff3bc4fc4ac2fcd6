"""Verdicts on a training run: one per cause, with the measured gain of a change."""

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
"""A larger gain without a recommendation is printed with the reason."""
_KNOWN = 0.04
"""Half the width of an interval that is narrow enough."""
_KEPT_SHARE = 0.02
"""Share of the time for evaluations, or checkpoints, after a recommended change."""
_CHECKPOINT_S = 60.0
"""Seconds between checkpoints without a given number of steps."""
_EVALUATED_S = 1.0
_TRAINING_SHARE = 0.9
"""Share of steps in a budget."""


@dataclass(frozen=True)
class Verdict:
    """The gain of removing one cause.

    Attributes:
        share: share of the time of the run that the change saves, 0..1.
        gain: relative gain of units per second.
        low, high: interval of the gain; infinite for too few pairs, equal to the gain without
            paired turns.
        options: options to change, by name; may be empty.
        is_in_steps: whether the change makes steps faster, not the time between them.
        quality_gain, quality_low: for a change of learning, how much sooner the run is expected to
            reach its final quality, and at least; None if not known.
        axis: axis of `fastlstm tune` that finds the quality after a change of learning.
        is_held_back: whether other processes used the cores of additional threads.
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
    axis: str = ""
    is_held_back: bool = False

    @property
    def is_recommended(self) -> bool:
        """Whether the gain is significant and at least 5 %; for a change of learning, whether the
        run surely reaches the same quality sooner."""
        if self.effect == CHANGES_LEARNING:
            return self.quality_low is not None and self.quality_low >= MIN_GAIN
        return self.gain >= MIN_GAIN and self.low > 0.0

    @property
    def is_mentioned(self) -> bool:
        """Whether to print the reason against a change that makes steps faster."""
        return (
            not (self.is_recommended or self.is_to_try)
            and self.is_in_steps
            and (self.gain > MIN_MENTIONED or self.is_undecided)
        )

    @property
    def is_undecided(self) -> bool:
        """Whether other processes prevent a verdict: they used the cores, or the interval is too
        wide to exclude a gain of 5 %."""
        if self.is_recommended or self.is_to_try or not self.is_in_steps:
            return False
        if self.effect == CHANGES_LEARNING and not self.axis and self.quality_gain != self.gain:
            return False
        is_wide = self.gain >= MIN_GAIN or not is_known(self.low, self.high)
        return self.is_held_back or (self.high >= MIN_GAIN and is_wide)

    @property
    def is_to_try(self) -> bool:
        """Whether the change is surely faster, and `fastlstm tune` can find its quality."""
        is_surely_faster = self.low > 0.0 and math.isfinite(self.high) and self.gain >= MIN_GAIN
        return bool(self.axis) and is_surely_faster and not self.is_recommended

    @property
    def worth(self) -> float:
        """The gain that ranks verdicts: of the time to the same quality."""
        return self.gain if self.quality_gain is None else self.quality_gain

    def to_dict(self) -> dict[str, object]:
        flags = {"is_recommended": self.is_recommended, "is_to_try": self.is_to_try}
        return {**asdict(self), **flags}


def of_pairs(
    variant: Variant, base: list[float], other: list[float], unit: str, step_share: float = 1.0
) -> Verdict:
    """Returns the verdict on a variant, from paired seconds per unit of the run (`base`) and of the
    variant (`other`). The gain is for the whole run; steps take `step_share` of its time."""
    found = estimate(other, base)

    def of_run(ratio: float) -> float:
        if not ratio or math.isinf(ratio):
            return ratio - 1.0
        return 1.0 / (1.0 - step_share + step_share / ratio) - 1.0

    gain, low, high = of_run(found.ratio), of_run(found.low), of_run(found.high)
    rates = [1.0 / statistics.median(side) for side in (base, other)]
    few = " (too few for an interval)" if len(base) < MIN_PAIRS else ""
    pairs = f"{len(base)} pairs of turns{few}"
    evidence = f"{rates[0]:,.0f} -> {rates[1]:,.0f} {unit}/s in steps, {pairs}"
    share = 1.0 - 1.0 / (1.0 + gain) if gain > 0 else 0.0
    options = dict(variant.options)
    return Verdict(variant.cause, share, gain, low, high, variant.effect, options, evidence)


def is_known(low: float, high: float) -> bool:
    """Returns whether the interval of a gain is so narrow that more turns add little."""
    return high - low <= 2.0 * _KNOWN


def ranked(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Returns the best verdict of each cause, an undecided one before a worthless one. Recommended
    verdicts come first, then those for `tune` to try, each by worth."""
    standing = sorted(verdicts, key=lambda v: (v.is_recommended, v.is_undecided, v.worth))
    best = {v.cause: v for v in standing}
    return sorted(best.values(), key=lambda v: (not v.is_recommended, not v.is_to_try, -v.worth))


def training_seconds(trainer: Trainer, step_s: float) -> float:
    """Returns the estimated seconds of all steps of a run, at `step_s` each."""
    stop = trainer.plan.stop_criterion
    if stop.total_steps is not None:
        return stop.total_steps * step_s
    assert stop.budget_s is not None
    return _TRAINING_SHARE * stop.budget_s


def steps_wanted(cost: float, now: int, total: float) -> int:
    """Returns the steps between evaluations, or checkpoints, for a small share of the time. One
    costs as much as `cost` steps and comes every `now` steps; a run has `total` steps."""
    wanted = math.ceil(cost * (1.0 - _KEPT_SHARE) / _KEPT_SHARE)
    return max(now, min(wanted, math.ceil(total)))


def between_steps(trainer: Trainer, step_s: float) -> tuple[float, float, list[Verdict]]:
    """Evaluates and saves once, after the first step; returns the seconds per step for evaluations
    and for checkpoints, and the verdicts on both."""
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
    if stop.budget_s is not None:  # evaluations take a bounded share of a budget
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
