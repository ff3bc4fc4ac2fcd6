"""The time of a training step: the fastest of a few steps or, on a GPU, of a few series."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastlstm.training.task import Loader
    from fastlstm.training.trainer import Trainer

TIMED_S, MIN_TIMED = 0.2, 3
"""Least seconds and number of the timed steps."""
LONG_STEP_S = 1.0
"""A step this long is the last one that is timed."""
_MAX_TIMED = 8
_TURN_S, _TURNS = 0.015, 3
"""On a GPU: seconds and number of series; the fastest counts."""
_MAX_OF_TURN = 64
_MADE_AHEAD = 5
"""One more than the batches that a loader prepares."""
_WAITED_S = 0.02
"""More than a prepared batch takes, even on a busy machine."""


def fastest_step_s(trainer: Trainer, slowdowns: list[float] | None = None) -> float:
    """Returns the seconds of the fastest step, with loader and optimizer; closes the loader and
    changes the model.

    On a CPU it is the CPU time of the calling thread, which has a share of all work: the seconds of
    a step on a quiet machine. Beside two busy processes on two cores steps of 55 ms took 120 to
    240 ms, and 53 to 56 ms of this time. `slowdowns` receives the ratio of both for every step.
    """
    loader, seconds = trainer.task.loader, list[float]()
    trainer.task.model.train()
    with closing(loader):
        trainer.step(loader.next(), 0.0)  # loads libraries; its threads wait busily beside others
        if trainer.plan.device.type == "cuda":  # the first step has compiled and recorded
            try:
                return _fastest_turn_s(trainer)
            finally:
                trainer.stepper.drop_graphs()
        until = time.perf_counter() + TIMED_S
        while len(seconds) < _MAX_TIMED:
            wall_s, own_s = _seconds(lambda: trainer.step(loader.next(), 0.0))
            seconds.append(own_s)
            if slowdowns is not None:
                slowdowns.append(max(1.0, wall_s / own_s))
            is_enough = len(seconds) >= MIN_TIMED or wall_s >= LONG_STEP_S
            if is_enough and time.perf_counter() > until:
                break
    return min(seconds)


def _fastest_turn_s(trainer: Trainer) -> float:
    """Returns the seconds of a step on a GPU, which overlaps with the preparation of the next."""
    step_s = steps_in_turn_s(trainer, 2) / 2
    num = max(1, min(_MAX_OF_TURN, round(_TURN_S / max(step_s, 1e-6))))
    if step_s >= LONG_STEP_S:
        return step_s
    return min(steps_in_turn_s(trainer, num) / num for _ in range(_TURNS))


def steps_in_turn_s(trainer: Trainer, num: int) -> float:
    """Returns the seconds of `num` consecutive steps, after a first one; changes the model."""
    stepper, began, num_launched = trainer.stepper, time.perf_counter(), 0
    for _ in range(num):
        batch = trainer.task.loader.next()
        if stepper.launch(batch, 0.0, 0.0):
            num_launched += 1
            if num_launched > 1:
                stepper.result()
        else:
            trainer.step(batch, 0.0)
    while stepper.result() is not None:
        pass
    return time.perf_counter() - began


def _seconds(call: Callable[[], object]) -> tuple[float, float]:
    """Returns the wall-clock time of a call and the CPU time of this thread."""
    began, own_s = time.perf_counter(), time.thread_time()
    call()
    return time.perf_counter() - began, time.thread_time() - own_s


def use_up_batches(loader: Loader) -> None:
    """Takes the prepared batches of a loader: they would hide its time from steps timed after a
    pause."""
    for _ in range(_MADE_AHEAD):
        before_s = loader.wait_s
        loader.next()
        if loader.wait_s - before_s > _WAITED_S:
            break
