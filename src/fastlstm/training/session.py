"""What every start of a run needs: its observers, its files, and the checkpoint it goes on from."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from fastlstm.errors import (
    BudgetError,
    ConfigError,
    CorruptFileError,
    FastLSTMError,
    Message,
    RunDirectoryError,
    Setting,
    counted,
)
from fastlstm.report.events import number
from fastlstm.report.history import read_history
from fastlstm.report.page import write_report
from fastlstm.runs.metrics import Event, MetricsFile, Observer, TensorBoardWriter
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system import hardware, measurements
from fastlstm.training.checkpoint import (
    Checkpoint,
    find_checkpoint,
    reading,
    truncate_metrics,
)
from fastlstm.training.schedule import StopCriterion

ConfigT = TypeVar("ConfigT")

_ENDS = frozenset({"steps", "epochs", "budget"})
_REPORT_CPU_S = 2.5
"""What the report takes of one core, with matplotlib's import and the end of the process."""
_MOST_BUSY = 3.0
_CLEAR_GAIN = 0.005
"""Of the loss, in the last tenth of the steps."""
_SHOW_EVERY_S = 0.5


class RunSession:
    """One start of a run: hands events out and keeps the run directory's files.

    Args:
        run: the locked run directory.
        observers: called with every event.
        began: `time.perf_counter()` when the wall clock of this start began; default now.

    Attributes:
        run: as given.
        began: `time.perf_counter()` when the wall clock of this start began.
        notes: sentences to say once the start is announced.
    """

    def __init__(
        self, run: RunDirectory, observers: list[Observer], began: float | None = None
    ) -> None:
        self.run, self._observers = run, observers
        self.notes: list[str] = []
        self.began = time.perf_counter() if began is None else began
        self._files: list[MetricsFile | TensorBoardWriter] = []
        self._early: list[Event] = []
        self._end: tuple[float, Event] | None = None
        self._losses: list[tuple[float, float]] = []
        self._mark = time.perf_counter(), time.thread_time()

    def emit(self, event: Event) -> None:
        """Hands an event to every observer; one whose disk or pipe fails gets no more.

        The end is shown when the report is written; until then only files get it.
        """
        if event["event"] == "eval":
            self._losses.append((event["step"], event["loss"]))
        if event["event"] == "end":
            event = {**event, "still_improving": is_still_improving(self._losses)}
            self._end = time.perf_counter(), event
            self._hand_out(event, [o for o in self._observers if o in self._files])
        else:
            self._hand_out(event, self._observers)

    def _hand_out(self, event: Event, observers: Sequence[Observer]) -> None:
        for observer in list(observers):
            try:
                observer(event)
            except OSError as error:
                self._observers.remove(observer)
                name = type(observer).__name__
                self.say("warning", f"{name} stopped ({error.strerror}); the run goes on")

    def set_threads(self, threads: int | None) -> None:
        """Sets the threads of torch, by default one per core; more than cores are said at once."""
        threads = threads or hardware.default_threads()
        torch.set_num_threads(threads)
        if threads > (cores := hardware.cores()):
            text = f"{threads:,} threads share the {counted(cores, 'core')} of this process"
            self.say("warning", f"{text}, which is slower than one thread for each")

    def remaining(self, found: Checkpoint | None, ending: StopCriterion) -> StopCriterion:
        """Returns the end of a run that may be resumed; says where nothing is left to train.

        Raises:
            BudgetError: the run came to its end by this very budget.
        """
        if found is None:
            return ending
        if ending.total_steps is not None and found.step >= ending.total_steps:
            told = f"already complete: it ends after {ending.text} and has trained {found.step:,};"
            more = Setting(ending.kind)
            self.notes.append(Message(f"{told} nothing is trained now, give more ", more))
        end = read_history(self.run.metrics_path).end or {}
        reason = str(end.get("reason"))
        by_budget = reason.startswith(("budget", "trained 0"))
        if ending.budget_s is None or not by_budget or end.get("step") != found.step:
            return ending
        ending = dataclasses.replace(ending, over_at=found.step)
        if reason == ending.text:
            ending.require_steps(found.step, 0.0)
        return ending

    def mark(self) -> None:
        """Begins the measurement of how busy the machine is; see `report_s`."""
        self._mark = time.perf_counter(), time.thread_time()

    def report_s(self) -> float:
        """Returns about how long the report will take: as busy as the machine was since `mark`."""
        if not self._files:
            return 0.0
        wall_s, own_s = time.perf_counter() - self._mark[0], time.thread_time() - self._mark[1]
        return _REPORT_CPU_S * min(max(wall_s / max(own_s, 1e-3), 1.0), _MOST_BUSY)

    def ceiling(self, precision: str, device: str = "cpu") -> Event:
        """Returns what a start event says of the ceiling: ceiling_gflops, and how it was measured.

        What was measured in an earlier run goes into `notes`.
        """
        threads = torch.get_num_threads()
        found = hardware.ceilings(precision, threads, device=device)
        shape = "x".join(map(str, hardware.GEMM_SHAPE))
        how = f"{found.gemm_by}, {shape} in {precision}, {counted(threads, 'thread')}"
        if found.is_busy:
            how += ", while the machine was busy"
        if found.is_recalled:
            self.notes.append(measurements.note("the ceiling was"))
        return {"ceiling_gflops": found.gemm_gflops, "ceiling_how": how}

    def watch(self, doing: str, unit: str) -> Callable[[int, int], None]:
        """Returns what to call with (done, total): from half a second on it shows how far it is."""
        looked_s, is_shown = time.perf_counter(), False

        def show(done: int, total: int) -> None:
            nonlocal looked_s, is_shown
            is_over = done >= total
            if is_shown if is_over else time.perf_counter() - looked_s > _SHOW_EVERY_S:
                about = {"doing": doing, "unit": unit, "done": done, "total": total}
                self.emit({"event": "progress", **about})
                looked_s, is_shown = time.perf_counter(), not is_over
            elif is_over:
                looked_s = time.perf_counter()  # the next round of the same begins

        return show

    def say(self, level: str, text: str) -> None:
        """Hands out a message; level is info or warning. The files get it once they are open."""
        event = {"event": "message", "level": level, "text": text}
        self.emit(event)
        if not self._files:
            self._early.append(event)

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
        if tensorboard and self.run.tensorboard_dir.is_symlink():
            raise RunDirectoryError(
                f"{self.run.tensorboard_dir} is a symbolic link, expected a directory of the"
                " run; remove it, or give ",
                Setting("tensorboard", False),
            )
        self.run.unseal_metrics()
        if found is not None and "metrics" in found.meta:
            self._continue_metrics(found)
        self._files = [MetricsFile(self.run.metrics_path)]
        if tensorboard:
            first = 0 if found is None else found.step
            self._files.append(TensorBoardWriter(self.run.tensorboard_dir, first))
        for event in self._early:
            self._hand_out(event, self._files)
        self._observers[:0] = self._files
        is_trained = True
        try:
            yield
        except BudgetError as error:
            is_trained = False
            step = 0 if found is None else found.step
            self._hand_out({"event": "end", "reason": str(error), "step": step}, self._files)
            raise
        finally:
            for output in self._files:
                if output in self._observers:
                    self._observers.remove(output)
                self._try(output.close)
            self._try(self.run.seal_metrics)
            if is_trained:
                self._try(lambda: write_report(self.run.path))
            self._show_end()

    def _show_end(self) -> None:
        """Shows the end with the time that the report took and what there is to look at."""
        if self._end is None:
            return
        at, event = self._end
        report_s = time.perf_counter() - at
        spent = {**event.get("spent_s", {}), "report": report_s}
        shown = {"elapsed_s": event["elapsed_s"] + report_s, "spent_s": spent}
        places = {"report": self.run.report_path, "tensorboard": self.run.tensorboard_dir}
        shown |= {name: str(path) for name, path in places.items() if path.exists()}
        self._hand_out({**event, **shown}, self._observers)

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
        for event in read_history(self.run.metrics_path).validations:
            step, loss = number(event, "step"), number(event, "loss")
            if step is not None and loss is not None:
                self._losses.append((step, loss))


def resumed(found: Checkpoint | None) -> Event:
    """Returns what a start event says of the checkpoint that it goes on from."""
    if found is None:
        return {"resumed_from": None, "resumed_s": None}
    with reading(found):
        return {"resumed_from": found.step, "resumed_s": float(found.meta["progress"]["elapsed_s"])}


@contextmanager
def torch_settings_kept() -> Iterator[None]:
    """Puts back, at the end of the block, what a run sets for the whole process.

    These are torch's number of threads and the TF32 switches.
    """
    threads = torch.get_num_threads()
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        for switch, is_on in zip(switches, before, strict=True):
            switch.allow_tf32 = is_on


def is_still_improving(losses: Sequence[tuple[float, float]]) -> bool:
    """Returns whether the last evaluation is the best, well below all in the first 9/10 of the way.

    Args:
        losses: (step, validation loss) of the evaluations of all starts, in order.
    """
    if not losses:
        return False
    last_step, last = losses[-1]
    earlier = [loss for step, loss in losses if step <= 0.9 * last_step]
    if last > min(loss for _, loss in losses):
        return False
    return not earlier or min(earlier) - last > _CLEAR_GAIN * abs(last)


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
            before = getattr(begun, name)
            raise ConfigError(
                Setting(name, value),
                f": this run was begun {'without it' if before is None else f'with {before}'};"
                " leave it out to resume, or start a new run with another ",
                Setting("out"),
            )
    if changes.keys() & _ENDS:
        changes = {**dict.fromkeys(_ENDS), **changes}
    return dataclasses.replace(begun, **changes)  # type: ignore[type-var]
