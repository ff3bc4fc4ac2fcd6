"""What a training command gains over another one, by running both."""

from __future__ import annotations

import itertools
import random
import time
from contextlib import closing
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from fastlstm.errors import FastLSTMError
from fastlstm.system import environment, hardware
from fastlstm.tuning.ab import TrainingSteps
from fastlstm.tuning.command import parse_command
from fastlstm.tuning.process import stop_all
from fastlstm.tuning.variants import SAME_QUALITY
from fastlstm.tuning.verdicts import Verdict, gains_of, is_known, of_pairs, ranked

if TYPE_CHECKING:
    from fastlstm.tuning.profile import Profile

WITHOUT_ISA = "env -u FASTLSTM_ISA "
"""Goes before a command that may use every instruction set."""
_FEW_BLOCKS, _BLOCKS, _MAX_BLOCKS = 2, 3, 12
"""At least for a gain, for one with an interval, and at most, with one pair of workers."""
_LIMIT_S = 120.0
_MEASURED_S = 8.0


def measured_gain(a: str, b: str, step_share: float = 1.0, seconds: float = _MEASURED_S) -> float:
    """Returns the gain of a whole run by training command `b` over `a`.

    Args:
        a: the command as it is.
        b: the changed one.
        step_share: of the run's time, what the steps of `a` take.
        seconds: see `measured_times`.

    Raises:
        CommandError: a command failed.
    """
    times = measured_times(a, b, step_share, seconds, _FEW_BLOCKS)
    _, (gain, _, _) = gains_of(*times, step_share)
    return gain


def measured_times(
    a: str, b: str, step_share: float, seconds: float = _MEASURED_S, least: int = _BLOCKS
) -> tuple[list[float], list[float]]:
    """Returns the seconds per unit of the steps of two training commands, which run in turns.

    A turn's time is that of its mean step, which makes up the time of a run.

    Args:
        a: the command as it is.
        b: the changed one.
        step_share: of the run's time, what the steps of `a` take.
        seconds: after which no more turns are taken; they end sooner where the gain is known.
        least: blocks of two pairs that are taken in any case.

    Raises:
        CommandError: a command failed.
    """
    commands = parse_command("A", a), parse_command("B", b)
    source = TrainingSteps(commands, _LIMIT_S, fmean, _MAX_BLOCKS)
    times, began = (list[float](), list[float]()), time.perf_counter()
    try:
        with closing(source.blocks(random.Random(0), began + _LIMIT_S)) as blocks:
            for number, block in enumerate(itertools.islice(blocks, _MAX_BLOCKS), 1):
                times[0].extend(pair.a / 1e3 for pair in block)
                times[1].extend(pair.b / 1e3 for pair in block)
                _, (_, low, high) = gains_of(*times, step_share)
                is_late = time.perf_counter() > began + seconds
                if number >= least and (is_late or is_known(low, high)):
                    break
    finally:
        stop_all()
    return times


def with_instruction_set(profile: Profile, command: str) -> Profile:
    """Returns a profile with the verdict on FASTLSTM_ISA, where that keeps the kernels from the
    instructions of this CPU; it is measured by running the command with and without.

    Args:
        profile: of the run.
        command: that trains it.
    """
    forced, widest = environment.forced_isa(), hardware.widest_isa()
    if forced is None or forced == widest:
        return profile
    try:
        times = measured_times(command, WITHOUT_ISA + command, profile.step_share)
    except FastLSTMError as error:  # such as of a text from standard input, which is used up
        why = f"instruction set: {error.lines()[0]}"
        return replace(profile, not_timed=(*profile.not_timed, why))
    cause = Verdict("instruction set", 0.0, 0.0, 0.0, 0.0, SAME_QUALITY)
    found = of_pairs(cause, *times, profile.unit, profile.step_share)
    evidence = f"FASTLSTM_ISA is {forced}, this CPU has {widest}; {found.evidence}"
    found = replace(found, evidence=evidence, command_prefix=WITHOUT_ISA)
    return replace(profile, verdicts=tuple(ranked([*profile.verdicts, found])))
