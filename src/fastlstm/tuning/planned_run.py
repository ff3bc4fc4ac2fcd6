"""Runs of which nothing is kept: one that is only set up, and a short one that is trained."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.errors import BudgetError, Stopped
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.train import train_forecaster
from fastlstm.system import hardware
from fastlstm.text.train import train
from fastlstm.training.callbacks import Callback
from fastlstm.training.signals import ended_like_ctrl_c

if TYPE_CHECKING:
    from fastlstm.runs.events import Event, Observer
    from fastlstm.training.trainer import Trainer


@dataclass(frozen=True)
class PlannedRun:
    """A run as it would be: its options with everything chosen, the event that it begins with, and
    the steps of an epoch."""

    options: Any
    start: Event
    steps_per_epoch: int


def plan_run(
    source: Any, config: Any, given: Collection[str],
    look: Callable[[Trainer], None] = lambda _: None, start: Callable[..., object] | None = None,
) -> PlannedRun:  # fmt: skip
    """Sets a run up as `train` does, and returns what it found and chose.

    Args:
        source: as of `train`.
        config: the options of a text or a table.
        given: names of the options that were chosen.
        look: called with the trainer before the run is ended.
        start: trains it; default is `train`, or `train_forecaster`.

    Raises:
        UsageError: as `train`.
        KeyboardInterrupt: Ctrl-C, while it is set up or looked at.
    """
    planner = _Planner(look)
    events: list[Event] = []
    with suppress(_Planned):
        _run_in_passing(source, config, given, [events.append], start, [planner])
    return PlannedRun(planner.options, _first(events, "start"), planner.steps_per_epoch)


def end_of_run(
    source: Any, config: Any, given: Collection[str], observers: Sequence[Observer],
    start: Callable[..., object] | None = None,
) -> Event:  # fmt: skip
    """Trains a run of which nothing is kept, and returns the event that it ended with; arguments as
    of `plan_run`.

    Raises:
        Stopped: SIGTERM or Ctrl-C.
    """
    events: list[Event] = []
    try:
        _run_in_passing(source, config, given, [*observers, events.append], start)
    except Stopped:  # what it saved is gone
        raise Stopped("stopped: of a short run that was not finished nothing follows") from None
    return _first(events, "end")


def _run_in_passing(
    source: Any, config: Any, given: Collection[str], observers: Sequence[Observer],
    start: Callable[..., object] | None, callbacks: Sequence[Callback] = (),
) -> None:  # fmt: skip
    """Trains a run in a directory that is removed afterwards."""
    if start is None:
        is_table = isinstance(config, ForecastConfig)
        start = train_forecaster if is_table else partial(train, as_text=True)
    with tempfile.TemporaryDirectory(prefix="fastlstm-short-") as folder:
        start(
            source, out=Path(folder, "run"), config=config, given=given, observers=observers,
            callbacks=callbacks,
        )  # fmt: skip


def _first(events: Sequence[Event], kind: str) -> Event:
    return next(event for event in events if event["event"] == kind)


def chosen_sizes(given: Any, used: Any) -> dict[str, Any]:
    """Returns what a budget chose for the run, so that another command trains the same model, from
    the configuration that the user set and the one that the run has."""
    is_table = isinstance(given, ForecastConfig)
    names: tuple[str, ...] = ("hidden_size",)
    if not is_table:
        names = ("rnn_size", "num_layers", "embed_size", "batch_size", "optimizer", "seq_length")
    is_same = getattr(given, names[0]) == getattr(used, names[0])
    return {} if is_same else {name: getattr(used, name) for name in names}


def describe_machine() -> dict[str, object]:
    """Returns CPU, instruction set, cores and versions."""
    cpu = hardware.cpu()
    return {
        "cpu": cpu.model, "isa": cpu.isa, "cores": cpu.cores, "system": platform.platform(),
        "python": platform.python_version(), "torch": version("torch"),
        "fastlstm": version("fastlstm"),
    }  # fmt: skip


class _Planned(BudgetError):
    """Ends a run that was set up to be looked at."""


class _Planner(Callback):
    options: Any = None
    steps_per_epoch = 0

    def __init__(self, look: Callable[[Trainer], None]) -> None:
        self._look = look

    def on_begin(self, trainer: Trainer) -> None:
        self.options = trainer.plan.options
        self.steps_per_epoch = trainer.task.loader.steps_per_epoch
        try:
            with ended_like_ctrl_c(within_stop_flag=True):  # there is nothing to save
                if trainer.stop is not None and trainer.stop():
                    raise KeyboardInterrupt
                self._look(trainer)
        finally:
            trainer.task.loader.close()
        raise _Planned("planned")
