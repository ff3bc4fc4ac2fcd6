"""Successive halving over complete short runs of settings that differ from a default.

The first rung tries the default and changes of it, the most promising first. The second one tries
the best, alone, with the others that gained, and with other learning rates; the third the two best
of these beside the default. Each has fewer and longer runs. Runs are compared by what the whole run
is expected to end at, so that a large model is not dropped for starting slowly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Changes = Mapping[str, Any]
"""Value by axis, of the axes that differ from the default."""
MIN_TRIAL_S = 10.0
_MIN_SHARE = 1 / 12
"""Of the budget: shorter runs say too little about the whole one (docs/predict.md)."""
_NUM_RUNGS = 3
_SECOND, _SECOND_ALONE, _LAST = 5, 7, 3
"""Runs of the second rung, the same where no other learning rates are tried, of the third rung."""
MIN_RUNS = 3
_WORTH_MERGING = 0.005
"""Share of the bits/char that a change must gain to be tried together with others."""
CLEAR_GAIN = 0.002
"""Share of the bits/char that changes must gain in the end to be taken over the default."""


def least_time_s(budget_s: float) -> float:
    """Returns the seconds that the shortest search takes."""
    return _NUM_RUNGS * MIN_RUNS * _least_trial_s(budget_s)


def _least_trial_s(budget_s: float) -> float:
    return min(max(MIN_TRIAL_S, _MIN_SHARE * budget_s), budget_s)


def search(
    changes: Sequence[Changes],
    rates: Sequence[Changes],
    time_s: float,
    budget_s: float,
    run: Callable[[Changes, float], float],
) -> tuple[Changes, float, float]:
    """Returns the best changes of the default with what they and the default are expected to reach.

    Args:
        changes: of the default, the most promising first; what does not fit is left out.
        rates: changes that are tried with the two best of the others only, if there are any.
        time_s: for all runs; each rung gets a third of it.
        budget_s: of the whole run: no short run is longer.
        run: trains with some changes for so many seconds and returns the bits/char expected of the
            whole run; infinite where the run failed. A run that it knows costs nothing.
    """
    rung_s = time_s / _NUM_RUNGS
    most = int(rung_s / _least_trial_s(budget_s))
    candidates: list[Changes] = [{}, *(changes or rates)][: max(MIN_RUNS, most)]
    found = _rung(candidates, rung_s, budget_s, run)
    second = _SECOND if rates else _SECOND_ALONE
    candidates = _combined(found, rates)[: max(MIN_RUNS, min(second, most))]
    found = _rung(candidates, rung_s, budget_s, run)
    ranked = [changes for changes, _ in sorted(found, key=lambda pair: pair[1]) if changes]
    found = _rung([{}, *ranked[: _LAST - 1]], rung_s, budget_s, run)
    default = found[0][1]
    best, bits = min(found, key=lambda pair: pair[1])
    return (best, bits, default) if bits < (1.0 - CLEAR_GAIN) * default else ({}, default, default)


def _rung(
    candidates: list[Changes], rung_s: float, budget_s: float,
    run: Callable[[Changes, float], float],
) -> list[tuple[Changes, float]]:  # fmt: skip
    """Returns candidates with what each is expected to reach."""
    seconds = min(rung_s / len(candidates), budget_s)
    return [(changes, run(changes, seconds)) for changes in candidates]


def _combined(found: list[tuple[Changes, float]], rates: Sequence[Changes]) -> list[Changes]:
    """Returns what to try next: the best, the changes that gained together, the second best, both
    with other learning rates, and the best with each of the others."""
    default = found[0][1]
    ranked = [changes for changes, _ in sorted(found, key=lambda pair: pair[1])]
    gained = [c for c, bits in found if bits < (1.0 - _WORTH_MERGING) * default]
    gained.sort(key=ranked.index)
    best = ranked[0]
    candidates: list[Changes] = []
    for together in (
        best, _merged(gained), _merged(gained[:2]), *(ranked[1:2] if rates else ()),
        *(_merged([changes, rate]) for rate in rates for changes in ranked[:2]),
        *(_merged([best, other]) for other in ranked[1:]),
    ):  # fmt: skip
        if together not in candidates:
            candidates.append(together)
    return candidates


def _merged(gained: Sequence[Changes]) -> Changes:
    """Returns changes in one; of two on one axis, only the first."""
    together: dict[str, Any] = {}
    for changes in gained:
        if not together.keys() & changes.keys():
            together |= changes
    return together
