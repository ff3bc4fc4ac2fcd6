"""What a training command gains over another one, by running the steps of both in turns."""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, TextIO

from fastlstm.errors import FastLSTMError
from fastlstm.system import environment, hardware
from fastlstm.training.callbacks import Callback
from fastlstm.training.step_time import use_up_batches
from fastlstm.tuning.turns import Candidate, Timed, TurnWorker, time_until
from fastlstm.tuning.variants import SAME_QUALITY
from fastlstm.tuning.verdicts import Verdict, gains_of, is_known, of_pairs, ranked

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer
    from fastlstm.tuning.profile import Profile

_WITHOUT_ISA = ("env", "-u", "FASTLSTM_ISA")
"""Goes before a command that may use every instruction set."""
_MEASURED_S, _TURN_S = 8.0, 0.4


def measured_gain(a: Sequence[str], b: Sequence[str], step_share: float = 1.0) -> float:
    """Returns the gain of a whole run by training command `b` over `a`: words behind `fastlstm
    train`."""
    return gains_of(*measured_times(a, b, step_share), step_share)[0]


def measured_times(
    a: Sequence[str], b: Sequence[str], step_share: float, prefix: Sequence[str] = ()
) -> tuple[list[float], list[float]]:
    """Returns the seconds per unit of the steps of two training commands, the second one behind a
    prefix, which run in turns; of the run's time, steps take `step_share`.

    Raises:
        CommandError: a command failed.
    """

    def is_enough(timed: Timed) -> bool:
        _, low, high = gains_of(timed.base, timed.other, step_share)
        return is_known(low, high)

    with tempfile.TemporaryDirectory(prefix="fastlstm-profile-") as folder:
        base = TurnWorker("A", _worker_words(a, f"{folder}/a"))
        other = TurnWorker("B", [*prefix, *_worker_words(b, f"{folder}/b")])
        with closing(base), closing(other):
            base.start()
            other.start()
            base.warm_up()
            end, rng = time.perf_counter() + _MEASURED_S, random.Random(0)
            timed = time_until(base, Candidate(lambda: other), is_enough, end, rng, _TURN_S)
    return timed.base, timed.other


def _worker_words(words: Sequence[str], out: str) -> list[str]:
    """Returns the command of a training run that writes to `out`: the last `--out` counts."""
    place = words.index("--") if "--" in words else len(words)
    start = [sys.executable, "-m", "fastlstm.cli.step_worker"]
    return [*start, *words[:place], "--out", out, *words[place:]]


def with_instruction_set(profile: Profile, words: Sequence[str]) -> Profile:
    """Returns a profile with the verdict on FASTLSTM_ISA, where that keeps the kernels from the
    instructions of this CPU; it is measured by running the command of these words behind
    `fastlstm train` with and without."""
    forced, widest = environment.forced_isa(), hardware.widest_isa()
    if forced is None or forced == widest:
        return profile
    try:
        times = measured_times(words, words, profile.step_share, _WITHOUT_ISA)
    except FastLSTMError as error:  # such as of a text from standard input, which is used up
        why = f"instruction set: {error.lines()[0]}"
        return replace(profile, not_timed=(*profile.not_timed, why))
    cause = Verdict("instruction set", 0.0, 0.0, 0.0, 0.0, SAME_QUALITY)
    found = of_pairs(cause, *times, profile.unit, profile.step_share)
    evidence = f"FASTLSTM_ISA is {forced}, this CPU has {widest}; {found.evidence}"
    prefix = f"{' '.join(_WITHOUT_ISA)} "
    found = replace(found, evidence=evidence, command_prefix=prefix)
    return replace(profile, verdicts=tuple(ranked([*profile.verdicts, found])))


class StepServer(Callback):
    """The process of a `TurnWorker`: takes the place of the training loop, and steps on demand.

    The steps are the loop's, with the wait for the loader; evaluations and checkpoints are
    left out. Requests are numbers of steps, one a line; answers "ready", then one line each. When
    there are no more requests the process ends at once: nothing of the run is kept.
    """

    def __init__(self, requests: TextIO, answers: TextIO) -> None:
        self._requests, self._answers = requests, answers

    def on_begin(self, trainer: Trainer) -> None:
        self._answer("ready")
        for line in self._requests:
            self._answer(json.dumps(timed_steps(trainer, int(line))))
        os._exit(0)

    def _answer(self, line: str) -> None:
        self._answers.write(line + "\n")
        self._answers.flush()


def timed_steps(trainer: Trainer, count: int) -> list[float]:
    """Takes steps and returns the seconds per unit of each, without steps that were skipped."""
    use_up_batches(trainer.task.loader)
    seconds = list[float]()
    for _ in range(count):
        before, started = trainer.progress.tokens, time.perf_counter()
        trainer.take_step()
        units = trainer.progress.tokens - before
        if units:
            seconds.append((time.perf_counter() - started) / units)
    return seconds
