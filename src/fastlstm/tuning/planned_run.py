"""Runs whose files are thrown away: one that is only set up, and a short one that is trained."""

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
    from fastlstm.runs.events import Event
    from fastlstm.training.trainer import Trainer

_Start = Callable[..., object] | None


@dataclass(frozen=True)
class PlannedRun:
    """A run that was set up: its options with every choice made, its start event, and the steps of
    an epoch."""

    options: Any
    start: Event
    steps_per_epoch: int


def plan_run(
    source: Any, config: Any, given: Collection[str],
    look: Callable[[Trainer], None] = lambda _: None, start: _Start = None,
) -> PlannedRun:  # fmt: skip
    """Sets a run up as `train` does, calls `look` with the trainer, and ends it before its first
    step. `start` is `train`, `train_forecaster` (the default by `config`), or a function like them.
    Raises what `train` does, and KeyboardInterrupt.
    """
    planner = _Planner(look)
    events = _events(source, config, given, start, [planner])
    return PlannedRun(planner.options, events["start"], planner.steps_per_epoch)


def end_of_run(source: Any, config: Any, given: Collection[str], start: _Start = None) -> Event:
    """Trains a run and returns its end event; the arguments are those of `plan_run`. Raises
    Stopped: SIGTERM or Ctrl-C."""
    try:
        return _events(source, config, given, start)["end"]
    except Stopped:  # its message names a checkpoint, which is removed
        raise Stopped("stopped: an unfinished short run gives no result") from None


def _events(
    source: Any, config: Any, given: Collection[str], start: _Start,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Event]:  # fmt: skip
    """Trains a run in a temporary directory; returns its last event of each kind."""
    events: dict[str, Event] = {}
    if start is None:
        is_table = isinstance(config, ForecastConfig)
        start = train_forecaster if is_table else partial(train, as_text=True)
    prefix = "fastlstm-short-"
    with suppress(_Planned), tempfile.TemporaryDirectory(prefix=prefix) as folder:
        start(
            source, out=Path(folder, "run"), config=config, given=given, callbacks=callbacks,
            observers=[lambda event: events.update({event["event"]: event})],
        )  # fmt: skip
    return events


def chosen_sizes(given: Any, used: Any) -> dict[str, Any]:
    """Returns the sizes that a budget chose, for a command that trains the same model; `given` is
    the configuration of the user, `used` is the configuration of the run."""
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
    """Ends a run before its first step."""


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
        raise _Planned
