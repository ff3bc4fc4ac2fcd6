"""The outputs of a run: observers, metrics.jsonl, TensorBoard's files, report.html."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from fastlstm.errors import BudgetError, CorruptFileError, FastLSTMError, RunDirectoryError
from fastlstm.report.events import number
from fastlstm.report.history import read_history
from fastlstm.report.page import write_report
from fastlstm.runs.events import SPELLING, Event, MetricsFile, Observer, TensorBoardWriter
from fastlstm.runs.manifest import truncate_metrics
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system.redaction import redacted
from fastlstm.training.checkpoint import Checkpoint

_CLEAR_GAIN = 0.005
"""Least relative gain of the loss in the last tenth of the steps."""


class EventHub:
    """Hands the events of a run to its observers and, in a run directory, to its files.

    An OSError of an observer, such as a closed pipe, removes it.
    """

    def __init__(self, run: RunDirectory | None, observers: list[Observer]) -> None:
        self.run, self._observers = run, observers
        self._files: list[MetricsFile | TensorBoardWriter] = []
        self._early: list[Event] = []
        self._end: tuple[float, Event] | None = None
        self._losses: list[tuple[float, float]] = []

    def emit(self, event: Event) -> None:
        """Hands out an event; until the report is written, only files get the `end` event."""
        if event["event"] == "eval":
            self._add_loss(event)
        if event["event"] == "end" and self.run is not None:
            event = {**event, "still_improving": is_still_improving(self._losses)}
            self._end = time.perf_counter(), event
            self._hand_out(event, [o for o in self._observers if o in self._files])
        else:
            self._hand_out(event, self._observers)

    def say(self, level: str, text: str) -> None:
        """Hands out a message; level is info or warning. Files get it once they are open."""
        event = {"event": "message", "level": level, "text": text}
        self.emit(event)
        if not self._files:
            self._early.append(event)

    def _hand_out(self, event: Event, observers: Sequence[Observer]) -> None:
        event = {n: redacted(v) if isinstance(v, str) else v for n, v in event.items()}
        if event["event"] == "message":
            event["text"] = SPELLING.get()(event["text"])
        for observer in list(observers):
            try:
                observer(event)
            except OSError as error:
                if observer in self._observers:  # else the warning about another removed it
                    self._observers.remove(observer)
                    name = type(observer).__name__
                    self.say("warning", f"{name} stopped ({error.strerror}); the run continues")

    @contextmanager
    def files(self, checkpoint: Checkpoint | None, tensorboard: bool) -> Iterator[None]:
        """Adds metrics.jsonl and TensorBoard to the observers; writes the report at the end."""
        run = self.run
        if run is None:
            yield
            return
        if tensorboard and run.tensorboard_dir.is_symlink():
            raise RunDirectoryError(
                f"{run.tensorboard_dir} is a symbolic link, expected a directory of the run;"
                " remove it, or give `tensorboard=False`"
            )
        run.unseal_metrics()
        if checkpoint is not None and "metrics" in checkpoint.meta:
            self._continue_metrics(checkpoint)
        self._files = [MetricsFile(run.metrics_path)]
        first_step = 0 if checkpoint is None else checkpoint.step
        if tensorboard:
            self._files.append(TensorBoardWriter(run.tensorboard_dir, first_step))
        for event in self._early:
            self._hand_out(event, self._files)
        self._observers[:0] = self._files
        is_trained = is_own = True
        try:
            yield
        except RunDirectoryError:
            is_own = False  # another process writes it now
            raise
        except BudgetError as error:
            is_trained = False
            self._hand_out({"event": "end", "reason": str(error), "step": first_step}, self._files)
            raise
        finally:
            for output in self._files:
                if output in self._observers:
                    self._observers.remove(output)
                self._try(output.close)
            if is_own:
                self._try(run.seal_metrics)
            if is_own and is_trained:
                self._try(lambda: write_report(run.path))
            self._show_end()

    def _show_end(self) -> None:
        """Shows the end with the time of the report and the paths of the files."""
        if self._end is None or self.run is None:
            return
        at, event = self._end
        report_s = time.perf_counter() - at
        spent = {**event.get("spent_s", {}), "report": report_s}
        shown = {"elapsed_s": event["elapsed_s"] + report_s, "spent_s": spent}
        shown["has_model"] = self.run.has_published()
        places = {"report": self.run.report_path, "tensorboard": self.run.tensorboard_dir}
        shown |= {name: str(path) for name, path in places.items() if path.exists()}
        self._hand_out({**event, **shown}, self._observers)

    def _try(self, finish: Callable[[], object]) -> None:
        """Calls `finish`; a failure is a warning, so that the outcome of the run stays."""
        try:
            finish()
        except (FastLSTMError, OSError) as error:
            self.say("warning", str(error))

    def _continue_metrics(self, checkpoint: Checkpoint) -> None:
        assert self.run is not None
        try:
            truncate_metrics(self.run.metrics_path, checkpoint.meta["metrics"])
        except CorruptFileError as error:
            aside = self.run.metrics_path.with_suffix(".damaged")
            self.run.metrics_path.replace(aside)
            self.say("warning", f"{error}; it is kept as {aside.name}, a new one is started")
        for event in read_history(self.run.metrics_path).validations:
            self._add_loss(event)

    def _add_loss(self, event: Event) -> None:
        """Notes an evaluation; forgets all if callbacks do not accept it."""
        step, loss = number(event, "step"), number(event, "loss")
        if event.get("is_accepted") is False:
            self._losses.clear()
        elif step is not None and loss is not None:
            self._losses.append((step, loss))


def is_still_improving(losses: Sequence[tuple[float, float]]) -> bool:
    """Returns whether the last evaluation is the best, and clearly better than all in the first
    9/10 of the steps; `losses` are (step, validation loss)."""
    if not losses:
        return False
    last_step, last = losses[-1]
    earlier = [loss for step, loss in losses if step <= 0.9 * last_step]
    if last > min(loss for _, loss in losses):
        return False
    return not earlier or min(earlier) - last > _CLEAR_GAIN * abs(last)
