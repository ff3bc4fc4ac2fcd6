"""Finds the settings with the best result within a budget, by complete short runs.

Limits of latency and bytes are measured on random weights, before any training; then an Optuna
study (`study.py`) trains short runs. A `Job` is a text or a table.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.errors import CommandError, FastLSTMError, Stopped, UsageError, counted
from fastlstm.forecast.config import ForecastConfig
from fastlstm.report.terminal import clock
from fastlstm.system import hardware
from fastlstm.text.config import TrainConfig
from fastlstm.training.schedule import StopCriterion
from fastlstm.training.session import locked_run
from fastlstm.training.signals import StopFlag
from fastlstm.tuning import study as studies
from fastlstm.tuning.job import Job, Show, Space
from fastlstm.tuning.planned_run import describe_machine, plan_run
from fastlstm.tuning.size_limits import SizeLimits
from fastlstm.tuning.table_job import TableJob
from fastlstm.tuning.text_job import TextJob

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Event as ProcessEvent

    from optuna import Study

    from fastlstm.runs.events import Event

_LOCK = ".lock"
_Config = TrainConfig | ForecastConfig


def job_of(config: _Config) -> Job:
    """Returns the kind of training of a configuration."""
    if isinstance(config, ForecastConfig):
        return TableJob()
    return TextJob(has_law=config.vocab != "bpe")


@dataclass(frozen=True)
class Search:
    """A search, in the directory `out`, for the settings of a run; the `given` ones stay.

    Attributes:
        time_s: time of all short runs; default is twice the budget, or the least possible time.
        axes: axes of the job; empty means all but threads and precision.
        num_seeds: runs in every rung of a trial.
        jobs: trials at a time, in as many processes that share the cores.
    """

    source: Any
    config: _Config
    given: Collection[str]
    out: Path
    time_s: float | None = None
    axes: tuple[str, ...] = ()
    limits: SizeLimits = field(default_factory=SizeLimits)
    num_seeds: int = 1
    resume: bool = False
    jobs: int = 1

    @property
    def budget_s(self) -> float:
        """The budget of the run; UsageError without one."""
        budget_s = StopCriterion.of(self.config, 1).budget_s
        if budget_s is None:
            raise UsageError("tune needs a budget: give --budget instead of --steps or --epochs")
        return budget_s

    def resolved(self, job: Job) -> Search:
        """Returns the search with its time and axes; UsageError for too little time."""
        axes = tuple(axis for axis in job.fields if axis not in ("threads", "precision"))
        least_s = studies.least_time_s(self.budget_s)
        time_s = self.time_s or max(2.0 * self.budget_s, least_s)
        if time_s < least_s:
            raise UsageError(
                f"the search has {clock(time_s)}, expected at least {clock(least_s)} for a run of"
                f" {clock(self.budget_s)}; give a longer --tune-time"
            )
        return replace(self, time_s=time_s, axes=self.axes or axes)

    def objective(self, job: Job, space: Space, show: Show) -> studies.Objective:
        """Returns the objective of the study of a resolved search."""
        assert self.time_s is not None
        seeds = range(self.config.seed, self.config.seed + self.num_seeds)
        rungs = studies.rungs_of(self.time_s, self.budget_s)
        train = partial(_train, job, self, space)
        return studies.Objective(job, space, seeds, rungs, train, self.out, show)


def tune_run(search: Search, show: Show = lambda label, text: None) -> dict[str, Any]:
    """Finds the best settings for a budget; `show` gets a label and a text for every result.

    Returns:
        "best" with options, label, expected and default_expected; "default", the `Space`; "trials",
        all short runs; "importance" of the axes; "about", the options of the search.

    Raises:
        UsageError: no budget, nothing to try, too little time, or no size within the limits.
        Stopped: SIGTERM or Ctrl-C; finished runs are kept.
    """
    job = job_of(search.config)
    search = search.resolved(job)
    had_lock = (search.out / _LOCK).exists()
    with StopFlag() as stop, locked_run(search.out):
        stop.can_save = True
        try:
            study = studies.open_study(search.out, _about(search), search.resume)
        except FastLSTMError:
            if not had_lock:  # leave no file in a refused directory
                (search.out / _LOCK).unlink(missing_ok=True)
            raise
        try:
            with studies.study_errors(search.out):
                return _searched(search, study, replace(job, stop=stop), show)
        except (Stopped, KeyboardInterrupt, SystemExit):  # SystemExit: a signal during timing
            done = counted(len(studies.runs_of(study)), "finished short run")
            raise Stopped(
                f"stopped; {done} kept in {search.out}, continue with `resume=True`"
            ) from None


def _about(search: Search) -> dict[str, Any]:
    """Returns the options that a continued search must have in common with its first start."""
    machine = describe_machine()
    return {
        "source": str(search.source),
        "options": {name: getattr(search.config, name) for name in sorted(search.given)},
        "tune_time": search.time_s, "axes": search.axes, "limits": asdict(search.limits),
        "seeds": search.num_seeds, "jobs": search.jobs,
        "machine": {name: machine[name] for name in ("cpu", "isa", "cores")},
    }  # fmt: skip


def _searched(search: Search, study: Study, job: Job, show: Show) -> dict[str, Any]:
    space = studies.stored_space(study, search.out)
    if space is None:
        space = _prepared(search, job, show)
        study.set_user_attr("space", asdict(space))

    objective = search.objective(job, space, show)
    objective.enqueue(study)
    left_s = (search.time_s or 0.0) - studies.spent_s(study) / search.jobs
    if search.jobs > 1:
        _run_in_processes(search, job, space, left_s, show)
    else:
        study.sampler = studies.sampler_of(search.config.seed + len(study.trials))
        objective.optimize(study, left_s)
    best, expected, of_default = studies.best_trial(study)
    found = {name: best.user_attrs[name] for name in ("options", "label")}
    return {
        "about": _about(search), "default": asdict(space), "trials": studies.runs_of(study),
        "best": {**found, "expected": expected, "default_expected": of_default},
        "importance": studies.importance(study),
    }  # fmt: skip


def _prepared(search: Search, job: Job, show: Show) -> Space:
    found = list[Space]()
    plan_run(
        search.source, search.config, search.given,
        look=lambda trainer: found.append(job.prepare(trainer, search, show)),
        start=job.train,
    )  # fmt: skip
    if not found[0].values:
        raise UsageError(
            f"--axes {','.join(search.axes)} leaves nothing to try: given options fix it, or"
            " only the default fits; give other `axes`"
        )
    return found[0]


def _run_in_processes(search: Search, job: Job, space: Space, left_s: float, show: Show) -> None:
    """Runs the trials of a study in several processes.

    Raises:
        Stopped: SIGTERM or Ctrl-C.
        CommandError: a process failed.
    """
    assert job.stop is not None
    context, plain = multiprocessing.get_context("spawn"), replace(job, stop=None)
    ended, (lines, end) = context.Event(), context.Pipe(duplex=False)
    shared, failure = (ended, end, os.getpid()), None
    processes = [
        context.Process(
            target=_worker, args=(search, plain, space, left_s, n, *shared), daemon=True
        )
        for n in range(search.jobs)
    ]
    try:
        # Processes inherit the mask: only this process ends them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
        try:
            for process in processes:
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        while any(process.is_alive() for process in processes) or lines.poll():
            if job.stop() or failure is not None:
                ended.set()
            if lines.poll(0.2):
                label, text = lines.recv()
                if label:
                    show(label, text)
                else:
                    failure = text
    finally:
        ended.set()
        for process in (each for each in processes if each.pid is not None):
            process.join()
    if job.stop():
        raise Stopped("stopped between two short runs")
    for status in (process.exitcode for process in processes if process.exitcode):
        failure = failure or f"it ended with status {status}"
    if failure is not None:
        raise CommandError(f"a process of the search failed: {failure}")


def _worker(
    search: Search, job: Job, space: Space, left_s: float, number: int, ended: ProcessEvent,
    lines: Connection, parent: int,
) -> None:  # fmt: skip
    """Runs trials in a process until the search is over, or the parent process is gone."""
    job = replace(job, stop=lambda: ended.is_set() or os.getppid() != parent)
    try:
        study = studies.load_study(search.out, search.config.seed + number)
        objective = search.objective(job, space, lambda label, text: lines.send((label, text)))
        with studies.study_errors(search.out):
            objective.optimize(study, left_s)
    except Stopped:
        pass
    except FastLSTMError as error:
        lines.send(("", error.lines()[0]))
    except Exception as error:
        lines.send(("", f"internal error: {error!r}"))


def _train(
    job: Job, search: Search, space: Space, options: Mapping[str, Any], seconds: float, seed: int,
    out: Path,
) -> tuple[float, float]:  # fmt: skip
    """Trains a complete short run; returns its result, and the expected one of the whole run."""
    if job.stop is not None and job.stop():
        raise Stopped("stopped between two short runs")
    kept = dict[str, Any]()

    def keep(event: Event) -> None:
        kept[event["event"]] = event

    short = replace(
        search.config, **options, budget=f"{seconds:g}s", steps=None, epochs=None, seed=seed,
        keep_checkpoints=1,
    )  # fmt: skip
    if search.jobs > 1:
        threads = (options.get("threads") or hardware.cores()) // search.jobs
        short = replace(short, threads=max(1, threads))
    names = {*search.given, *options, "budget", "seed"}
    job.train(search.source, short, given=names, out=out, observers=[keep])
    return job.result(kept["start"], kept["end"], options, space, seconds, search.budget_s)
