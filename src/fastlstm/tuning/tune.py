"""Finds the settings that end best within a budget, by complete short runs.

Three stages: the speed of threads, precision and the sizes of a step; limits of latency and bytes,
on random weights; then successive halving of complete short runs (`halving`). What a `Job` is
tells texts from tables.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.errors import FastLSTMError, Setting, Stopped, UsageError, counted
from fastlstm.forecast.config import ForecastConfig
from fastlstm.report.terminal import clock
from fastlstm.text.config import TrainConfig
from fastlstm.training.schedule import StopCriterion
from fastlstm.training.session import locked_run
from fastlstm.training.signals import StopFlag
from fastlstm.tuning import halving
from fastlstm.tuning.job import Default, Job
from fastlstm.tuning.machine import describe_machine
from fastlstm.tuning.planned_run import plan_run
from fastlstm.tuning.size_limits import SizeLimits
from fastlstm.tuning.table_job import TableJob
from fastlstm.tuning.text_job import TextJob
from fastlstm.tuning.trials import LOCK, Trial, TrialStore

if TYPE_CHECKING:
    from fastlstm.runs.events import Event
    from fastlstm.tuning.halving import Changes

_Config = TrainConfig | ForecastConfig


def job_of(config: _Config) -> Job:
    """Returns the kind of training that a configuration is for."""
    if isinstance(config, ForecastConfig):
        return TableJob()
    return TextJob(has_law=config.vocab != "bpe")


@dataclass(frozen=True)
class Search:
    """What a search was asked for.

    Attributes:
        out: directory of the search.
        time_s: for the short runs; default is twice the budget, or the least that is enough.
        axes: of those of the job; empty means all.
        limits: that every model must keep.
        num_seeds: runs of every trial.
        resume: continue the search in `out`.
    """

    out: Path
    time_s: float | None = None
    axes: tuple[str, ...] = ()
    limits: SizeLimits = field(default_factory=SizeLimits)
    num_seeds: int = 1
    resume: bool = False


@dataclass(frozen=True)
class Tuned:
    """What a search found.

    Attributes:
        options: of the best settings, by field, beside those that were given.
        label: what differs from the default.
        expected: bits/char, of a table the loss, that a run of the budget is expected to end at.
        default_expected: the same of the default.
        trials: all short runs.
        facts: the content of tune.json.
    """

    options: dict[str, Any]
    label: str
    expected: float
    default_expected: float
    trials: list[Trial]
    facts: dict[str, Any]


def tune_run(
    source: Any,
    config: _Config,
    given: Collection[str],
    search: Search,
    show: Callable[[str, str], None] = lambda label, text: None,
) -> Tuned:
    """Finds the best settings for a budget.

    Args:
        source: as of `fastlstm.train`.
        config: the options; those that were given stay.
        given: their names.
        search: what to search.
        show: called with a label and a text of everything that was found.

    Raises:
        UsageError: no budget, nothing to try, too little time, or no size within the limits.
        Stopped: SIGTERM or Ctrl-C; finished runs are kept.
    """
    budget_s = StopCriterion.of(config, 1).budget_s
    if budget_s is None:
        raise UsageError("tune needs a budget: give --budget instead of --steps or --epochs")
    job = job_of(config)
    search = search if search.axes else replace(search, axes=job.axes)
    least_s = halving.least_time_s(budget_s)
    time_s = search.time_s or max(2.0 * budget_s, least_s)
    if time_s < least_s:
        raise UsageError(
            f"the search has {clock(time_s)}, expected at least {clock(least_s)} for a run of"
            f" {clock(budget_s)}; give a longer --tune-time"
        )
    had_lock = (search.out / LOCK).exists()
    with StopFlag() as stop, locked_run(search.out):
        about = _about(source, config, given, search, time_s)
        store = _store(search, about, had_lock)
        try:
            job = replace(job, stop=stop)
            return _search(job, store, source, config, given, search, time_s, budget_s, show)
        except (Stopped, KeyboardInterrupt, SystemExit):  # the last by a signal while it times
            done = counted(len(store.trials), "finished short run")
            raise Stopped(
                f"stopped; {done} kept in {search.out}, continue with ", Setting("resume", True)
            ) from None


def _store(search: Search, about: dict[str, Any], had_lock: bool) -> TrialStore:
    """Returns the trials in a directory; one that is refused keeps no lock file of ours."""
    try:
        return TrialStore(search.out, about, search.resume)
    except FastLSTMError:
        if not had_lock:
            (search.out / LOCK).unlink(missing_ok=True)
        raise


def _search(
    job: Job, store: TrialStore, source: Any, config: _Config, given: Collection[str],
    search: Search, time_s: float, budget_s: float, show: Callable[[str, str], None],
) -> Tuned:  # fmt: skip
    """Returns what the search finds; its results are kept in `store`."""
    default = _default(job, store, source, config, given, search, show)
    train_run = partial(_train, job, source, config, given, default, budget_s)
    seeds = range(config.seed, config.seed + search.num_seeds)
    run = partial(_expected, job, store, train_run, default, seeds, show)
    best, bits, default_bits = halving.search(default.changes, default.rates, time_s, budget_s, run)
    if math.isinf(bits):
        raise UsageError(f"every short run failed: {store.trials[-1].why}")
    options, label = job.options_of(default.options, best), job.label_of(best)
    store.keep(best={
        "options": options, "label": label, "expected": bits, "default_expected": default_bits,
    })  # fmt: skip
    return Tuned(options, label, bits, default_bits, store.trials, store.content)


def _about(
    source: Any, config: _Config, given: Collection[str], search: Search, time_s: float
) -> dict[str, Any]:
    """Returns what a search that continues must have in common with the first start."""
    machine = describe_machine()
    return {
        "source": str(source),
        "options": {name: getattr(config, name) for name in sorted(given)},
        "tune_time": time_s, "axes": list(search.axes), "limits": search.limits.to_dict(),
        "seeds": search.num_seeds,
        "machine": {name: machine[name] for name in ("cpu", "isa", "cores")},
    }  # fmt: skip


def _default(
    job: Job, store: TrialStore, source: Any, config: _Config, given: Collection[str],
    search: Search, show: Callable[[str, str], None],
) -> Default:  # fmt: skip
    """Returns the default with its changes, prepared now or when the search was started."""
    known = store.default()
    if known is not None:
        return known
    found = list[Default]()
    plan_run(
        source, config, given,
        look=lambda trainer: found.append(job.prepare(trainer, given, search, show)),
        start=job.train,
    )  # fmt: skip
    store.keep(default=found[0].to_dict())
    return found[0]


def _expected(
    job: Job,
    store: TrialStore,
    run: Callable[[Mapping[str, Any], float, int, Path], tuple[float, float]],
    default: Default,
    seeds: range,
    show: Callable[[str, str], None],
    changes: Changes,
    seconds: float,
) -> float:
    """Returns what the whole run with some changes is expected to end at."""
    options, label = job.options_of(default.options, changes), job.label_of(changes)
    values = []
    for seed in seeds:
        if job.stop is not None and job.stop():
            raise Stopped("stopped between two short runs")
        key: dict[str, Any] = {"options": options, "seconds": round(seconds, 1), "seed": seed}
        trial, is_new = store.run(key, label, partial(run, options, key["seconds"], seed))
        values.append(math.inf if trial.expected is None else trial.expected)
        if trial.expected is None or trial.bits is None:
            text = f"failed: {trial.why}"
        else:
            text = job.told(trial.bits, trial.expected)
        known = "" if is_new else "; done before"
        show(f"{trial.name} {clock(seconds)}", f"{label}: {text}{known}")
    return statistics.fmean(values)


def _train(
    job: Job, source: Any, config: _Config, given: Collection[str], default: Default,
    budget_s: float, options: Mapping[str, Any], seconds: float, seed: int, out: Path,
) -> tuple[float, float]:  # fmt: skip
    """Trains a complete short run; returns what it ended at, and what the whole run would."""
    kept = dict[str, Any]()

    def keep(event: Event) -> None:
        kept[event["event"]] = event

    short = replace(
        config, **options, budget=f"{seconds:g}s", steps=None, epochs=None, seed=seed,
        keep_checkpoints=1,
    )  # fmt: skip
    names = {*given, *options, "budget", "seed"}
    job.train(source, short, given=names, out=out, observers=[keep])
    return job.result(kept["start"], kept["end"], options, default, seconds, budget_s)
