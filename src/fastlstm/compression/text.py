"""Compressing a text model: by rounding its weights here, by training in `text_session.py`."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fastlstm.compression.options import Job
from fastlstm.compression.report import CompressReport, quality_error
from fastlstm.compression.text_model import (
    TextModel,
    compressed_files,
    encode_model,
    files_of,
    load_text_model,
)
from fastlstm.compression.text_result import (
    compression_of,
    measured,
    name_of_text,
    notes_of,
    publish,
)
from fastlstm.compression.text_session import CompressionSession
from fastlstm.errors import DataError, FastLSTMError
from fastlstm.report.page import write_report
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.text.held_out import part_of, read_text, validation_ids
from fastlstm.text.stored_model import StoredModel
from fastlstm.training.resuming import checkpoint_to_resume
from fastlstm.training.session import locked_run

if TYPE_CHECKING:
    from numpy.typing import NDArray


def compress_text(job: Job) -> CompressReport:
    """Rounds a text model, or trains a smaller one, and measures it beside its source."""
    stored, source = load_text_model(job.run)
    with locked_run(job.out) as run:
        assert run is not None
        is_resumed = job.resume and bool(run.checkpoints())
        if is_resumed or job.config.trains:
            return CompressionSession(run, job, stored, source).compress()
        job.config.require_work()
        return _round(run, job, stored, source)


def _round(run: RunDirectory, job: Job, stored: StoredModel, source: TextModel) -> CompressReport:
    """Stores the weights in another format, rounded to the nearest."""
    checkpoint_to_resume(run, False, lambda level, text: None)  # refuses a run that is there
    data = encode_model(source.weights, job.config.to)
    result = TextModel.of_file(data, run.path, source.config, job.config.to)
    methods = [f"{job.config.to}, rounded to the nearest"]
    notes = notes_of(stored, source)
    if job.config.to == "int4":
        notes.append("int4 loses less when it is trained: give a budget")
    ids, scored_on, why = _ids_to_score(job, stored)
    report = measured(job.config, stored, source, result, ids, scored_on or why, methods, notes)
    if not report.is_published:
        raise quality_error(report, is_trained=False)
    files = compressed_files(files_of(stored), compression_of(job, job.config, source, None))
    publish(run, files, data, report)
    with suppress(FastLSTMError):  # the model is there; a page about it is not worth an error
        write_report(run.path)
    return report


def _ids_to_score(
    job: Job, stored: StoredModel
) -> tuple[NDArray[Any] | None, str | None, str | None]:
    """Returns the tokens to measure on and their name, or why there are none."""
    config, tokenizer = stored.config, stored.tokenizer
    if job.data is not None:
        text = read_text(config, tokenizer, job.data, "count")
        if text.key == config.get("data", {}).get("key"):
            return part_of(config, text, "valid"), f"the validation part of {text.source}", None
        return text.ids, text.source, None
    name = config.get("data", {}).get("source")
    if not name:
        return None, None, "the run does not say what it was trained on"
    try:
        ids = validation_ids(config, tokenizer)
    except (DataError, OSError) as error:
        return None, None, f"the run's validation text is unreadable ({error})"
    return ids, name_of_text(config["data"]), None
