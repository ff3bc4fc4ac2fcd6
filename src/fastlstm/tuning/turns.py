"""Paired turns: variants of the same work timed in turns, and the ratio of their times.

Two sides take turns, so that what disturbs the machine for longer than a turn slows both. A pair is
a time of one side beside a time of the other. All formulas work on d = log(time of B / time of A).
Pairs of one group share processes, so that groups, not pairs, are independent of each other.
`Worker` is a side in a process of its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import random
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import CommandError, FastLSTMError
from fastlstm.training.step_time import settled

Floats = NDArray[np.float64]

LOOK_ERROR = 0.0129
"""Two-sided error of an interval. With it five looks at a measurement, after 12, 24, 48, 96 and 192
pairs, hold the true ratio together in 95 % of measurements: Pocock's bound (Biometrika 64, 1977)
for looks whose numbers double, whose correlations are 2 ** (-|i - j| / 2)."""
MIN_GROUPS = 3
"""Fewer groups give no interval."""
MIN_PAIRS = 6
"""Fewer pairs give no interval."""
_PAIRS_PER_BLOCK = 2
_DISTURBED = 3.5
"""Iglewicz and Hoaglin (1993) call a value an outlier from 3.5 robust deviations on."""
_MAX_DROPPED = 0.25
_MAD_TO_SD = 1.4826
"""1 / 0.6745: the median absolute deviation of a normal variable in standard deviations."""
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


_MIN_STEPS, _EXIT_S = 3, 5.0
_TAIL_BYTES, _TAIL_LINES = 4_000, 8
"""Of standard error, kept for the message of a worker that failed."""


@dataclass(frozen=True)
class Estimate:
    """The ratio of the times of B to those of A.

    Attributes:
        ratio: Hodges-Lehmann estimate; above 1 B is slower.
        low, high: the interval, 0 and infinity where there are too few groups.
        pairs: used.
        dropped: pairs left out as disturbed.
        groups: of processes.
        spread: robust standard deviation of log(B / A) of a pair.
    """

    ratio: float
    low: float
    high: float
    pairs: int
    dropped: int
    groups: int
    spread: float


def estimate(a: Floats, b: Floats, group: NDArray[np.int64]) -> Estimate:
    """Returns the ratio B / A with the interval of one look.

    The interval is d ± t * s: d is the Hodges-Lehmann estimate over all pairs that are left, s its
    jackknife error with one group left out at a time, t the quantile of Student's t with one degree
    of freedom fewer than groups at `LOOK_ERROR`.

    Args:
        a: times of A, of any unit, in the order of measurement; `(pairs,)`, two pairs per block.
        b: times of B beside them.
        group: number of the processes that each pair was measured with.
    """
    kept = undisturbed(a, b)
    difference, group = np.log(b[kept] / a[kept]), group[kept]
    middle, count = hodges_lehmann(difference), len(np.unique(group))
    half = math.inf
    if count >= MIN_GROUPS and len(difference) >= MIN_PAIRS:
        error = jackknife_error(difference, group)
        half = student_quantile(1.0 - LOOK_ERROR / 2.0, count - 1) * error
    return Estimate(
        math.exp(middle), math.exp(middle - half), math.exp(middle + half) if half < 700 else
        math.inf, len(difference), len(a) - len(difference), count, robust_deviation(difference),
    )  # fmt: skip


def verdict(found: Estimate, detect: float = 0.03) -> str:
    """Returns "slower", "not slower" or "undecided" for side B of an estimate.

    "Not slower" means: not slower by more than `detect`, the interval ends below 1 + detect (one
    side of the two one-sided tests of Schuirmann, J. Pharmacokinet. Biopharm. 15, 1987). "Slower"
    means: the interval begins above 1. Where both hold B is slower by less than `detect`, and the
    verdict is "not slower".

    Args:
        found: the estimate.
        detect: the smallest slowdown that matters, as a share: 0.03 is 3 %.
    """
    if found.high < 1.0 + detect:
        return "not slower"
    return "slower" if found.low > 1.0 else "undecided"


def undisturbed(a: Floats, b: Floats) -> NDArray[np.bool_]:
    """Returns which pairs to keep: all but those of blocks in which everything was slow.

    A block is judged by the sum of the logarithms of its four times, which is the same with the
    sides exchanged, so the rule cannot see which side was disturbed. It goes, with both sides, when
    the sum is more than 3.5 robust deviations above the median; at most a quarter of the blocks.

    Args:
        a: times of A, `(pairs,)`.
        b: times of B.
    """
    blocks = len(a) // _PAIRS_PER_BLOCK
    kept = np.ones(len(a), dtype=np.bool_)
    if blocks < 4:
        return kept
    sums = np.log(a * b)[: blocks * _PAIRS_PER_BLOCK].reshape(blocks, _PAIRS_PER_BLOCK).sum(axis=1)
    excess = sums - np.median(sums)
    slow = excess > _DISTURBED * robust_deviation(sums)
    worst = np.argsort(-excess, kind="stable")[: int(_MAX_DROPPED * blocks)]
    for block in worst[slow[worst]]:
        kept[block * _PAIRS_PER_BLOCK : (block + 1) * _PAIRS_PER_BLOCK] = False
    return kept


def hodges_lehmann(values: Floats) -> float:
    """Returns the median of the means of all pairs of values, each with itself too.

    Hodges and Lehmann, Ann. Math. Stat. 34 (1963): the estimate that belongs to the signed-rank
    test. Of normal values it has 95 % of the efficiency of the mean, and a few wild values hardly
    move it.
    """
    first, second = np.triu_indices(len(values))
    return float(np.median((values[first] + values[second]) / 2.0))


def jackknife_error(values: Floats, group: NDArray[np.int64]) -> float:
    """Returns the standard error of `hodges_lehmann`, groups left out one at a time.

    s² = (G - 1) / G * Σ (h_g - mean h)², h_g without group g (Tukey 1958; Efron and Tibshirani, An
    Introduction to the Bootstrap, 1993, chapter 11).
    """
    names = np.unique(group)
    without = np.array([hodges_lehmann(values[group != name]) for name in names])
    return math.sqrt((len(names) - 1) / len(names) * float(((without - without.mean()) ** 2).sum()))


def robust_deviation(values: Floats) -> float:
    """Returns 1.4826 times the median absolute deviation from the median."""
    return _MAD_TO_SD * float(np.median(np.abs(values - np.median(values))))


@functools.cache
def student_quantile(probability: float, freedom: int) -> float:
    """Returns the quantile of Student's t for a probability above 0.5.

    Its distribution function is 1/2 + c * ∫ cos^(freedom - 1) from 0 to atan(t / sqrt(freedom)),
    c = Γ((freedom + 1) / 2) / (sqrt(π) Γ(freedom / 2)); tabulated and inverted.
    """
    angle = np.linspace(0.0, math.pi / 2.0, 20_001)
    height = np.cos(angle) ** (freedom - 1)
    area = np.concatenate(([0.0], np.cumsum((height[1:] + height[:-1]) / 2.0))) * angle[1]
    log_scale = math.lgamma((freedom + 1) / 2.0) - math.lgamma(freedom / 2.0)
    scale = math.exp(log_scale) / math.sqrt(math.pi)
    found = float(np.interp((probability - 0.5) / scale, area, angle))
    return math.sqrt(freedom) * math.tan(found)


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


class Worker:
    """A side in a process of its own, which takes steps on demand.

    The process says "ready", then answers each line with a number of steps with the JSON list of
    their seconds (per unit of work). It ends when its standard input does.

    Args:
        name: of the side, for errors.
        command: that starts the process.
        folder: working directory; default the current one.
        limit_s: for setting up, and for each answer.
    """

    cause = effect = ""
    options: Mapping[str, Any] = {}

    def __init__(
        self, name: str, command: Sequence[str], folder: Path | None = None, limit_s: float = 120.0
    ) -> None:
        self.name, self.command, self._folder = name, list(command), folder
        self._limit_s, self._step_s = limit_s, 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process; `ready` waits for it."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
                cwd=self._folder, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._errors.close()
            raise CommandError(f"{self.name} cannot be started: {error}") from None

    def ready(self) -> None:
        """Waits until the process has set up its work.

        Raises:
            CommandError: it failed, or took too long.
        """
        if self._process is None:
            self.start()
        if (word := self._ask("")) != "ready":
            raise CommandError(f"{self.name} answered {word[:40]!r}, expected 'ready'")

    def run(self, steps: int) -> list[float]:
        """Returns the seconds of so many steps.

        Raises:
            CommandError: the process ended, took too long, or took no step that counts.
        """
        began = time.perf_counter()
        found: list[float] = json.loads(self._ask(f"{steps}\n"))
        self._step_s = (time.perf_counter() - began) / steps
        if not found:
            raise CommandError(f"{self.name}: no step had a finite loss")
        return found

    def warm_up(self) -> None:
        self.ready()
        self.run(_MIN_STEPS)
        self.run(_MIN_STEPS)

    def turn(self, seconds: float) -> float:
        """Returns the mean seconds of the settled steps of a turn."""
        count = max(_MIN_STEPS, round(seconds / max(self._step_s, 1e-6)))
        return statistics.fmean(settled(self.run(count)))

    def close(self) -> None:
        """Ends the process: by the end of its input, after a few seconds by a signal."""
        if self._process is None:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()
        self._process = None

    def _ask(self, line: str) -> str:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(self._limit_s, process.kill)
        timer.daemon = True
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(line.encode())
                process.stdin.flush()
            answer = process.stdout.readline().decode().strip()
        finally:
            timer.cancel()
        if answer:
            return answer
        status = process.wait()
        self._errors.seek(0)
        said = self._errors.read()[-_TAIL_BYTES:].decode(errors="replace").split("\n")
        lines = [text.rstrip() for text in said if text.strip()][-_TAIL_LINES:]
        what = f"was killed by signal {-status}" if status < 0 else f"failed with status {status}"
        raise CommandError(f"{self.name} {what}: {' '.join(self.command)}", *lines)
