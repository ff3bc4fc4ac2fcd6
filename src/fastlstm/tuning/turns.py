"""Variants of the same work timed in turns, so that what disturbs the machine slows all of them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from fastlstm.errors import FastLSTMError
from fastlstm.tuning.paired_times import MIN_PAIRS, estimate

TURN_S = 0.15
_MAX_PAIRS = 16
"""More pairs say little that is new."""
_MAX_PAIRS_OF_ONE = 48
"""Of a variant that is timed alone."""
_LATE_SHARE = 0.5
"""Of the planned time, what variants may take beyond it to have an interval."""
_WORTH_GOING_ON = 1.05
"""Speed over that of the base from which the next value of the same option is tried, and below
which a variant that surely stays there has no more turns."""


class Change(Protocol):
    """One thing that is changed.

    Attributes:
        cause: what would hold the work back if the variant is faster.
        effect: on the result of the work.
        options: changed, by name.
    """

    @property
    def cause(self) -> str: ...
    @property
    def effect(self) -> str: ...
    @property
    def options(self) -> Mapping[str, Any]: ...


class TimedVariant(Change, Protocol):
    """Work with one thing changed, whose speed can be timed."""

    def warm_up(self) -> None:
        """Does work that does not count."""

    def turn(self, seconds: float) -> float:
        """Works for about so many seconds; returns the seconds per unit of work."""

    def close(self) -> None:
        """Gives up what the variant holds."""


@dataclass(frozen=True)
class Candidate:
    """A variant to time.

    Attributes:
        make: makes it; an error of fastlstm leaves it out.
        base: what it is compared with, if not the base of the others.
        then: a further value of the same option, timed if this one is clearly faster.
        may_be_slower: it may be worth it though it is slower, so it is timed on all the same.
    """

    make: Callable[[], TimedVariant]
    base: TimedVariant | None = None
    then: Candidate | None = None
    may_be_slower: bool = False


@dataclass
class Timed:
    """A variant with its times.

    Attributes:
        variant: what was timed.
        candidate: what made it.
        base: seconds per unit of the base, one beside each of the variant's.
        other: seconds per unit of the variant.
    """

    variant: TimedVariant
    candidate: Candidate
    base: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The speed over that of the base; median of the pairs."""
        pairs = zip(self.base, self.other, strict=True)
        return statistics.median(base / other for base, other in pairs)

    def is_over(self) -> bool:
        """Returns whether more turns would change nothing: the interval excludes a gain.

        A few slow pairs exclude none: what else runs slows threads for seconds.
        """
        count = len(self.base)
        if count < MIN_PAIRS or self.candidate.may_be_slower:
            return count >= _MAX_PAIRS
        found = estimate(np.array(self.other), np.array(self.base), np.arange(count))
        return count >= _MAX_PAIRS or found.high < _WORTH_GOING_ON


def time_in_turns(
    base: TimedVariant,
    candidates: Iterable[Candidate],
    end: float,
    rng: random.Random,
    turn_s: float = TURN_S,
    late: float | None = None,
) -> tuple[list[Timed], list[str]]:
    """Returns the times of all variants beside those of the base, and why some were not timed.

    In each round every variant has one turn. Two variants of random order have a turn of the base
    between them, which both are compared with. A variant that surely gains nothing is left out of
    further rounds.

    Args:
        base: what the variants are compared with.
        candidates: what makes the variants.
        end: of the measurement, as `time.perf_counter`. Variants that have too few pairs for an
            interval go on.
        rng: draws the order.
        turn_s: seconds of a turn.
        late: end of these; default is half as long again.
    """
    began, not_timed = time.perf_counter(), list[str]()
    if late is None:
        late = end + _LATE_SHARE * max(end - began, 0.0)
    live, found = list[Timed](), list[Timed]()
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
            following = timed.candidate.then
            if len(timed.base) == 2 and following and timed.ratio > _WORTH_GOING_ON and now < end:
                waiting.append(following)
            if timed.is_over() or now > late or (now > end and len(timed.base) >= MIN_PAIRS):
                live.remove(timed)
                found.append(timed)
                timed.variant.close()
    return found, not_timed


def time_until(
    base: TimedVariant,
    candidate: Candidate,
    is_enough: Callable[[Timed], bool],
    end: float,
    rng: random.Random,
    turn_s: float,
) -> Timed:
    """Returns the times of one variant beside those of its base.

    Args:
        base: what it is compared with.
        candidate: what makes the variant.
        is_enough: asked after each pair from the sixth on.
        end: of the measurement, as `time.perf_counter`; six pairs are taken all the same.
        rng: draws the order.
        turn_s: seconds of a turn.
    """
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
    """Gives every variant a turn beside one of its base; neither comes first more often."""
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
