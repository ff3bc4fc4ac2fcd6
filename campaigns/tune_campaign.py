"""What campaigns of `tune_quality` on texts and tables have in common."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import optuna

from fastlstm.errors import Stopped
from fastlstm.tuning import study
from fastlstm.tuning.job import Job, Space, single_changes

SHARE = 0.15
SEEDS = (0, 1, 2)


class Campaign(ABC):
    """Runs of one text or table and budget, kept in a file.

    Attributes:
        names: options that a setting has.
        factors: groups of them that change the time of a step.
        job: what is tuned.
        num_finalists: settings of the grid that are trained with all seeds.
        fields: options of every run.
        share: of the runs of grid and seeds that this process trains.
    """

    names: ClassVar[tuple[str, ...]]
    factors: ClassVar[tuple[tuple[str, ...], ...]]
    job: ClassVar[Job]
    num_finalists: ClassVar[int] = 3

    def __init__(self, path: Path, data: Path, budget_s: float, most: int) -> None:
        self.path, self.data, self.budget_s, self.left = path, data, budget_s, most
        self.fields: dict[str, Any] = {}
        self.share = slice(None)
        self.rows = self._stored()

    @abstractmethod
    def rates(self) -> None:
        """Keeps the default of the budget and the units/s of every setting near it."""

    @abstractmethod
    def settings(self) -> list[dict[str, Any]]:
        """Returns the options of the 48 settings."""

    @abstractmethod
    def units(self, options: Mapping[str, Any]) -> int:
        """Returns the units of a step."""

    @abstractmethod
    def rate_key(self, options: Mapping[str, Any]) -> str:
        """Returns what the rate depends on."""

    @abstractmethod
    def label(self, options: Mapping[str, Any]) -> str:
        """Returns a setting as words."""

    @abstractmethod
    def train(self, options: Mapping[str, Any], steps: int, seed: int) -> dict[str, Any]:
        """Returns the start and the end of a run, and further results."""

    @abstractmethod
    def result(self, row: Mapping[str, Any]) -> float:
        """Returns what a run ended at."""

    def expected(
        self, row: Mapping[str, Any], space: Space, seconds: float, whole_s: float
    ) -> float:
        """Returns what the search expects of the whole run, from a run of so many seconds."""
        return self.result(row)

    def search(self, seed: int = 0) -> None:
        """Runs the search with a part of the time of the grid."""
        study.MIN_TRIAL_S = study._MIN_SHARE * self.budget_s
        used_s, space = 0.0, Space(**self._setup["default"])
        time_s = SHARE * len(self.settings()) * self.budget_s

        def train(
            chosen: Mapping[str, Any], seconds: float, run_seed: int, out: Path
        ) -> tuple[float, float]:
            nonlocal used_s
            if used_s + seconds > time_s:
                raise Stopped("the time is used up")
            used_s += seconds
            options = {name: chosen[name] for name in self.names}
            steps, whole = self._steps(options, seconds), self._steps(options, self.budget_s)
            row = self._run(options, steps, run_seed)
            expected = self.expected(row, space, seconds, seconds * whole / steps)
            return self.result(row), expected

        rungs = study.rungs_of(time_s, self.budget_s)
        show = functools.partial(print, flush=True)
        objective = study.Objective(self.job, space, SEEDS[:1], rungs, train, Path(), show)
        found = optuna.create_study(sampler=study.sampler_of(seed))
        objective.enqueue(found)
        with contextlib.suppress(Stopped):
            objective.optimize(found, math.inf)
        best, expected, of_default = study.best_trial(found)
        label, options = best.user_attrs["label"], best.user_attrs["options"]
        print(f"search {seed}: {label}, {self.job.figure(expected)} expected beside"
              f" {self.job.figure(of_default)}; {len(found.trials)} trials, {used_s:.0f} s of"
              " training")  # fmt: skip
        options = {name: options[name] for name in self.names}
        self._keep({"kind": "choice", "options": options, "label": label})

    def grid(self) -> None:
        """Trains every setting, and the default, for the whole budget."""
        for options in [self._options({}), *self.settings()][self.share]:
            print(f"{self.label(options)}: {self._whole(options, SEEDS[0]):.4f}", flush=True)

    def seeds(self) -> None:
        """Trains the best settings, the default and the choice with all seeds."""
        for options, seed in list(itertools.product(self._finalists(), SEEDS))[self.share]:
            found = self._whole(options, seed)
            print(f"{self.label(options)}, seed {seed}: {found:.4f}", flush=True)

    def report(self) -> None:
        """Prints the best settings and those of search and default, paired by seed."""
        finalists = self._finalists()
        found = np.array([[self._whole(o, seed) for seed in SEEDS] for o in finalists])
        best = found[2:].mean(axis=1).min()
        names = ["default", "search", *(f"best {n}" for n in range(1, len(finalists) - 1))]
        for name, options, each in zip(names, finalists, found, strict=True):
            rows = [self._row(options, seed) for seed in SEEDS]
            test = [row["test_mse"] for row in rows if "test_mse" in row]
            more = f"; test MSE {np.mean(test):.4f} {np.round(test, 4).tolist()}" if test else ""
            print(f"{name}: {self.label(options)}: {each.mean():.4f} ({each.mean() - best:+.4f},"
                  f" {100 * (each.mean() / best - 1):+.1f} % from the best; seeds"
                  f" {each.round(4).tolist()}{more})")  # fmt: skip

    @property
    def _setup(self) -> dict[str, Any]:
        return [row for row in self.rows if row["kind"] == "rates" and self._is_own(row)][-1]

    def _finalists(self) -> list[dict[str, Any]]:
        """Returns the options of default, choice and the best of the grid."""
        choice = [r for r in self.rows if r["kind"] == "choice" and self._is_own(r)][-1]
        ranked = sorted(self.settings(), key=lambda o: self._whole(o, SEEDS[0]))
        return [self._options({}), choice["options"], *ranked[: self.num_finalists]]

    def _options(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        options = self.job.options_of(self._setup["default"]["options"], changes)
        return {name: options[name] for name in self.names}

    def around(self, space: Space) -> list[dict[str, Any]]:
        """Returns the options of the default and of its changes."""
        changes = ({}, *space.first, *single_changes(space.values))
        every = [self.job.options_of(space.options, each) for each in changes]
        return [{name: options[name] for name in self.names} for options in every]

    def _rate(self, options: Mapping[str, Any]) -> float | None:
        return self._setup["rates"].get(self.rate_key(options))

    def _steps(self, options: Mapping[str, Any], seconds: float) -> int:
        """Returns the steps in so many seconds; by factors, if the settings were not timed."""
        rate = self._rate(options)
        if rate is None:
            own = self._options({})
            rate = self._rate(own)
            for names in self.factors:
                changed = {**own, **{name: options[name] for name in names}}
                rate *= self._rate(changed) / self._rate(own)
        return max(1, int(seconds * rate / self.units(options)))

    def _whole(self, options: Mapping[str, Any], seed: int) -> float:
        return self.result(self._row(options, seed))

    def _row(self, options: Mapping[str, Any], seed: int) -> dict[str, Any]:
        return self._run(options, self._steps(options, self.budget_s), seed)

    def _run(self, options: Mapping[str, Any], steps: int, seed: int) -> dict[str, Any]:
        """Returns a run, trained now or known."""
        key = {"kind": "run", "options": dict(options), "steps": steps, "seed": seed}
        self.rows = self._stored()  # with those of another process
        for row in self.rows:
            if row["text"] == self.data.name and all(row.get(n) == v for n, v in key.items()):
                return row
        if self.left == 0:
            sys.exit("more runs are left: start it again")
        self.left -= 1
        return self._keep({**key, **self.train(options, steps, seed)})

    def _is_own(self, row: Mapping[str, Any]) -> bool:
        return row["text"] == self.data.name and row.get("budget_s") == self.budget_s

    def _stored(self) -> list[dict[str, Any]]:
        lines = self.path.read_text("utf-8").splitlines() if self.path.exists() else []
        return [json.loads(line) for line in lines]

    def _keep(self, row: dict[str, Any]) -> dict[str, Any]:
        row = {"text": self.data.name, "budget_s": self.budget_s, **row}
        row = json.loads(json.dumps(row))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        return row
