"""Campaigns of `tune_quality` on tables."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tune_campaign import Campaign

from fastlstm.forecast import size_plan
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.error_measures import QuantileScores
from fastlstm.forecast.data.preparation import prepare
from fastlstm.forecast.data.splits import split_table
from fastlstm.forecast.evaluation import evaluate_forecasts
from fastlstm.forecast.plan import LEARNING_RATES, untrained_forecaster
from fastlstm.forecast.task import ForecastTask
from fastlstm.forecast.train import train_forecaster
from fastlstm.training import step_time
from fastlstm.tuning.job import Space
from fastlstm.tuning.planned_run import plan_run
from fastlstm.tuning.table_job import TableJob, TrialTask
from fastlstm.tuning.tune import Search

GRID: dict[str, list[Any]] = {
    "hidden_size": [64, 128, 256],
    "input_size": [(96, 24), (192, 48), (336, 48), (720, 48)],
    "normalize": [("last", 1.0, 0.5), ("last", 2.0, 0.5), ("last", 1.0, 0.2),
                  ("standard", 1.0, 0.5)],
}  # fmt: skip
"""The 48 settings; with the input the patch that it has by default, with the normalisation the
learning rate over the default one, and dropout."""
_SCORED, _SEASON = 2048, 24
_NUM_TIMED = 3


class WholeTask(TrialTask):
    """A forecaster that is evaluated as a whole run; what closes a run is left out."""

    min_scored, max_scored = ForecastTask.min_scored, ForecastTask.max_scored


class TableCampaign(Campaign):
    """Tables: the validation loss, the error in deviations of the training rows."""

    names = ("hidden_size", "batch_size", "learning_rate", "dropout", "input_size", "patch",
             "normalize")  # fmt: skip
    factors = (("hidden_size",), ("batch_size",), ("input_size", "patch"))
    job = TableJob()
    num_finalists = 5

    def __init__(self, path: Path, data: Path, budget_s: float, most: int) -> None:
        super().__init__(path, data, budget_s, most)
        self.fields = {"horizon": 96, "threads": 1, "precision": "fp32", "tensorboard": False}

    def rates(self) -> None:
        whole_s = self.budget_s / size_plan.TRAINING_SHARE
        config = ForecastConfig(**self.fields, budget=f"{whole_s:g}s")
        given, found = {*self.fields, "budget"}, list[Space]()
        search = Search(None, config, given, Path(), axes=tuple(self.job.fields))
        with (
            mock.patch.object(step_time, "time", SimpleNamespace(perf_counter=time.process_time)),
            mock.patch.object(size_plan, "MIN_BUDGET_S", 0.0),
        ):
            plan_run(
                str(self.data), config, given, start=self.job.train,
                look=lambda trainer: found.append(self.job.prepare(trainer, search, print)),
            )  # fmt: skip
            dataset = prepare(str(self.data), config, lambda done, total: None)
            split = split_table(dataset.table, dataset.frequency, config.split)
            rates = {}
            for options in [*self.around(found[0]), *self.settings()]:
                if (key := self.rate_key(options)) not in rates:
                    timed = replace(config, **options)
                    untrained = untrained_forecaster(timed, timed, dataset, split)
                    step_s = min(
                        size_plan.step_seconds(untrained, dataset, split) for _ in range(_NUM_TIMED)
                    )
                    rates[key] = self.units(options) / step_s
                    print(f"{key}: {1000 * step_s:.1f} ms per step", flush=True)
        self._keep({"kind": "rates", "default": asdict(found[0]), "rates": rates})

    def settings(self) -> list[dict[str, Any]]:
        found = []
        rate = LEARNING_RATES[ForecastConfig.optimizer]
        for size, (length, patch), (kind, factor, dropout) in itertools.product(*GRID.values()):
            found.append({
                "hidden_size": size, "batch_size": 32, "learning_rate": factor * rate,
                "dropout": dropout, "input_size": length, "patch": patch, "normalize": kind,
            })  # fmt: skip
        return found

    def units(self, options: Mapping[str, Any]) -> int:
        return int(options["batch_size"])

    def rate_key(self, options: Mapping[str, Any]) -> str:
        names = ("hidden_size", "batch_size", "input_size", "patch")
        return "/".join(str(options[name]) for name in names)

    def label(self, options: Mapping[str, Any]) -> str:
        more = (f"{options[name]}" for name in ("learning_rate", "dropout", "normalize"))
        return "/".join([self.rate_key(options), *more])

    def result(self, row: Mapping[str, Any]) -> float:
        return float(row["valid_loss"])

    def train(self, options: Mapping[str, Any], steps: int, seed: int) -> dict[str, Any]:
        config = ForecastConfig(**self.fields, **options, steps=steps, seed=seed)
        trained = train_forecaster(str(self.data), config, make_task=WholeTask)
        sizes, scores = trained.stored.network.config, dict[str, dict[str, float]]()
        split = split_table(trained.dataset.table, trained.dataset.frequency, config.split)
        for part in ("valid", "test"):
            index = split.windows(trained.dataset.table, part, sizes.input_size, sizes.horizon)
            scores[part] = evaluate_forecasts(
                trained.stored, trained.inputs, index.rows(_SCORED), _SEASON,
                QuantileScores((), (), has_crps=False), split, is_scaled=True,
            )["forecaster"]  # fmt: skip
        return {
            "valid_loss": scores["valid"]["mae"], "test_mse": scores["test"]["mse"],
            "best_step": trained.fitted.best_step, "best_loss": trained.fitted.best_loss,
        }  # fmt: skip
