"""Compressing a text model: by rounding its weights here, by training in `text_session.py`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastlstm.compression.goal import Attempt, ways_of_text
from fastlstm.compression.job import Job
from fastlstm.compression.low_rank import check_output_rank, output_to_shrink, with_output_rank
from fastlstm.compression.options import CompressConfig
from fastlstm.compression.pruning import pruned
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
from fastlstm.compression.text_rounding import rounded_model
from fastlstm.compression.text_session import CompressionSession
from fastlstm.compression.units import without_units
from fastlstm.errors import DataError, FastLSTMError
from fastlstm.report.page import write_report
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.runs.weight_formats import as_floats
from fastlstm.text.files import build_model
from fastlstm.text.held_out import part_of, read_text, validation_ids
from fastlstm.text.stored_model import StoredModel
from fastlstm.text.task import tokens_per_char
from fastlstm.text.weight_report import writing_speed
from fastlstm.training.resuming import checkpoint_to_resume
from fastlstm.training.session import locked_run

if TYPE_CHECKING:
    from numpy.typing import NDArray


def compress_text(job: Job) -> CompressReport:
    """Rounds a text model, or trains a smaller one, and measures it beside its source."""
    stored, source = load_text_model(job.run)
    if (rank := job.config.output_rank) is not None:
        check_output_rank(source.config, rank)
    with locked_run(job.out) as run:
        assert run is not None
        is_resumed = job.resume and bool(run.checkpoints())
        if not is_resumed:
            job.config.require_more_zeros(stored.config.get("compression"))
            has_speed = job.config.target is not None
            chars_per_token = _chars_per_token(job, stored) if has_speed else 1.0
            job = job.with_goal_reached(
                ways_of_text(output_to_shrink(source.weights, source.config)),
                lambda config: _attempt(source, config, chars_per_token),
                "characters",
            )
        if is_resumed or job.config.trains:
            return CompressionSession(run, job, stored, source).compress()
        job.config.require_work()
        return _round(run, job, stored, source)


def _chars_per_token(job: Job, stored: StoredModel) -> float:
    """Returns the characters of a token in the text that is measured on.

    Raises:
        DataError: there is no text, and tokens are no characters.
    """
    if stored.tokenizer.kind == "char":
        return 1.0
    ids, _, why = _ids_to_score(job, stored)
    if ids is None:
        raise DataError(
            f"`target` counts characters, and the text of {job.run} cannot be read: {why}; give"
            " `data`"
        )
    return 1.0 / tokens_per_char(ids, stored.tokenizer)


def _attempt(source: TextModel, config: CompressConfig, chars_per_token: float) -> Attempt:
    """Prunes and rounds the source's weights without training, and measures what comes out."""
    weights, sizes = as_floats(source.weights), source.config
    if config.prune is not None and config.structured == "units":
        tensors = {name: torch.from_numpy(weight) for name, weight in weights.items()}
        tensors, sizes = without_units(tensors, sizes, config.prune)
        weights = {name: tensor.numpy() for name, tensor in tensors.items()}
    if config.output_rank is not None:
        weights, sizes = with_output_rank(weights, sizes, config.output_rank)
    if config.prune is not None and config.structured == "blocks":
        tensors = pruned(build_model(weights, sizes), config.prune, "blocks")
        weights = {name: tensor.numpy() for name, tensor in tensors.items()}
    data = encode_model(weights, config.to)
    if config.target is None:
        return Attempt(len(data), None)
    result = TextModel.of_file(data, Path(source.path), sizes, config.to)
    speed = writing_speed(result.decoder, config.streams) * chars_per_token
    return Attempt(len(data), speed)


def _round(run: RunDirectory, job: Job, stored: StoredModel, source: TextModel) -> CompressReport:
    """Stores the weights with an output of low rank, or in another format, without training."""
    checkpoint_to_resume(run, False, lambda level, text: None)  # refuses a run that is there
    notes = notes_of(job, stored, source)
    if job.config.output_rank is not None:
        notes.append("an output of low rank loses less when it is trained: give a budget")
    if job.config.to == "int4":
        notes.append("int4 loses less when it is trained: give a budget")
    model = rounded_model(source, job.config)
    result = model.loaded(run.path)
    ids, scored_on, why = _ids_to_score(job, stored)
    about_ids = scored_on or why
    report = measured(job.config, stored, source, result, ids, about_ids, model.methods, notes)
    if not report.is_published:
        raise quality_error(report, is_trained=False)
    files = compressed_files(
        files_of(stored, model.config), compression_of(job, job.config, source, None, stored.config)
    )
    publish(run, files, model.data, report)
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
