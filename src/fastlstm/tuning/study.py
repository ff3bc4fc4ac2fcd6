"""The Optuna study of `tune`: storage, trials, results.

TPE suggests the settings of a trial. A trial trains complete short runs, each longer than the one
before; Hyperband chooses the trials that get the longer runs. Runs are compared by the expected
result of the whole run, so a large model is not dropped for a slow start.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import sqlite3
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastlstm.errors import (
    BudgetError,
    FormatError,
    MissingExtraError,
    NonFiniteError,
    RunDirectoryError,
    StorageError,
    UsageError,
)
from fastlstm.report.terminal import clock
from fastlstm.system import storage
from fastlstm.tuning.job import Job, Show, Space

try:
    import optuna
    from optuna.trial import FrozenTrial, Trial, TrialState
    from sqlalchemy.exc import SQLAlchemyError
    from sqlalchemy.pool import NullPool
except ImportError as error:
    raise MissingExtraError("tune needs Optuna: pip install 'fastlstm[tune]'") from error

STUDY_FILE = "study.db"
_TRIALS = "trials"
MIN_TRIAL_S = 10.0
_MIN_SHARE = 1 / 12
"""Least share of the budget: shorter runs predict the whole run too badly (docs/predict.md)."""
_LEAST_RUNS, _LONGEST_SHARE = 9, 1 / 8
"""Number of shortest runs in the shortest search; share of the longest run in the time of a
search."""
_REDUCTION = 3
"""Ratio of the lengths of two rungs; a third of the trials gets to the next rung."""
_STARTUP_TRIALS = 4
"""Random trials before TPE in each bracket of Hyperband, with the enqueued ones."""
_RATE_MARGIN = 1.4
"""Largest learning rate over the largest value of the axis; likewise for the smallest."""
_MAX_KNOWN = 12
"""Known suggestions in a row that end the search."""
_CLEAR_GAIN = 0.002
"""Relative gain from which changes are preferred to the default."""
_MIN_IMPORTANCE = 6
"""Fewest trials for the importance of axes."""
_STORAGE_ERRORS = (SQLAlchemyError, sqlite3.Error, optuna.exceptions.OptunaError)

Train = Callable[[Mapping[str, Any], float, int, Path], tuple[float, float]]
"""Trains with options, for seconds, with a seed, in a directory; returns the result of the run and
the expected result of the whole run."""
_NO_FLAGS = {"source", "limits", "machine"}


def least_time_s(budget_s: float) -> float:
    """Returns the seconds that the shortest search takes."""
    return _LEAST_RUNS * _least_trial_s(budget_s)


def _least_trial_s(budget_s: float) -> float:
    return min(max(MIN_TRIAL_S, _MIN_SHARE * budget_s), budget_s)


def rungs_of(time_s: float, budget_s: float) -> list[float]:
    """Returns the seconds of the short runs of a trial, the shortest first."""
    least_s = _least_trial_s(budget_s)
    rungs = [min(budget_s, max(least_s, _LONGEST_SHARE * time_s))]
    while rungs[0] / _REDUCTION >= 0.99 * least_s:
        rungs.insert(0, rungs[0] / _REDUCTION)
    return [round(seconds, 1) for seconds in rungs]


def open_study(path: Path, about: Mapping[str, Any], resume: bool) -> optuna.Study:
    """Returns the study in a directory; makes one in an empty directory.

    Raises:
        UsageError: the study exists, and `resume` is False or `about` differs.
        RunDirectoryError: the directory holds something else.
        FormatError: the file is no study of this fastlstm.
    """
    is_new, about = not (path / STUDY_FILE).exists(), json.loads(json.dumps(about))
    if is_new and any(not entry.name.startswith(".") for entry in path.iterdir()):
        raise RunDirectoryError(
            f"'{path}' holds something else, expected an empty or new directory; give another `out`"
        )
    if not is_new and not resume:
        raise UsageError(
            f"'{path}' holds a search; continue it with `resume=True`, or give another `out`"
        )
    if (path / STUDY_FILE).is_symlink():
        raise _foreign(path)
    study = load_study(path)
    before = about if is_new else study.user_attrs.get("about")
    if not isinstance(before, dict):
        raise _foreign(path)
    _require_same_start(path, before, about)
    if is_new:
        study.set_user_attr("about", about)
    return study


def load_study(path: Path) -> optuna.Study:
    """Returns the study in a directory, a new one without a file; FormatError for another file."""
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    # An own connection allows any character in the path.
    connect = partial(sqlite3.connect, path / STUDY_FILE, timeout=60.0, check_same_thread=False)
    try:  # a damaged file raises all kinds of errors
        stored = optuna.storages.RDBStorage(
            f"sqlite:///{STUDY_FILE}", engine_kwargs={"creator": connect, "poolclass": NullPool}
        )
        study = optuna.create_study(storage=stored, study_name="tune", load_if_exists=True)
        study.get_trials(deepcopy=False)  # reads them
    except (*_STORAGE_ERRORS, RuntimeError, ValueError, KeyError, TypeError, AssertionError):
        raise _foreign(path) from None
    return study


def sampler_of(seed: int) -> optuna.samplers.TPESampler:
    """Returns the sampler of a search."""
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP_TRIALS)


def _foreign(path: Path) -> FormatError:
    return FormatError(
        f"{path / STUDY_FILE} was not written by this fastlstm, or is damaged; give another `out`"
    )


@contextlib.contextmanager
def study_errors(path: Path) -> Iterator[None]:
    """Turns errors of the storage in the block into a StorageError."""
    try:
        yield
    except _STORAGE_ERRORS as error:
        why = str(error).splitlines()[0]
        raise StorageError(f"cannot read or write {path / STUDY_FILE}: {why}") from None


def stored_space(study: optuna.Study, path: Path) -> Space | None:
    """Returns the settings to try that a study stores, or None; FormatError for damaged ones."""
    stored = study.user_attrs.get("space")
    try:
        return None if stored is None else Space(**stored)
    except TypeError:
        raise _foreign(path) from None


@dataclass(frozen=True)
class Objective:
    """The result of a trial: complete short runs of the `rungs` (seconds) with each of the seeds,
    in directories below `path`; `show` gets a line for each run."""

    job: Job
    space: Space
    seeds: Sequence[int]
    rungs: Sequence[float]
    train: Train
    path: Path
    show: Show

    def optimize(self, study: optuna.Study, timeout_s: float) -> None:
        """Runs trials until the time is over, or nothing new is suggested."""
        # One bracket fewer than by default: the last one never prunes.
        longest = max(1, _REDUCTION ** (len(self.rungs) - 1) - 1)
        study.pruner = optuna.pruners.HyperbandPruner(1, longest, _REDUCTION)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            if timeout_s > 0.0:
                study.optimize(self, timeout=timeout_s, callbacks=[_end_without_news])

    def enqueue(self, study: optuna.Study) -> None:
        """Enqueues the default and the most promising changes, or the trials that a stopped search
        did not finish."""
        trials = study.get_trials(deepcopy=False)
        retried = {trial.user_attrs.get("retry_of") for trial in trials}
        for changes in () if trials else ({}, *self.space.first):
            params = {axis: changes.get(axis, v[0]) for axis, v in self.space.values.items()}
            study.enqueue_trial(params)
        for trial in trials:
            if trial.state is TrialState.RUNNING:
                study.tell(trial.number, state=TrialState.FAIL)
            is_broken = trial.state in (TrialState.RUNNING, TrialState.FAIL)
            if is_broken and trial.number not in retried:
                study.enqueue_trial(trial.params, user_attrs={"retry_of": trial.number})

    def __call__(self, trial: Trial) -> float:
        changes, expected = self._suggested(trial), math.inf
        options = self.job.options_of(self.space.options, changes)
        trial.set_user_attr("label", self.job.label_of(changes))
        trial.set_user_attr("options", options)
        for number, seconds in enumerate(self.rungs):
            runs = [self._run(trial, options, seconds, seed) for seed in self.seeds]
            expected = statistics.fmean(map(_expected, runs))
            trial.report(expected, _REDUCTION**number)
            is_last = number == len(self.rungs) - 1
            is_worse = not is_last and trial.should_prune() and bool(changes)
            if math.isinf(expected) or is_worse:
                raise optuna.TrialPruned
        return expected

    def _suggested(self, trial: Trial) -> dict[str, Any]:
        changes = dict[str, Any]()
        for axis, values in self.space.values.items():
            value: Any
            if axis == "lr":
                low, high = min(values) / _RATE_MARGIN, max(values) * _RATE_MARGIN
                value = float(f"{trial.suggest_float('lr', low, high, log=True):.3g}")
            else:
                value = trial.suggest_categorical(axis, values)
            if value != values[0]:
                changes[axis] = value
        return changes

    def _run(
        self, trial: Trial, options: Mapping[str, Any], seconds: float, seed: int
    ) -> dict[str, Any]:
        """Returns a short run, trained now or by an earlier trial with these settings."""
        label, key = trial.user_attrs["label"], f"{seconds:g}s-{seed}"
        known = runs_of(trial.study)
        run = next((r for r in known if (r["label"], r["key"]) == (label, key)), None)
        is_new = run is None
        if run is None:
            name = f"{trial.number:03d}-{key}"
            run = {"key": key, "seconds": seconds, "seed": seed, "name": name}
            run |= self._trained(name, options, seconds, seed)
        trial.set_user_attr("runs", {**trial.user_attrs.get("runs", {}), key: run})
        if is_new:
            text = f"failed: {run['why']}"
            if run["expected"] is not None:
                text = self.job.figure(run["bits"])
                if run["expected"] != run["bits"]:
                    text += f", whole run expected {self.job.figure(run['expected'], False)}"
                others = [_expected(r) for r in known if r["seconds"] == seconds]
                text += "; best so far" * (run["expected"] <= min(others, default=-math.inf))
            self.show(f"{trial.number:03d} {clock(seconds)}", f"{label}: {text}")
        return run

    def _trained(
        self, name: str, options: Mapping[str, Any], seconds: float, seed: int
    ) -> dict[str, Any]:
        out = self.path / _TRIALS / name
        if out.exists():  # the search was killed in this run
            with storage.storage_errors(out, "remove an unfinished run"):
                shutil.rmtree(out)
        try:
            bits, expected = self.train(options, seconds, seed, out)
        except (NonFiniteError, BudgetError) as error:
            return {"bits": None, "expected": None, "why": error.lines()[0]}
        return {"bits": bits, "expected": expected, "why": None}


def _expected(run: Mapping[str, Any]) -> float:
    """Returns the expected result of the whole run; infinite for a failed run."""
    return math.inf if run["expected"] is None else float(run["expected"])


def _end_without_news(study: optuna.Study, trial: FrozenTrial) -> None:
    """Ends a search after too many known suggestions."""
    trials = study.get_trials(deepcopy=False)
    labels = [each.user_attrs["label"] for each in trials if "label" in each.user_attrs]
    if set(labels[-_MAX_KNOWN:]) <= set(labels[:-_MAX_KNOWN]):
        study.stop()


def runs_of(study: optuna.Study) -> list[dict[str, Any]]:
    """Returns all short runs of a study, with label and options of their trials."""
    found = dict[str, dict[str, Any]]()
    for trial in study.get_trials(deepcopy=False):
        about = {name: trial.user_attrs.get(name) for name in ("label", "options")}
        for run in trial.user_attrs.get("runs", {}).values():
            found.setdefault(run["name"], {**about, **run})
    return list(found.values())


def spent_s(study: optuna.Study) -> float:
    """Returns the seconds of all finished trials."""
    trials = study.get_trials(deepcopy=False)
    return sum(trial.duration.total_seconds() for trial in trials if trial.duration is not None)


def best_trial(study: optuna.Study) -> tuple[FrozenTrial, float, float]:
    """Returns the best trial, its expected result, and the expected result of the default.

    The default is the best trial unless another trial is clearly better. Raises UsageError if every
    run failed.
    """

    def expected(trial: FrozenTrial) -> float:
        return trial.intermediate_values[trial.last_step or 0]

    def rank(trial: FrozenTrial) -> tuple[int, float]:
        return -(trial.last_step or 0), expected(trial)

    trials = [t for t in study.get_trials(deepcopy=False) if t.intermediate_values]
    finite = sorted((t for t in trials if math.isfinite(expected(t))), key=rank)
    if not finite:
        why = [run["why"] for run in runs_of(study)]
        raise UsageError(f"every short run failed: {why[-1] if why else 'none has ended'}")
    best, default = finite[0], next((t for t in finite if t.user_attrs["label"] == "default"), None)
    if default is None:
        return best, expected(best), math.inf
    if best.last_step != default.last_step or (
        expected(best) >= (1.0 - _CLEAR_GAIN) * expected(default)
    ):
        best = default
    return best, expected(best), expected(default)


def importance(study: optuna.Study) -> dict[str, float]:
    """Returns the importance of each axis by Optuna, from the first run of every trial, which have
    the same length; empty for too few trials."""
    first = optuna.create_study()
    for trial in study.get_trials(deepcopy=False):
        if math.isfinite(value := trial.intermediate_values.get(1, math.inf)):
            made = optuna.trial.create_trial(
                params=trial.params, distributions=trial.distributions, value=value
            )
            first.add_trial(made)
    if len(first.trials) < _MIN_IMPORTANCE or len(first.trials[0].params) < 2:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        found = optuna.importance.get_param_importances(first, evaluator=evaluator)
    return {axis: round(share, 3) for axis, share in found.items() if math.isfinite(share)}


def _require_same_start(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises UsageError if an option differs from the first start of a search."""
    first, asked = _flat(before), _flat(now)
    for name in dict.fromkeys([*asked, *first]):
        old, new = first.get(name), asked.get(name)
        if old == new:
            continue
        if name in _NO_FLAGS:
            started = f"with another {name}: {old!s:.200}, not {new!s:.200}"
        elif old is None:
            started = f"without `{name}`"
        else:
            started = f"with `{name}={old!r:.200}`, not {new!r:.200}"
        raise UsageError(f"'{path}' was started {started}; give another `out`")


def _flat(about: Mapping[str, Any]) -> dict[str, Any]:
    options = about.get("options")
    rest = {name: value for name, value in about.items() if name != "options"}
    return rest | (dict(options) if isinstance(options, Mapping) else {})
