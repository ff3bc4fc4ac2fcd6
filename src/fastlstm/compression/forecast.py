"""Compressing a forecaster: `compress_forecaster`."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastlstm.compression.forecast_figures import speed_of
from fastlstm.compression.forecast_measuring import Measuring
from fastlstm.compression.forecast_result import (
    compression_of,
    described,
    has_own_intervals,
    is_own_table,
    start_of,
    with_rounded_weights,
)
from fastlstm.compression.forecast_session import ForecastCompression
from fastlstm.compression.goal import WAYS_OF_FORECASTERS, Attempt
from fastlstm.compression.job import Job
from fastlstm.compression.options import CompressConfig
from fastlstm.compression.report import CompressReport, quality_error
from fastlstm.errors import ConfigError, DataError, FastLSTMError
from fastlstm.forecast.calibration import calibrate
from fastlstm.forecast.data.preparation import prepare
from fastlstm.forecast.data.splits import split_table
from fastlstm.forecast.files import MODEL_FILE, StoredForecaster, forecaster_files, read_forecaster
from fastlstm.forecast.table_schema import apply_schema
from fastlstm.forecast.train import source_text
from fastlstm.report.history import read_history
from fastlstm.report.page import write_report
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.training.resuming import checkpoint_to_resume
from fastlstm.training.session import locked_run

_OF_TEXTS = {"temperature": 2.0, "match_hidden": 0.0}


def compress_forecaster(job: Job) -> CompressReport:
    """Rounds a forecaster, or trains a smaller one, and measures it beside its source."""
    for name in _OF_TEXTS:
        if name in job.given:
            raise ConfigError(
                f"`{name}` is about tokens and hidden states, a forecaster learns forecasts; leave"
                " it out"
            )
    source = read_forecaster(job.run)
    table, why_not = _table_of(job, source)
    is_resumed = job.resume and bool(RunDirectory(job.out).checkpoints())
    if not is_resumed:
        before = None if source.compression is None else source.compression.about
        job.config.require_more_zeros(before)
        job = job.with_goal_reached(
            WAYS_OF_FORECASTERS, lambda config: _attempt(job, source, config), "windows"
        )
        job.config.require_teacher(job.config.is_taught)
    is_trained = is_resumed or job.config.trains
    if not is_trained:
        job.config.require_work()
    elif table is None:
        raise DataError(f"{why_not}; give the table as `data`")
    if is_trained:
        return ForecastCompression(job, source, table).run()
    return _round(job, source, table, why_not)


def _attempt(job: Job, source: StoredForecaster, config: CompressConfig) -> Attempt:
    """Prunes and rounds the source's weights without training, and measures what comes out."""
    small = start_of(config, source, compression_of(job, config, source, None))
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


def _round(job: Job, source: StoredForecaster, table: Any, why_not: str) -> CompressReport:
    with locked_run(job.out) as run:
        assert run is not None
        checkpoint_to_resume(run, False, lambda level, text: None)  # refuses a run that is there
        compression = compression_of(job, job.config, source, table)
        result = with_rounded_weights(dataclasses.replace(source, compression=compression))
        measuring = Measuring(job.run, job.config, source)
        measuring.notes += job.notes
        is_own = has_own_intervals(source)
        if table is None:
            measuring.why_not = why_not
            measuring.notes.append("the intervals are those of the source, not calibrated anew")
        else:
            dataset = prepare(table, source.config, like=source.schema.timeline)
            inputs = apply_schema(dataset, source)
            split = split_table(dataset.table, dataset.frequency, source.config.split)
            is_of_table = is_own_table(dataset, split, source)
            valid = measuring.begin(
                split, inputs, source_text(table), is_own=is_of_table, is_trained=False
            )
            if valid is not None:
                is_own = is_of_table
                result = dataclasses.replace(
                    result, calibration=calibrate(result.network, inputs, valid)
                )
        result = described(result, has_own_intervals=is_own)
        report, files = measuring.report(result, job.out, None)
        if not report.is_published:
            raise quality_error(report, is_trained=False)
        run.publish(files)
        with suppress(FastLSTMError):  # the model is there; a page about it is not worth an error
            write_report(run.path)
    return report
