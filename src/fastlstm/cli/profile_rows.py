"""The lines that `fastlstm profile` prints of a training run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fastlstm.report.lines import labelled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastlstm.report.lines import Row
    from fastlstm.tuning.op_times import OpTime
    from fastlstm.tuning.profile import Profile
    from fastlstm.tuning.verdicts import Verdict

_NUM_OPS = 14
_UNDECIDED = (
    "undecided: a change may gain more than 5 %; "
    "give a longer --measure, or repeat on an idle machine"
)
_UNKNOWN = "but it changes learning, and what the run ends at is not known: tune finds out"
_MIN_OTHERS = 0.1


def rows(profile: Profile, commands: Mapping[str, str], verified: float | None) -> list[Row]:
    """Returns the lines of a profile.

    Args:
        profile: what was found.
        commands: by cause of the recommended verdicts.
        verified: the gain that running the first command showed, or None.
    """
    shares = sorted(profile.phases.items(), key=lambda item: -item[1])
    ceiling = profile.ceiling_share
    of_ceiling = "" if ceiling is None else f", {100 * ceiling:.0f} % of the ceiling"
    found: list[Row] = [
        ("speed", f"{profile.units_per_s:,.0f} {profile.unit}/s in steps{of_ceiling}"),
        *([("ceiling", profile.ceiling_how)] if of_ceiling and profile.ceiling_how else []),
        *labelled("kernels", list(profile.kernels)),
        ("time", " · ".join(f"{n.replace('_', ' ')} {100 * s:.0f} %" for n, s in shares)),
    ]
    if not profile.recommended:
        found.append(("verdict", _nothing_sure(profile) + of_ceiling))
    for place, verdict in enumerate(profile.recommended):
        found.append((f"{place + 1}. {verdict.cause}", f"{gain_text(verdict)}; {verdict.effect}"))
        found.append(("", verdict.evidence))
        if place == 0 and verified is not None:
            found.append(("", f"verified by running it: {100 * verified:+.0f} %"))
        if verdict.cause in commands:
            found.append(("", commands[verdict.cause]))
    for place, verdict in enumerate(profile.to_try, len(profile.recommended) + 1):
        found.append((f"{place}. {verdict.cause}", f"{gain_text(verdict)}, {_UNKNOWN}"))
        found.append(("", f"{100 * verdict.share:.0f} % of the time; {verdict.evidence}"))
        found.append(("", commands[verdict.cause]))
    found += [("not advised", _not_advised(v)) for v in profile.verdicts if v.is_mentioned]
    found += [("not timed", text) for text in profile.not_timed]
    found += _op_rows(profile.ops)
    return found + noise_rows(profile.others)


def noise_rows(others: float | None) -> list[Row]:
    """Returns a line where other processes used more than a tenth of the cores.

    Args:
        others: the share that they used, 0..1, or None.
    """
    if others is None or others <= _MIN_OTHERS:
        return []
    text = f"other processes used {100 * others:.0f} % of the cores; repeat on an idle machine"
    return [("noise", text)]


def gain_text(verdict: Verdict) -> str:
    """Returns "+45 % speed (41 to 49 %)", and of what changes learning the time to the quality."""
    text = f"{100 * verdict.gain:+.0f} % speed"
    if verdict.low == verdict.high:
        text = "" if verdict.quality_gain is not None else f"{text}, by accounting"
    elif not math.isfinite(verdict.high):
        text = f"{text} (no interval)"
    else:
        text = f"{text} ({100 * verdict.low:.0f} to {100 * verdict.high:.0f} %)"
    if verdict.quality_gain is None or verdict.quality_gain == verdict.gain:
        return text
    sooner = f"the same quality {100 * verdict.quality_gain:+.0f} % sooner"
    return f"{text}, {sooner}" if text else sooner


def _nothing_sure(profile: Profile) -> str:
    if profile.to_try:
        return "no change is a sure gain"
    return _UNDECIDED if profile.is_undecided else "nothing above 5 %: this run is healthy"


def _not_advised(verdict: Verdict) -> str:
    if verdict.is_undecided:
        reason = "its threads waited for cores that other processes had"
        reason = reason if verdict.is_held_back else "too unsure for a verdict"
        return f"{verdict.cause}: {gain_text(verdict)}, {reason}"
    text = f"{verdict.cause}: {100 * verdict.gain:+.0f} % speed, "
    if verdict.quality_low is not None:
        return f"{text}but the run is not expected to reach the same quality sooner"
    return f"{text}but it changes learning, and what the run ends at is not known"


def _op_rows(ops: tuple[OpTime, ...]) -> list[Row]:
    """Returns one line for each of the longest operations of a step."""
    width = max((len(op.name) for op in ops[:_NUM_OPS]), default=0)
    found: list[Row] = []
    for op in ops[:_NUM_OPS]:
        text = f"{op.name:<{width}} {1e3 * op.seconds:8.2f} ms {100 * op.share:5.1f} %"
        text += f" {op.calls:6.1f} calls"
        found.append(("" if found else "a step", text))
    return found
