"""Statistics of paired times: a ratio with an interval, and a verdict that may be "undecided".

Two sides, A and B, take turns in blocks of four, ABBA or BAAB. Each half of a block is a pair: a
time of A beside a time of B. Whatever disturbs the machine for longer than a block slows both sides
of a pair, and what drifts linearly during a block cancels in the mean of its two pairs. All
formulas work on d = log(time of B / time of A). Pairs of one group share processes, so that groups,
not pairs, are independent of each other. Pure numpy; no clocks and no processes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LOOKS = (12, 24, 48, 96, 192)
"""Numbers of pairs after which the verdict is looked at; the last one ends the measurement."""
LOOK_ERROR = 0.0129
"""Two-sided error of one look. With it the intervals of all five looks hold the true ratio together
in 95 % of measurements: Pocock's bound (Biometrika 64, 1977) for looks whose numbers double, whose
correlations are 2 ** (-|i - j| / 2). Simulated; campaigns/ab_alarms.py repeats it."""
MIN_GROUPS = 3
"""Fewer groups give no verdict."""
MIN_PAIRS = 6
"""Fewer pairs give no verdict."""
PAIRS_PER_BLOCK = 2
_DISTURBED = 3.5
"""Iglewicz and Hoaglin (1993) call a value an outlier from 3.5 robust deviations on."""
_MAX_DROPPED = 0.25
_MAD_TO_SD = 1.4826
"""1 / 0.6745: the median absolute deviation of a normal variable in standard deviations."""


class Verdict(StrEnum):
    """What a measurement shows."""

    SLOWER = "slower"
    NOT_SLOWER = "not slower"
    UNDECIDED = "undecided"


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


def verdict(found: Estimate, detect: float) -> Verdict:
    """Returns what an estimate shows.

    "Not slower" means: not slower by more than `detect`, the interval ends below 1 + detect (one
    side of the two one-sided tests of Schuirmann, J. Pharmacokinet. Biopharm. 15, 1987). "Slower"
    means: the interval begins above 1. Where both hold B is slower by less than `detect`, and the
    verdict is "not slower".

    Args:
        found: the estimate.
        detect: the smallest slowdown that matters, as a share: 0.03 is 3 %.
    """
    if found.high < 1.0 + detect:
        return Verdict.NOT_SLOWER
    return Verdict.SLOWER if found.low > 1.0 else Verdict.UNDECIDED


def pairs_needed(found: Estimate, detect: float) -> int | None:
    """Returns about how many pairs a verdict needs if ratio and noise stay as they are.

    The interval must become so short that it fits between the estimate and 1, or between it and
    1 + detect, whichever is further; its length falls with the root of the number of pairs.

    Returns:
        The number, a multiple of 12; None where there is no interval yet.
    """
    if not math.isfinite(found.high) or found.low <= 0.0:
        return None
    half, middle = math.log(found.high / found.low) / 2.0, math.log(found.ratio)
    room = max(abs(middle) if middle > 0 else 0.0, math.log1p(detect) - middle)
    return max(LOOKS[0], LOOKS[0] * math.ceil(found.pairs * (half / room) ** 2 / LOOKS[0]))


def undisturbed(a: Floats, b: Floats) -> NDArray[np.bool_]:
    """Returns which pairs to keep: all but those of blocks in which everything was slow.

    A block is judged by the sum of the logarithms of its four times, which is the same with the
    sides exchanged, so the rule cannot see which side was disturbed. It goes, with both sides, when
    the sum is more than 3.5 robust deviations above the median; at most a quarter of the blocks.

    Args:
        a: times of A, `(pairs,)`.
        b: times of B.
    """
    blocks = len(a) // PAIRS_PER_BLOCK
    kept = np.ones(len(a), dtype=np.bool_)
    if blocks < 4:
        return kept
    sums = np.log(a * b)[: blocks * PAIRS_PER_BLOCK].reshape(blocks, PAIRS_PER_BLOCK).sum(axis=1)
    excess = sums - np.median(sums)
    slow = excess > _DISTURBED * robust_deviation(sums)
    worst = np.argsort(-excess, kind="stable")[: int(_MAX_DROPPED * blocks)]
    for block in worst[slow[worst]]:
        kept[block * PAIRS_PER_BLOCK : (block + 1) * PAIRS_PER_BLOCK] = False
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
