"""A training run whose steps are taken on demand, for a process that measures them."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, TextIO

from fastlstm.training.callbacks import Callback
from fastlstm.training.step_time import use_up_batches

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer


class StepServer(Callback):
    """Takes the place of the training loop: the run is set up and its steps are asked for.

    It says "ready" with the unit of the task, and answers each line with a number of steps with the
    seconds and units of each step. The steps are those of the loop, with the wait for the loader;
    evaluations and checkpoints are left out. When there are no more requests the process ends at
    once: nothing of such a run is kept.

    Args:
        requests: numbers of steps, one a line.
        answers: gets one line each.
    """

    def __init__(self, requests: TextIO, answers: TextIO) -> None:
        self._requests, self._answers = requests, answers

    def on_begin(self, trainer: Trainer) -> None:
        self._answer(f"ready {trainer.task.unit}")
        for line in self._requests:
            self._answer(json.dumps(_timed_steps(trainer, int(line))))
        os._exit(0)

    def _answer(self, line: str) -> None:
        self._answers.write(line + "\n")
        self._answers.flush()


def _timed_steps(trainer: Trainer, count: int) -> dict[str, list[float] | list[int]]:
    use_up_batches(trainer.task.loader)
    seconds, units = list[float](), list[int]()
    for _ in range(count):
        before, started = trainer.progress.tokens, time.perf_counter()
        trainer.take_step()
        seconds.append(time.perf_counter() - started)
        units.append(trainer.progress.tokens - before)
    return {"seconds": seconds, "units": units}
