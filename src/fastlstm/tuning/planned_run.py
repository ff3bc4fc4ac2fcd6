"""What `train` would do, without training: a run is set up and ended before its first step."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.errors import BudgetError, Stopped
from fastlstm.forecast.config import ForecastConfig
from fastlstm.text.train import train
from fastlstm.training.callbacks import Callback

if TYPE_CHECKING:
    from fastlstm.runs.events import Event
    from fastlstm.training.trainer import Trainer

_TRAIN_TEXT = partial(train, as_text=True)


@dataclass(frozen=True)
class PlannedRun:
    """A run as it would be.

    Attributes:
        options: with everything chosen.
        start: the event that a run begins with.
        steps_per_epoch: of the loader.
    """

    options: Any
    start: Event
    steps_per_epoch: int


def plan_run(
    source: Any,
    config: Any,
    given: Collection[str],
    look: Callable[[Trainer], None] = lambda _: None,
    start: Callable[..., object] = _TRAIN_TEXT,
) -> PlannedRun:
    """Sets a run up as `train` does, and returns what it found and chose.

    Args:
        source: as of `train`.
        config: the options.
        given: names of those that were chosen.
        look: called with the trainer before the run is ended.
        start: trains a text, or `train_forecaster`.

    Raises:
        UsageError: as `train`.
        Stopped: SIGTERM or Ctrl-C while the run was set up.
    """
    planner, starts = _Planner(look), list[Any]()

    def keep(event: Event) -> None:
        if event["event"] == "start":
            starts.append(event)

    with tempfile.TemporaryDirectory(prefix="fastlstm-plan-") as folder:
        try:
            start(
                source, out=Path(folder, "run"), config=config, given=given, observers=[keep],
                callbacks=[planner],
            )  # fmt: skip
        except _Planned:
            pass
    return PlannedRun(planner.options, starts[0], planner.steps_per_epoch)


def chosen_sizes(given: Any, used: Any) -> dict[str, Any]:
    """Returns what a budget chose for the run, so that another command trains the same model.

    Args:
        given: the configuration of a text or a table, as the user set it.
        used: as the run has it.
    """
    if isinstance(given, ForecastConfig):
        is_same = given.hidden_size == used.hidden_size
        return {} if is_same else {"hidden_size": used.hidden_size}
    if given.rnn_size == used.rnn_size:
        return {}
    names = ("rnn_size", "embed_size", "batch_size", "optimizer", "seq_length")
    return {name: getattr(used, name) for name in names}


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
            self._look(trainer)
        finally:
            trainer.task.loader.close()
        if trainer.stop is not None and trainer.stop():  # else the signal is lost with this run
            raise Stopped("stopped: nothing was measured yet")
        raise _Planned("planned")
