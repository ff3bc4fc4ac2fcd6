"""One start of a forecaster's compression that trains."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from typing import Any

from fastlstm.compression.callbacks import compression_callbacks
from fastlstm.compression.forecast_measuring import Measuring
from fastlstm.compression.forecast_result import (
    compression_of,
    described,
    is_own_table,
    model_record,
    start_of,
    with_rounded_weights,
)
from fastlstm.compression.forecast_task import Approval, CompressedForecastTask
from fastlstm.compression.forecast_teacher import read_teacher
from fastlstm.compression.job import Job
from fastlstm.compression.options import COMPRESS_MAY_CHANGE, TRAINING, CompressConfig
from fastlstm.compression.report import (
    REPORT_FILE,
    CompressReport,
    TrainingFigures,
    quality_error,
    unfinished_error,
)
from fastlstm.compression.teacher_time import TeacherTime
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.files import StoredForecaster
from fastlstm.forecast.train import source_text, train_forecaster
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.training.resuming import resumed_config
from fastlstm.training.trainer import Trainer

_BUDGET = "5m"
_RATE = 0.5
"""Of the peak learning rate of the run that a chain of compressions began with, for training that
continues from its weights."""
_ENDS = ("steps", "epochs", "budget")
_OPEN = (*_ENDS, "eval_every", "checkpoint_every", "log_every", "threads")
"""Options of training that are never the source's."""


class ForecastCompression:
    """One start of a compression that trains."""

    def __init__(self, job: Job, source: StoredForecaster, table: Any) -> None:
        config = _resumed(job)
        self._job, self._config, self._source, self._table = job, config, source, table
        self._before = None if source.compression is None else source.compression.about
        self._report: CompressReport | None = None
        self._is_own = False
        self._teacher: StoredForecaster | None = None
        if config.is_taught:
            own = config.distil is None
            self._teacher = source if own else read_teacher(str(config.distil), source)
        self._base = start_of(config, source, compression_of(job, config, source, table))
        self._measuring = Measuring(job.run, config, source)
        self._measuring.notes += job.notes

    def run(self) -> CompressReport:
        job, options = self._job, _options(self._job, self._config, self._base)
        callbacks = compression_callbacks(self._config, self._before)
        callbacks += [TeacherTime()] if self._config.is_taught else []
        train_forecaster(
            self._table, options, out=job.out, resume=job.resume,
            given=[n for n in TRAINING if n in job.given and hasattr(options, n)],
            observers=job.observers, callbacks=[*callbacks, *job.callbacks],
            stop=job.stop, start=self._base, make_task=self._make_task, needs_steps=False,
            began=job.started,
        )  # fmt: skip
        if self._report is None:
            raise unfinished_error()
        if not self._report.is_published:
            raise quality_error(self._report, is_trained=True)
        return self._report

    def _make_task(self, *args: Any) -> CompressedForecastTask:
        *_, inputs, _, _, _, closing = args
        self._is_own = is_own_table(closing.dataset, closing.split, self._source)
        self._measuring.begin(
            closing.split, inputs, source_text(self._table), is_own=self._is_own, is_trained=True,
            budget_s=closing.budget_s,
        )  # fmt: skip
        return CompressedForecastTask(
            *args,
            teacher=None if self._teacher is None else copy.deepcopy(self._teacher.network),
            alpha=self._config.alpha,
            finished=self._finished,
            approve=self._approve,
            measuring_s=self._measuring.seconds,
        )

    def _approve(self, stored: StoredForecaster, trainer: Trainer, teacher_s: float) -> Approval:
        """Measures the result; returns the report, and what to publish if it may be.

        Where training served a rounding alone, RUN's weights rounded to the nearest are measured
        too, and the better ones are published.
        """
        progress = trainer.progress
        if progress.best_step < 0:
            return {}, None
        training = TrainingFigures.of(trainer, teacher_s)
        reports: list[tuple[CompressReport, StoredForecaster]] = []
        with progress.counted("measuring"):
            for result in self._results(stored):
                report = self._measuring.report(result, self._job.out, training)[0]
                reports.append((report, result))
        self._report, best = min(reports, key=lambda pair: _difference(pair[0]))
        if self._report.is_published and best is not stored:
            text = "training lost more than the same without training, which is"
            trainer.say("warning", f"{text} published instead")
        about = {"compression": self._report.to_dict()}
        if not self._report.is_published:
            return about, None
        return about, (best, {REPORT_FILE: self._report.to_json()})

    def _finished(self, stored: StoredForecaster) -> StoredForecaster:
        """Returns what training made, as it is to be stored."""
        return described(with_rounded_weights(stored), has_own_intervals=self._is_own)

    def _results(self, stored: StoredForecaster) -> list[StoredForecaster]:
        """Returns the forecasters that may be published, the trained one first."""
        if not self._config.needs_no_training:
            return [stored]
        plain = dataclasses.replace(self._source, compression=self._base.compression)
        plain = self._measuring.calibrated(with_rounded_weights(plain))
        return [stored, described(plain, has_own_intervals=self._is_own, is_trained=False)]


def _resumed(job: Job) -> CompressConfig:
    """Returns the options of a compression; of one that continues those it was started with.

    Raises:
        ConfigError: an option differs that must not change.
        FormatError: it was started from another model, or by another command.
    """
    checkpoint = RunDirectory(job.out).intact_checkpoint() if job.resume else None
    if checkpoint is None:
        return job.config
    files = RunDirectory(checkpoint).read_published(["config.json"])[1]
    sha256 = model_record(job.run).sha256
    stored = json.loads(files["config.json"])
    first = job.first_options(stored, sha256)
    if first.distil is not None:
        job.require_same_teacher(stored, model_record(first.distil).sha256)
    return resumed_config(job.config, job.given, first, first, COMPRESS_MAY_CHANGE)


def _difference(report: CompressReport) -> float:
    """Returns how much a result lost, on the windows that it and the source were both scored on."""
    return math.inf if report.change is None else report.change.difference


def _options(job: Job, config: CompressConfig, base: StoredForecaster) -> ForecastConfig:
    """Returns the options of the training."""
    fields = {field.name for field in dataclasses.fields(ForecastConfig)} - {"dropout"}
    values = {n: getattr(config, n) for n in TRAINING if n in fields}
    values = {n: value for n, value in values.items() if value is not None or n in _OPEN}
    if all(values[name] is None for name in _ENDS):
        values["budget"] = _BUDGET
    if "precision" not in job.given:
        del values["precision"]  # of a forecaster it is not chosen by measuring
    if config.learning_rate is None:
        assert base.compression is not None
        peak = base.compression.about["source"]["learning_rate"]
        is_open = config.is_new_student or peak is None
        values["learning_rate"] = None if is_open else _RATE * peak
    return dataclasses.replace(base.given, **values)
