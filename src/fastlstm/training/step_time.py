"""How long a training step takes: the fastest of a few."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer

TIMED_S, MIN_TIMED = 0.2, 3
"""Seconds of the steps that are timed, and the fewest of them."""
LONG_STEP_S = 1.0
"""The first step of a model is a little slower than others; one this long is the only one timed."""
_MAX_TIMED = 8


def fastest_step_s(trainer: Trainer) -> float:
    """Returns the seconds of the fastest of a few steps, with loader and optimizer.

    Args:
        trainer: of a model to throw away; its loader is closed.
    """
    loader, seconds = trainer.task.loader, list[float]()
    trainer.task.model.train()
    with closing(loader):
        first_s = _seconds(lambda: trainer.step(loader.next(), 0.0))
        if first_s >= LONG_STEP_S:
            seconds.append(first_s)
        until = time.perf_counter() + TIMED_S
        while first_s < LONG_STEP_S and len(seconds) < _MAX_TIMED:
            seconds.append(_seconds(lambda: trainer.step(loader.next(), 0.0)))
            if len(seconds) >= MIN_TIMED and time.perf_counter() > until:
                break
    return min(seconds)


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def ignore(*_: object) -> None:
    """Takes events and weights of steps that are only timed."""
