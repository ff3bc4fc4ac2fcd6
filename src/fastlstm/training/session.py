"""One start of a run: directory, options, device, observers; and what a resumed run continues."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from fastlstm.distributed.joining import MAY_DIFFER
from fastlstm.distributed.world import World
from fastlstm.errors import (
    ConfigError,
    DataError,
    KernelError,
    RunDirectoryError,
    UsageError,
    counted,
)
from fastlstm.report.history import read_history
from fastlstm.runs.events import Event, Observer
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system import environment, hardware
from fastlstm.system.ceilings import GEMM_SHAPE, ceiling_dtype, measured_ceilings
from fastlstm.system.cgroup import first_words
from fastlstm.system.fields import ENDS
from fastlstm.training.callbacks import Callback
from fastlstm.training.checkpoint import Checkpoint, RunSnapshots, find_checkpoint, reading
from fastlstm.training.device import (
    memory_told,
    notes_on_device,
    random_numbers_kept,
    set_up_device,
    threads_within_quota,
)
from fastlstm.training.events import start_event
from fastlstm.training.options import TrainingOptions, chosen_names
from fastlstm.training.outputs import EventHub
from fastlstm.training.plan import TrainingPlan, TrainingResult
from fastlstm.training.precision import AS_ASKED, PrecisionChoice, allow_tf32, tf32_kept
from fastlstm.training.schedule import StopCriterion
from fastlstm.training.signals import StopFlag
from fastlstm.training.task import Task
from fastlstm.training.trainer import Trainer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ValueT = TypeVar("ValueT", bound="DataclassInstance")
OptionsT = TypeVar("OptionsT", bound=TrainingOptions)
ConfigT = TypeVar("ConfigT", bound="DataclassInstance")
_REPORT_CPU_S = 2.5
"""CPU seconds for the report, including the matplotlib import and the end of the process."""
_MAX_BUSY = 3.0
_SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""Nanoseconds that a thread has run and has waited for a core."""
_SHOW_EVERY_S = 0.5
_MAX_SETUP = 0.1
"""Share of a budget above which a note explains the set-up time."""
_LEAST_PART_S, _QUIET_SHARE = 0.1, 0.8
"""Seconds from which the note names a part; CPU share of the time below which it names waiting."""


@dataclass(frozen=True)
class Start(Generic[OptionsT]):
    """How a run starts, or continues.

    Attributes:
        options: resolved if the run continues, else as the user set them.
        first: options of the first start, as the user set them.
        given: names of the options with values other than the defaults in this start.
    """

    options: OptionsT
    first: OptionsT
    device: torch.device
    checkpoint: Checkpoint | None
    given: Collection[str] = frozenset()

    def why(self, choice: PrecisionChoice) -> str:
        if choice.why != AS_ASKED or "precision" in self.given:
            return choice.why
        return "the default" if self.checkpoint is None else "as in the first start"


class RunSession(EventHub):
    """One start of a run, in a locked run directory; without one nothing is written.

    The wall clock started at `started` (`time.perf_counter()`), by default now. Only rank 0 of
    several processes has a run, observers and callbacks.

    Attributes:
        notes: messages that follow the `start` event.
        needs_steps: whether to refuse a run that has used its budget; else the work after training
            is repeated.
    """

    needs_steps, is_trained = True, False

    def __init__(
        self,
        run: RunDirectory | None,
        observers: Sequence[Observer],
        stop: Callable[[], bool] | None = None,
        started: float | None = None,
        world: World | None = None,
    ) -> None:
        self.world = World() if world is None else world
        super().__init__(run, list(observers) if self.world.is_leader else [])
        self.stop, self.notes = stop, list[str]()
        self.started = time.perf_counter() if started is None else started
        self._mark = _thread_s()
        self._own_s = time.process_time()
        self._setup_parts: dict[str, float] = {}
        self._cached_parts = set[str]()

    @contextmanager
    def part_of_setup(self, name: str, is_cached: bool = False) -> Iterator[None]:
        """Counts the time of the block as a named part of the set-up; `is_cached` if the next start
        finds its result in the cache."""
        if is_cached:
            self._cached_parts.add(name)
        began = time.perf_counter()
        yield
        spent_s = self._setup_parts.get(name, 0.0) + time.perf_counter() - began
        self._setup_parts[name] = spent_s

    @contextmanager
    def start(
        self,
        options: OptionsT,
        names: Collection[str],
        resume: bool,
        stored: Callable[[Checkpoint], tuple[OptionsT, OptionsT]],
        may_change: frozenset[str],
    ) -> Iterator[Start[OptionsT]]:
        """Sets up threads and device for the block; restores random numbers after it.

        The user has set the options `names`; a resumed run may change those in `may_change`.
        `stored` returns the options of a checkpoint, resolved and as first given.
        """
        first, checkpoint = options, None
        given = chosen_names(options)
        if self.run is not None:
            is_resumed = resume or self.world.attempt > 0  # restarted by torchrun
            checkpoint = checkpoint_to_resume(self.run, is_resumed, self.say)
        elif resume and self.world.is_leader:
            raise ConfigError("`resume=True` continues a run directory; give `out`")
        if checkpoint is not None:
            with reading(checkpoint):
                before, first = stored(checkpoint)
            options = resumed_config(options, names, before, first, may_change)
        options, first = self.agreed(options), self.agreed(first)
        if self.run is not None or options.threads is not None or self.world.size > 1:
            self.set_threads(options.threads)
        device = set_up_device(options)
        self.notes += notes_on_device(options, device)
        with random_numbers_kept(device), memory_told(options, device):
            yield Start(options, first, device, checkpoint, given)

    def plan(
        self,
        options: TrainingOptions,
        device: torch.device,
        checkpoint: Checkpoint | None,
        steps_per_epoch: int,
        eval_every: int | None,
    ) -> TrainingPlan:
        """Returns the plan; measures the ceiling of the device if the run has a directory. Raises
        BudgetError: the resumed run has used this budget before, and `needs_steps`."""
        end, ceiling = StopCriterion.of(options, steps_per_epoch), Event()
        if self.run is not None:
            if checkpoint is not None:
                end = remaining(self.run, checkpoint, end, self.notes, self.needs_steps)
            ceiling = self.ceiling(options.precision, device.type)
        return TrainingPlan(
            options, end, device, eval_every, started=self.started, world=self.world,
            is_trained=self.is_trained, **ceiling,
        )  # fmt: skip

    def set_threads(self, threads: int | None) -> None:
        """Sets torch's threads, by default one per core; warns of more threads than cores."""
        is_open = threads is None and self.world.size == 1 and environment.thread_limit() is None
        if is_open and (found := threads_within_quota()) is not None:
            threads, why = found
            self.say("info", why)
        threads = threads or self.world.default_threads()
        torch.set_num_threads(threads)
        if threads > (cores := math.ceil(hardware.quota() or hardware.cores())):
            text = f"{threads:,} threads share the {counted(cores, 'core')} of this process"
            self.say("warning", f"{text}, which is slower than one thread for each")

    def fit(
        self,
        task: Task,
        plan: TrainingPlan,
        checkpoint: Checkpoint | None,
        callbacks: Sequence[Callback],
        about: Event,
        warning: str | None = None,
    ) -> TrainingResult:
        """Trains a task and writes the files of the run; see `Trainer.fit`.

        `about` holds further keys of the `start` event; the notes and `warning` follow that event.
        """
        path = None if self.run is None else str(self.run.path)
        if isinstance(self.stop, StopFlag):
            self.stop.can_save = True
        with self.files(checkpoint, plan.options.tensorboard):
            self.emit({**start_event(task, plan, path, checkpoint), **about})
            for note in (*self.notes, *self._notes_on_setup(plan)):
                self.say("info", note)
            if warning is not None:
                self.say("warning", warning)
            allow_tf32(plan.options.precision)
            snapshots = None
            if self.run is not None:
                snapshots = RunSnapshots(self.run, plan.options.keep_checkpoints)
            own = callbacks if self.world.is_leader else ()
            trainer = Trainer(
                task, plan, self.emit, self.stop, snapshots, own,
                path, self.watch("evaluating", task.unit),
            )  # fmt: skip
            return trainer.fit(checkpoint)

    def of_leader(self, kind: type[ValueT], make: Callable[[], ValueT]) -> ValueT:
        """Returns rank 0's value, a dataclass of JSON values, in every process."""
        if not self.world.is_leader:
            return kind(**self.world.told())
        value = make()
        if self.world.size > 1:
            self.world.told(dataclasses.asdict(value))
        return value

    def require_same(self, key: object, what: str) -> None:
        """Raises DataError if a process has read other data than rank 0."""
        told = self.world.told(key)
        with self.world.together():
            if told != key:
                raise DataError(f"{what} than rank 0's; copy the same files to all machines")

    def agreed(self, options: OptionsT) -> OptionsT:
        """Returns the options of rank 0, except those that may differ between processes."""
        own = {name: value for name, value in vars(options).items() if name in MAY_DIFFER}
        return dataclasses.replace(self.of_leader(type(options), lambda: options), **own)

    def check_processes(self, options: TrainingOptions) -> None:
        size, rows = self.world.size, options.batch_size * options.accumulate
        if options.divides_batch and rows < size:
            raise ConfigError(
                f"{size} processes need as many rows, a step has {rows}; give"
                f" `batch_size={-(-size // options.accumulate)!r}` or more, or start fewer"
            )
        every = f"`sync_every={options.sync_every}`"
        if options.sync_every == 1:
            return
        if size == 1:
            self.notes.append(f"{every} has no effect with one process")
        elif options.precision == "fp16" or options.wire == "bf16":
            name, why, other = "wire", "weights travel as fp32", "fp32"
            if options.precision == "fp16":
                name, why, other = "precision", "all steps share a loss scale", "bf16"
            raise ConfigError(
                f"{every} cannot be combined with `{name}={getattr(options, name)!r}`: {why}; give"
                f" `{name}={other!r}`"
            )

    def with_rate(self, options: OptionsT, rates: Mapping[str, float]) -> OptionsT:
        """Returns the options with a peak learning rate, by default the optimizer's in `rates`.

        For local steps of W processes the default is sqrt(W) times as high, except for SGD, because
        the mean of W normalized steps is shorter than one step of the whole batch (benchmarks/log).
        """
        if options.learning_rate is not None:
            return options
        rate, size = rates[options.optimizer], self.world.size
        if size > 1 and options.sync_every > 1 and options.optimizer != "sgd":
            rate *= math.sqrt(size)
            self.notes.append(
                f"learning rate {rate:.3g}: sqrt({size}) times one process's, as the mean of"
                f" {size} local steps is shorter than one step of the whole batch"
            )
        return dataclasses.replace(options, learning_rate=rate)

    @property
    def loader_stop(self) -> Callable[[], bool] | None:
        """What a loader polls; None if other processes wait for this one within a step."""
        return self.stop if self.world.size == 1 else None

    def _notes_on_setup(self, plan: TrainingPlan) -> list[str]:
        """Returns a note on a set-up that takes much of a budget, or nothing."""
        budget_s = plan.stop_criterion.budget_s
        wall_s, own_s = time.perf_counter() - self.started, time.process_time() - self._own_s
        if budget_s is None or wall_s <= _MAX_SETUP * budget_s:
            return []
        parts = {**self._setup_parts, "the rest": wall_s - sum(self._setup_parts.values())}
        shown = ", ".join(f"{name} {s:.1f} s" for name, s in parts.items() if s >= _LEAST_PART_S)
        text = f"set-up took {wall_s:.1f} s of the budget of {budget_s:g} s"
        text += f": {shown}" if shown else ""
        if own_s < _QUIET_SHARE * wall_s:
            text += f"; this process computed for {own_s:.1f} s of it and waited for the rest"
        for name in self._cached_parts:
            if parts.get(name, 0.0) > wall_s / 2:
                text += f"; {name} is in the cache now, so the next start takes less"
        return [text]

    def mark(self) -> None:
        """Starts the measurement of how busy the machine is, for `report_s`."""
        self._mark = _thread_s()

    def report_s(self) -> float:
        """Returns about how long the report will take on a machine as busy as since `mark`."""
        if self.run is None:
            return 0.0
        ready_s, ran_s = (now - then for now, then in zip(_thread_s(), self._mark, strict=True))
        return _REPORT_CPU_S * min(max(ready_s / max(ran_s, 1e-3), 1.0), _MAX_BUSY)

    def ceiling(self, precision: str, device: str = "cpu") -> Event:
        """Returns `ceiling_gflops`, of all processes together, and `ceiling_how`."""
        threads, size = torch.get_num_threads(), self.world.size
        with self.part_of_setup("the ceiling"):
            ceilings = measured_ceilings(precision, threads, device=device)
        shape = "x".join(map(str, GEMM_SHAPE))
        how = f"{ceilings.gemm_by}, {shape} in {ceiling_dtype(precision, device)}"
        how += f", {counted(threads, 'thread')}" if device == "cpu" else " on the GPU"
        if size > 1:
            how += f" in each of {size} processes"
        if device == "cpu" and environment.forced_isa() not in (None, hardware.widest_isa()):
            how += ", not limited by FASTLSTM_ISA"
        if ceilings.is_busy:
            how += ", while the machine was busy"
        if ceilings.is_recalled:
            how += ", measured earlier"
        return {"ceiling_gflops": ceilings.gemm_gflops * size, "ceiling_how": how}

    def watch(self, doing: str, unit: str) -> Callable[[int, int], None]:
        """Returns a function of (done, total) that emits `progress` events twice a second."""
        shown_s, is_shown = time.perf_counter(), False

        def show(done: int, total: int) -> None:
            nonlocal shown_s, is_shown
            is_over = done >= total
            if is_shown if is_over else time.perf_counter() - shown_s > _SHOW_EVERY_S:
                about = {"doing": doing, "unit": unit, "done": done, "total": total}
                self.emit({"event": "progress", **about})
                shown_s, is_shown = time.perf_counter(), not is_over
            elif is_over:
                shown_s = time.perf_counter()  # the next round begins

        return show


def checkpoint_to_resume(
    run: RunDirectory, resume: bool, say: Callable[[str, str], None]
) -> Checkpoint | None:
    """Returns the newest intact checkpoint, or None for a new run. Raises RunDirectoryError: the
    directory has a run, and `resume` is False; or CorruptFileError: all checkpoints are damaged."""
    checkpoint, damage = find_checkpoint(run) if run.checkpoints() else (None, [])
    if checkpoint is not None and not resume:
        raise RunDirectoryError(
            f"'{run.path}' already contains a run (step {checkpoint.step}); give `resume=True` to"
            " continue it, or another `out` to start a new one"
        )
    if not run.checkpoints() and run.has_published():
        raise RunDirectoryError(
            f"'{run.path}' already contains a model, without a checkpoint to continue from; give"
            " another `out`, or delete that directory first"
        )
    for error in damage:
        if checkpoint is None:
            raise error
        say("warning", f"{error}; continuing from {checkpoint.path.name}")
    return checkpoint


def remaining(
    run: RunDirectory,
    checkpoint: Checkpoint,
    stop_criterion: StopCriterion,
    notes: list[str],
    needs_steps: bool = True,
) -> StopCriterion:
    """Returns when a resumed run ends; adds a note if nothing is left to train. Raises BudgetError:
    the run has used this budget before, and `needs_steps`."""
    if stop_criterion.total_steps is not None and checkpoint.step >= stop_criterion.total_steps:
        notes.append(
            f"already complete: it ends after {stop_criterion.text} and has trained"
            f" {checkpoint.step:,}; nothing is left to train, give more"
            f" `{stop_criterion.kind}`"
        )
    end = read_history(run.metrics_path).end or {}
    reason = str(end.get("reason"))
    by_budget = reason.startswith(("budget", "trained 0"))
    if stop_criterion.budget_s is None or not by_budget or end.get("step") != checkpoint.step:
        return stop_criterion
    if not needs_steps:
        if reason != stop_criterion.text:
            return stop_criterion
        notes.append(
            f"already complete: it has used its {stop_criterion.text}; nothing is left to"
            " train, give a larger `budget`"
        )
        return dataclasses.replace(stop_criterion, total_steps=checkpoint.step)
    stop_criterion = dataclasses.replace(stop_criterion, over_at=checkpoint.step)
    if reason == stop_criterion.text:
        stop_criterion.require_steps(checkpoint.step, 0.0)
    return stop_criterion


def resumed_config(
    new: ConfigT,
    names: Collection[str],
    resolved: ConfigT,
    first: ConfigT,
    may_change: frozenset[str],
) -> ConfigT:
    """Returns the options of a run that continues: the `resolved` ones, and of `new` those that the
    user has set (`names`) and that may change. Raises ConfigError if another one differs, also from
    the `first` start as the user set it.
    """
    changes: dict[str, Any] = {}
    for name in names:
        value, before = getattr(new, name), getattr(resolved, name)
        if name in may_change:
            if value != before:
                changes[name] = value
        elif value not in (getattr(first, name), before):
            raise ConfigError(
                f"`{name}={value!r}`: this run was started"
                f" {'without it' if before is None else f'with {before}'}; leave it out to resume,"
                " or start a new run with another `out`"
            )
    if not changes.keys().isdisjoint(ENDS):
        changes = {**dict.fromkeys(ENDS), **changes}
    return dataclasses.replace(resolved, **changes)


def _thread_s() -> tuple[float, float]:
    """Returns the seconds in which this thread had work for a core, and in which it had a core.

    Without Linux's schedstat the first number is all seconds, with waits for other threads or a
    GPU.
    """
    words = first_words(_SCHEDSTAT, 2)
    if len(words) < 2:
        return time.perf_counter(), time.thread_time()
    ran_s, waited_s = (int(word) / 1e9 for word in words)
    return ran_s + waited_s, ran_s


@contextmanager
def locked_run(path: str | Path | None) -> Iterator[RunDirectory | None]:
    """Creates and locks a run directory, if any; removes it again if it stays empty."""
    if path is None:
        yield None
        return
    run = RunDirectory(path)
    is_new = not os.path.exists(run.path)  # Path.exists raises for a name too long
    try:
        run.create()
        with run.lock():
            try:
                yield run
            except (UsageError, KernelError):
                run.remove_if_empty()
                raise
    except KeyboardInterrupt:
        if is_new:  # else a process that has it locked may have written nothing yet
            run.remove_if_empty()
        raise


@contextmanager
def torch_settings_kept() -> Iterator[None]:
    """Restores torch's number of threads and TF32 switches at the end of the block."""
    threads = torch.get_num_threads()
    try:
        with tf32_kept():
            yield
    finally:
        torch.set_num_threads(threads)
