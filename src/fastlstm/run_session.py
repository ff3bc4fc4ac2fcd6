"""What every start of a run needs: its observers, its files, and the checkpoint it goes on from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from fastlstm.errors import ConfigError, CorruptFileError, FastLSTMError, RunDirectoryError, Setting
from fastlstm.report.page import write_report
from fastlstm.run_directory import RunDirectory
from fastlstm.training.checkpoint import Checkpoint, find_checkpoint, truncate_metrics
from fastlstm.training.metrics import Event, MetricsFile, Observer, TensorBoardWriter

ConfigT = TypeVar("ConfigT")

_ENDS = frozenset({"steps", "epochs", "budget"})


class RunSession:
    """One start of a run: hands events out and keeps the run directory's files.

    Args:
        run: the locked run directory.
        observers: called with every event.

    Attributes:
        run: as given.
    """

    def __init__(self, run: RunDirectory, observers: list[Observer]) -> None:
        self.run, self._observers = run, observers

    def emit(self, event: Event) -> None:
        """Hands an event to every observer; one whose disk or pipe fails gets no more."""
        for observer in list(self._observers):
            try:
                observer(event)
            except OSError as error:
                self._observers.remove(observer)
                name = type(observer).__name__
                self.say("warning", f"{name} stopped ({error.strerror}); the run goes on")

    def say(self, level: str, text: str) -> None:
        """Hands out a message; level is info or warning."""
        self.emit({"event": "message", "level": level, "text": text})

    def find(self, resume: bool) -> Checkpoint | None:
        """Returns the newest intact checkpoint to go on from, None to start.

        Raises:
            RunDirectoryError: there is a run, and it is not to be resumed.
            CorruptFileError: all its checkpoints are damaged.
        """
        run = self.run
        found, damage = find_checkpoint(run) if run.checkpoints() else (None, [])
        if found is not None and not resume:
            raise RunDirectoryError(
                f"'{run.path}' holds a run already (step {found.step}); ",
                Setting("resume", True),
                " goes on with it, another ",
                Setting("out"),
                " starts a new one",
            )
        if not run.checkpoints() and run.has_published():
            raise RunDirectoryError(
                f"'{run.path}' holds a model without a checkpoint to go on from; give another ",
                Setting("out"),
            )
        for error in damage:
            if found is None:
                raise error
            self.say("warning", f"{error}; going on from {found.path.name}")
        return found

    @contextmanager
    def outputs(self, found: Checkpoint | None, tensorboard: bool) -> Iterator[None]:
        """Adds metrics.jsonl and TensorBoard to the observers; writes the report at the end."""
        self.run.unseal_metrics()
        if found is not None and "metrics" in found.meta:
            self._continue_metrics(found)
        outputs: list[MetricsFile | TensorBoardWriter] = [MetricsFile(self.run.metrics_path)]
        if tensorboard:
            first = 0 if found is None else found.step
            outputs.append(TensorBoardWriter(self.run.tensorboard_dir, first))
        self._observers[:0] = outputs
        try:
            yield
        finally:
            for output in outputs:
                if output in self._observers:
                    self._observers.remove(output)
                self._try(output.close)
            self._try(self.run.seal_metrics)
            self._try(lambda: write_report(self.run.path))

    def _try(self, finish: Callable[[], object]) -> None:
        """Does what a run can end without: its own outcome counts for more."""
        try:
            finish()
        except (FastLSTMError, OSError) as error:
            self.say("warning", str(error))

    def _continue_metrics(self, found: Checkpoint) -> None:
        try:
            truncate_metrics(self.run.metrics_path, found.meta["metrics"])
        except CorruptFileError as error:
            aside = self.run.metrics_path.with_suffix(".damaged")
            self.run.metrics_path.replace(aside)
            self.say("warning", f"{error}; it is kept as {aside.name}, a new one is begun")


def resumed_config(
    new: ConfigT, names: Collection[str], begun: ConfigT, first: ConfigT, may_change: frozenset[str]
) -> ConfigT:
    """Returns the configuration a run was begun with, with what may change taken from the new one.

    Args:
        new: what is asked for now.
        names: the fields of it that were given; the others are defaults.
        begun: the resolved configuration of the run.
        first: the same as the user first gave it.
        may_change: fields that a resumed run may be given anew.

    Raises:
        ConfigError: a field is given that belongs to what was begun and differs from it.
    """
    changes: dict[str, Any] = {}
    for name in names:
        value = getattr(new, name)
        if name in may_change:
            if value != getattr(begun, name):
                changes[name] = value
            continue
        if value not in (getattr(first, name), getattr(begun, name)):
            raise ConfigError(
                Setting(name, value),
                f": this run was begun with {getattr(begun, name)}; leave it"
                " out to resume, or start a new run with another ",
                Setting("out"),
            )
    if changes.keys() & _ENDS:
        changes = {**dict.fromkeys(_ENDS), **changes}
    return dataclasses.replace(begun, **changes)  # type: ignore[type-var]
