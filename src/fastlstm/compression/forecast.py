"""Compressing a forecaster: `compress_forecaster`."""

from __future__ import annotations

import copy
import dataclasses
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastlstm.compression.callbacks import compression_callbacks
from fastlstm.compression.forecast_figures import speed_of
from fastlstm.compression.forecast_measuring import Measuring
from fastlstm.compression.forecast_task import Approval, CompressedForecastTask
from fastlstm.compression.forecast_teacher import read_teacher
from fastlstm.compression.goal import WAYS_OF_FORECASTERS, Attempt
from fastlstm.compression.job import Job, peak_rate
from fastlstm.compression.options import (
    COMPRESS_MAY_CHANGE,
    TRAINING,
    CompressConfig,
)
from fastlstm.compression.report import (
    REPORT_FILE,
    CompressReport,
    TrainingFigures,
    quality_error,
    unfinished_error,
)
from fastlstm.compression.teacher_time import TeacherTime
from fastlstm.compression.units import removed_share, without_units
from fastlstm.errors import (
    ConfigError,
    DataError,
    FastLSTMError,
    Setting,
)
from fastlstm.forecast.calibration import calibrate
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.preparation import prepare
from fastlstm.forecast.data.splits import Split, split_table
from fastlstm.forecast.files import MODEL_FILE, StoredForecaster, forecaster_files, read_forecaster
from fastlstm.forecast.model.network import ForecastNetwork
from fastlstm.forecast.table_schema import apply_schema
from fastlstm.forecast.train import fitted_scaler, source_text, train_forecaster
from fastlstm.forecast.weights_file import Compression
from fastlstm.report.history import read_history
from fastlstm.report.page import write_report
from fastlstm.runs.manifest import FileRecord, read_manifest
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.runs.weight_formats import quantize, rounded
from fastlstm.training.resuming import checkpoint_to_resume, resumed_config
from fastlstm.training.session import locked_run
from fastlstm.training.trainer import Trainer

_BUDGET = "5m"
_RATE = 0.5
"""Of the peak learning rate of the run that a chain of compressions began with, for training that
continues from its weights."""
_ENDS = ("steps", "epochs", "budget")
_OPEN = (*_ENDS, "eval_every", "checkpoint_every", "log_every", "threads")
"""Options of training that are never the source's."""
_OF_TEXTS = {"temperature": 2.0, "match_hidden": 0.0}


def compress_forecaster(job: Job) -> CompressReport:
    """Rounds a forecaster, or trains a smaller one, and measures it beside its source."""
    for name in _OF_TEXTS:
        if name in job.given:
            raise ConfigError(
                Setting(name), " is about tokens and hidden states, a forecaster learns forecasts;"
                " leave it out"
            )  # fmt: skip
    source = read_forecaster(job.run)
    table, why_not = _table_of(job, source)
    is_resumed = job.resume and bool(RunDirectory(job.out).checkpoints())
    if not is_resumed:
        before = None if source.compression is None else source.compression.about
        job.config.require_more_zeros(before)
        job = job.with_goal_reached(
            WAYS_OF_FORECASTERS, lambda config: _attempt(job, source, config), "windows"
        )
        job.config.require_teacher(job.config.distils)
    is_trained = is_resumed or job.config.trains
    if not is_trained:
        job.config.require_work()
    elif table is None:
        raise DataError(f"{why_not}; give the table as ", Setting("data"))
    if is_trained:
        return _Training(job, source, table).run()
    return _round(job, source, table, why_not)


def _attempt(job: Job, source: StoredForecaster, config: CompressConfig) -> Attempt:
    """Prunes and rounds the source's weights without training, and measures what comes out."""
    small = _start_of(job, config, source, _about(job, config, source, None))
    result = with_rounded_weights(small)
    num_bytes = len(forecaster_files(result)[MODEL_FILE])
    return Attempt(num_bytes, speed_of(result, config.streams) if config.target else None)


def _table_of(job: Job, source: StoredForecaster) -> tuple[Any, str]:
    """Returns the table to train and measure on, and why there is none."""
    if job.data is not None:
        return job.data, ""
    about = {} if source.compression is None else source.compression.about
    recorded = read_history(RunDirectory(job.run).metrics_path).start.get("source")
    name = str(recorded or about.get("data") or "")
    paths = name.split(", ")
    if not name:
        return None, f"{job.run} does not say what it was trained on"
    if not all(Path(path).is_file() for path in paths):
        return None, f"the table of {job.run}, {name:.200}, is not there any more"
    return paths if len(paths) > 1 else paths[0], ""


def _is_own(table: Any, dataset: SeriesDataset, split: Split, source: StoredForecaster) -> bool:
    """Returns whether a source was trained and calibrated on a table."""
    about = None if source.compression is None else source.compression.about
    if about is not None and about.get("data") != source_text(table):
        return False
    own, other = source.scaler, fitted_scaler(source.config, dataset, split)
    return np.array_equal(own.mean, other.mean) and np.array_equal(own.std, other.std)


def _record(run: str | Path) -> FileRecord:
    return read_manifest(Path(run)).files[MODEL_FILE]


def _about(job: Job, config: CompressConfig, source: StoredForecaster, table: Any) -> Compression:
    record, share = _record(job.run), config.prune
    teacher = None
    if config.distil is not None:
        teacher = {"path": config.distil, "model_sha256": _record(config.distil).sha256}
    before = {} if source.compression is None else source.compression.about
    train = {"learning_rate": source.config.learning_rate}
    if share is not None and config.structured == "units":
        share = removed_share(source.network.config.hidden_size, share)
    own = None if share is None else config.structured
    is_kept = own is None and not config.is_new_student  # zeros of the source stay
    return Compression(
        {
            "weights": config.to,
            "prune": before.get("prune") if is_kept else share,
            "structured": before.get("structured") if is_kept else own,
            "options": dataclasses.asdict(config),
            "source": {
                "path": str(job.run),
                "model_sha256": record.sha256,
                "model_bytes": record.size,
                "learning_rate": peak_rate({"compression": before, "train": train}),
                "model": dataclasses.asdict(source.network.config),
            },
            "teacher": teacher,
            "data": None if table is None else source_text(table),
        }
    )


def with_rounded_weights(stored: StoredForecaster) -> StoredForecaster:
    """Returns a forecaster with the weights that its file will give back.

    Raises:
        ConfigError: a weight is too large for the format.
    """
    assert stored.compression is not None
    to, network = stored.compression.weights, copy.deepcopy(stored.network).cpu().eval()
    weights: dict[str, Any] = {n: p.detach().numpy() for n, p in network.named_parameters()}
    matrices = {}
    if to in ("int8", "int4"):
        matrices = {name: quantize(w, to) for name, w in weights.items() if w.ndim == 2}
    floats = rounded({**weights, **matrices}, to)
    network.load_state_dict({n: torch.from_numpy(w) for n, w in floats.items()}, strict=False)
    compression = dataclasses.replace(stored.compression, matrices=matrices)
    return dataclasses.replace(stored, network=network, compression=compression)


def _round(job: Job, source: StoredForecaster, table: Any, why_not: str) -> CompressReport:
    with locked_run(job.out) as run:
        assert run is not None
        checkpoint_to_resume(run, False, lambda level, text: None)  # refuses a run that is there
        compression = _about(job, job.config, source, table)
        result = with_rounded_weights(dataclasses.replace(source, compression=compression))
        measuring = Measuring(job.run, job.config, source)
        measuring.notes += job.notes
        if table is None:
            measuring.why_not = why_not
            measuring.notes.append("the intervals are those of the source, not calibrated anew")
        else:
            dataset = prepare(table, source.config, like=source.schema.timeline)
            inputs = apply_schema(dataset, source.schema, source.scaler, source.static_scale)
            split = split_table(dataset.table, dataset.frequency, source.config.split)
            is_own = _is_own(table, dataset, split, source)
            valid = measuring.begin(
                split, inputs, source_text(table), is_own=is_own, is_trained=False
            )
            if valid is not None:
                result = dataclasses.replace(
                    result, calibration=calibrate(result.network, inputs, valid)
                )
        report, files = measuring.report(result, job.out, None)
        if not report.is_published:
            raise quality_error(report, is_trained=False)
        run.publish(files)
        with suppress(FastLSTMError):  # the model is there; a page about it is not worth an error
            write_report(run.path)
    return report


class _Training:
    """One start of a compression that trains."""

    def __init__(self, job: Job, source: StoredForecaster, table: Any) -> None:
        config = _resumed(job)
        self._job, self._config, self._source, self._table = job, config, source, table
        self._before = None if source.compression is None else source.compression.about
        self._report: CompressReport | None = None
        self._teacher: StoredForecaster | None = None
        if config.distils:
            own = config.distil is None
            self._teacher = source if own else read_teacher(str(config.distil), source)
        self._base = _start_of(job, config, source, _about(job, config, source, table))
        self._measuring = Measuring(job.run, config, source)
        self._measuring.notes += job.notes

    def run(self) -> CompressReport:
        job, options = self._job, _options(self._job, self._config, self._base)
        callbacks = compression_callbacks(self._config, self._before)
        callbacks += [TeacherTime()] if self._config.distils else []
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
        name = source_text(self._table)
        self._measuring.begin(
            closing.split, inputs, name, is_trained=True, budget_s=closing.budget_s,
            is_own=_is_own(self._table, closing.dataset, closing.split, self._source),
        )  # fmt: skip
        return CompressedForecastTask(
            *args,
            teacher=None if self._teacher is None else copy.deepcopy(self._teacher.network),
            alpha=self._config.alpha,
            finished=with_rounded_weights,
            approve=self._approve,
            measuring_s=self._measuring.seconds,
        )

    def _approve(self, stored: StoredForecaster, trainer: Trainer, teacher_s: float) -> Approval:
        """Measures the result; returns the report, as a file too if it may be published."""
        progress = trainer.progress
        if progress.best_step < 0:
            return {}, None
        training = TrainingFigures.of(trainer, teacher_s)
        with progress.counted("measuring"):
            self._report, files = self._measuring.report(stored, self._job.out, training)
        about = {"compression": self._report.to_dict()}
        return about, {REPORT_FILE: files[REPORT_FILE]} if self._report.is_published else None


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
    sha256 = _record(job.run).sha256
    stored = json.loads(files["config.json"])
    first = job.first_options(stored, sha256)
    if first.distil is not None:
        job.require_same_teacher(stored, _record(first.distil).sha256)
    return resumed_config(job.config, job.given, first, first, COMPRESS_MAY_CHANGE)


def _start_of(
    job: Job, config: CompressConfig, source: StoredForecaster, compression: Compression
) -> StoredForecaster:
    """Returns the forecaster that is trained: RUN's, without some units, or a new one."""
    sizes, network = source.network.config, copy.deepcopy(source.network)
    buffers, weights = (
        dict(network.named_buffers()),
        dict[str, torch.Tensor](network.named_parameters()),
    )
    changes: dict[str, Any] = {
        name: getattr(config, name)
        for name in ("hidden_size", "num_layers", "dropout")
        if getattr(config, name) is not None
    }
    if config.prune is not None and config.structured == "units":
        weights, smaller = without_units(weights, sizes, config.prune)
        changes["hidden_size"] = smaller.hidden_size
    if changes:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(config.seed)
            network = ForecastNetwork(dataclasses.replace(sizes, **changes))
        if not config.is_new_student:
            network.load_state_dict({**buffers, **weights})
    resolved, given = (dataclasses.replace(c, **changes) for c in (source.config, source.given))
    return dataclasses.replace(
        source, config=resolved, given=given, network=network, compression=compression
    )


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
