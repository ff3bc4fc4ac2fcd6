"""Paired turns: times variants of the same work in turns, and compares their times.

A disturbance of the machine that is longer than a turn slows both sides. A pair is a time of one
side and a time of the other, measured after each other.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fastlstm.errors import FastLSTMError

MIN_PAIRS = 6
"""Fewer pairs give no interval."""
_ERROR = 0.05
TURN_S = 0.15
_MAX_PAIRS, _MAX_PAIRS_OF_ONE = 16, 48
"""More pairs add little; the second number is for a variant that is timed alone."""
_WORTH_GOING_ON = 1.05
"""Relative speed above which the next value of an option is tried. A variant that is surely slower
gets no more turns."""


@dataclass(frozen=True)
class Estimate:
    """The median ratio of the times of B to the times of A; B is slower above 1.

    `low` and `high` are the 95 % interval: 0 and infinity for fewer than six pairs.
    """

    ratio: float
    low: float
    high: float
    pairs: int


def estimate(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """Returns the ratio B / A of paired times with the interval of the sign test.

    The number of pairs below the true median is binomial with probability 1/2 for any noise, so the
    k-th smallest and the k-th largest ratio enclose it with a known probability. For six pairs they
    are the smallest and the largest ratio.
    """
    ratios, count = sorted(y / x for x, y in zip(a, b, strict=True)), len(a)
    middle = statistics.median(ratios)
    if count < MIN_PAIRS:
        return Estimate(middle, 0.0, math.inf, count)
    place, outside = 0, 2 / 2**count
    while (outside := outside + 2 * math.comb(count, place + 1) / 2**count) <= _ERROR:
        place += 1
    return Estimate(middle, ratios[place], ratios[-1 - place], count)


class TimedVariant(Protocol):
    """Work with one change. `turn` works for about so many seconds and returns the seconds per unit
    of work; `warm_up` comes before the turns, `close` after them."""

    def warm_up(self) -> None: ...
    def turn(self, seconds: float) -> float: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Candidate:
    """A variant to time.

    Attributes:
        make: makes the variant; after an error of fastlstm it is not timed.
        base: the variant to compare with, if not the common base.
        then: the next value of the same option, timed if this one is clearly faster.
        may_be_slower: the variant may be better though slower, so it always gets all turns.
    """

    make: Callable[[], TimedVariant]
    base: TimedVariant | None = None
    then: Candidate | None = None
    may_be_slower: bool = False


@dataclass
class Timed:
    """A variant with paired seconds per unit: of its base and of itself."""

    variant: TimedVariant
    candidate: Candidate
    base: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)

    @property
    def speed(self) -> Estimate:
        return estimate(self.other, self.base)

    def is_over(self) -> bool:
        """Returns whether more turns are useless: the interval excludes a gain.

        Fewer than six slow pairs exclude none: other processes slow threads for seconds.
        """
        num, may_be_slower = len(self.base), self.candidate.may_be_slower
        is_slow = num >= MIN_PAIRS and not may_be_slower and self.speed.high < _WORTH_GOING_ON
        return num >= _MAX_PAIRS or is_slow


def time_in_turns(
    base: TimedVariant, candidates: Iterable[Candidate], end: float, late: float,
    rng: random.Random, turn_s: float,
) -> tuple[list[Timed], list[str]]:  # fmt: skip
    """Returns the times of all variants and of the base, and why some were not timed.

    In each round every variant has one turn. Two variants in random order share a turn of the base
    between them. A variant that surely gains nothing gets no further rounds. The measurement ends
    at `end` (`time.perf_counter`), or at `late` for variants with too few pairs for an interval.
    """
    live, found, not_timed = list[Timed](), list[Timed](), list[str]()
    waiting = list(candidates)
    while live or waiting:
        for candidate in waiting:
            try:
                live.append(Timed(_warmed_up(candidate), candidate))
            except FastLSTMError as error:
                not_timed.append(error.lines()[0])
        waiting = []
        _round(base, live, rng, turn_s)
        now = time.perf_counter()
        for timed in list(live):
            pairs, following = len(timed.base), timed.candidate.then
            if pairs == 2 and following and timed.speed.ratio > _WORTH_GOING_ON and now < end:
                waiting.append(following)
            if timed.is_over() or now > late or (now > end and pairs >= MIN_PAIRS):
                live.remove(timed)
                found.append(timed)
                timed.variant.close()
    return found, not_timed


def time_until(
    base: TimedVariant, candidate: Candidate, is_enough: Callable[[Timed], bool], end: float,
    rng: random.Random, turn_s: float,
) -> Timed:  # fmt: skip
    """Returns the times of one variant and its base: at least six pairs, then more until
    `is_enough`, or `end` (`time.perf_counter`); turns take `turn_s`."""
    timed = Timed(_warmed_up(candidate), candidate)
    try:
        while len(timed.base) < MIN_PAIRS or not (
            time.perf_counter() > end or len(timed.base) >= _MAX_PAIRS_OF_ONE or is_enough(timed)
        ):
            _round(base, [timed], rng, turn_s)
    finally:
        timed.variant.close()
    return timed


def _warmed_up(candidate: Candidate) -> TimedVariant:
    variant = candidate.make()
    try:
        variant.warm_up()
    except FastLSTMError:
        variant.close()
        raise
    return variant


def _round(base: TimedVariant, live: Sequence[Timed], rng: random.Random, turn_s: float) -> None:
    """Gives every variant a turn next to a turn of its base, in random order."""
    alone = [timed for timed in live if timed.candidate.base is not None]
    shared = [timed for timed in live if timed.candidate.base is None]
    rng.shuffle(shared)
    if len(shared) % 2:
        alone.append(shared.pop())
    for timed in alone:
        for side in rng.sample((0, 1), 2):
            worker = (timed.candidate.base or base, timed.variant)[side]
            (timed.base, timed.other)[side].append(worker.turn(turn_s))
    for before, after in zip(shared[::2], shared[1::2], strict=True):
        before.other.append(before.variant.turn(turn_s))
        base_s = base.turn(turn_s)
        before.base.append(base_s)
        after.base.append(base_s)
        after.other.append(after.variant.turn(turn_s))
