"""Finds the settings with the best result within a budget, by complete short runs.

Limits of latency and bytes are measured on random weights, before any training; then an Optuna
study (`study.py`) trains short runs. A `Job` is a text or a table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.errors import FastLSTMError, Stopped, UsageError, counted
from fastlstm.forecast.config import ForecastConfig
from fastlstm.report.terminal import clock
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
    from optuna import Study


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
        "seeds": search.num_seeds,
        "machine": {name: machine[name] for name in ("cpu", "isa", "cores")},
    }  # fmt: skip


def _searched(search: Search, study: Study, job: Job, show: Show) -> dict[str, Any]:
    space = studies.stored_space(study, search.out)
    if space is None:
        space = _prepared(search, job, show)
        study.set_user_attr("space", asdict(space))

    assert search.time_s is not None
    objective = studies.Objective(
        job, space, range(search.config.seed, search.config.seed + search.num_seeds),
        studies.rungs_of(search.time_s, search.budget_s), partial(_train, job, search, space),
        search.out, show,
    )  # fmt: skip
    objective.enqueue(study)
    study.sampler = studies.sampler_of(search.config.seed + len(study.trials))
    objective.optimize(study, search.time_s - studies.spent_s(study))
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


def _train(
    job: Job, search: Search, space: Space, options: Mapping[str, Any], seconds: float, seed: int,
    out: Path,
) -> tuple[float, float]:  # fmt: skip
    """Trains a complete short run; returns its result, and the expected one of the whole run."""
    if job.stop is not None and job.stop():
        raise Stopped("stopped between two short runs")
    kept = dict[str, Any]()
    short = replace(
        search.config, **options, budget=f"{seconds:g}s", steps=None, epochs=None, seed=seed,
        keep_checkpoints=1,
    )  # fmt: skip
    names = {*search.given, *options, "budget", "seed"}
    observers = [lambda event: kept.update({event["event"]: event})]
    job.train(search.source, short, given=names, out=out, observers=observers)
    return job.result(kept["start"], kept["end"], options, space, seconds, search.budget_s)
