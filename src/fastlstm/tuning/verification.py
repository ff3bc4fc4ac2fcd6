"""What a training command gains over another one, by running both."""

from __future__ import annotations

import itertools
import random
import time
from contextlib import closing
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from fastlstm.system import environment, hardware
from fastlstm.tuning.ab import Pair, TrainingSteps
from fastlstm.tuning.command import parse_command
from fastlstm.tuning.process import stop_all
from fastlstm.tuning.variants import SAME_QUALITY
from fastlstm.tuning.verdicts import Verdict, gains_of, is_known, ranked

if TYPE_CHECKING:
    from fastlstm.tuning.profile import Profile

WITHOUT_ISA = "env -u FASTLSTM_ISA "
"""Goes before a command that may use every instruction set."""
_BLOCKS = (3, 12)
"""At least and at most, with one pair of workers."""
_LIMIT_S = 120.0
_MEASURED_S = 8.0


def measured_gain(a: str, b: str, step_share: float = 1.0, seconds: float = _MEASURED_S) -> float:
    """Returns the gain of a whole run by training command `b` over `a`, by running both in turns.

    A turn's time is that of its mean step, which makes up the time of a run.

    Args:
        a: the command as it is.
        b: the changed one.
        step_share: of the run's time, what the steps of `a` take.
        seconds: after which no more turns are taken than an interval needs; fewer are where the
            gain is known well enough.

    Raises:
        CommandError: a command failed.
    """
    commands = parse_command("A", a), parse_command("B", b)
    source, pairs = TrainingSteps(commands, _LIMIT_S, fmean, _BLOCKS[1]), list[Pair]()
    began, gain = time.perf_counter(), 0.0
    try:
        with closing(source.blocks(random.Random(0), began + _LIMIT_S)) as blocks:
            for number, block in enumerate(itertools.islice(blocks, _BLOCKS[1]), 1):
                pairs += block
                times = [pair.a for pair in pairs], [pair.b for pair in pairs]
                _, (gain, low, high) = gains_of(*times, step_share)
                is_late = time.perf_counter() > began + seconds
                if number >= _BLOCKS[0] and (is_late or is_known(low, high)):
                    break
    finally:
        stop_all()
    return gain


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
    gain = measured_gain(command, WITHOUT_ISA + command)
    found = Verdict(
        "instruction set", max(0.0, 1.0 - 1.0 / (1.0 + gain)), gain, gain, gain, SAME_QUALITY,
        evidence=f"FASTLSTM_ISA is {forced}, this CPU has {widest}",
        is_in_steps=False, command_prefix=WITHOUT_ISA,
    )  # fmt: skip
    return replace(profile, verdicts=tuple(ranked([*profile.verdicts, found])))
