"""How long a training step takes: the fastest of a few; on a GPU, of a few turns of steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from fastlstm.training.task import Loader
    from fastlstm.training.trainer import Trainer

StepT = TypeVar("StepT")
TIMED_S, MIN_TIMED = 0.2, 3
"""Seconds of the steps that are timed, and the fewest of them."""
LONG_STEP_S = 1.0
"""The first step of a model is a little slower than others; one this long is the only one timed."""
_MAX_TIMED = 8
_TURN_S, _TURNS = 0.015, 3
"""Of a GPU: steps of so many seconds are timed together, so often; the fastest turn counts."""
_MAX_OF_TURN = 64
_MADE_AHEAD = 5
"""One more than the batches that a loader makes ahead."""
_WAITED_S = 0.02
"""A batch that is there takes less, even on a busy machine."""


def fastest_step_s(trainer: Trainer) -> float:
    """Returns the seconds of the fastest of a few steps, with loader and optimizer, of a model to
    throw away; its loader is closed."""
    loader, seconds = trainer.task.loader, list[float]()
    trainer.task.model.train()
    with closing(loader):
        first_s = _seconds(lambda: trainer.step(loader.next(), 0.0))
        if first_s >= LONG_STEP_S and trainer.plan.device.type == "cpu":
            seconds.append(first_s)
        if trainer.plan.device.type == "cuda":  # the first one has compiled and recorded
            try:
                return _fastest_turn_s(trainer)
            finally:
                trainer.stepper.drop_graphs()
        until = time.perf_counter() + TIMED_S
        while first_s < LONG_STEP_S and len(seconds) < _MAX_TIMED:
            seconds.append(_seconds(lambda: trainer.step(loader.next(), 0.0)))
            if len(seconds) >= MIN_TIMED and time.perf_counter() > until:
                break
    return min(seconds)


def _fastest_turn_s(trainer: Trainer) -> float:
    """Returns the seconds of a step of a GPU, which computes one while the next is prepared."""
    step_s = steps_in_turn_s(trainer, 2) / 2
    num = max(1, min(_MAX_OF_TURN, round(_TURN_S / max(step_s, 1e-6))))
    if step_s >= LONG_STEP_S:
        return step_s
    return min(steps_in_turn_s(trainer, num) / num for _ in range(_TURNS))


def steps_in_turn_s(trainer: Trainer, num: int) -> float:
    """Returns the seconds of `num` steps that follow each other as in a run, of a model to
    throw away that has taken a step."""
    stepper, loader = trainer.stepper, trainer.task.loader

    def take() -> None:
        num_launched = 0
        for _ in range(num):
            batch = loader.next()
            if stepper.launch(batch, 0.0, 0.0):
                num_launched += 1
                if num_launched > 1:
                    stepper.result()
            else:
                trainer.step(batch, 0.0)
        while stepper.result() is not None:
            pass

    return _seconds(take)


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def use_up_batches(loader: Loader) -> None:
    """Takes the batches that a loader made ahead, up to the first one that it has to be waited for.

    Steps that are timed after a pause would else find batches that were made within it, and a run
    that waits for its loader would seem faster than it is.
    """
    for _ in range(_MADE_AHEAD):
        before_s = loader.wait_s
        loader.next()
        if loader.wait_s - before_s > _WAITED_S:
            break


def settled(steps: Sequence[StepT]) -> Sequence[StepT]:
    """Returns the steps of a turn without its first quarter.

    Threads that slept while others computed take some steps to share the cores again.
    """
    return steps[(len(steps) + 1) // 4 :]


def ignore(*_: object) -> None:
    """Takes events and weights of steps that are only timed."""
