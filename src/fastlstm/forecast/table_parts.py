"""Forecasts and evaluations of a table in parts: each computed alone, merged to the one result.

Parts consist of whole blocks, of series or of windows, which one process computes in the same way:
forecasts are put in order, and sums of errors are exact, so that the merged result has the bytes
of the one that was never divided.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pyarrow import ipc

import fastlstm
from fastlstm.errors import CorruptFileError
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.fingerprint import fingerprint
from fastlstm.forecast.files import MODEL_FILE, SCALER_FILE, SCHEMA_FILE, forecaster_files
from fastlstm.forecast.forecast_file import write_rows
from fastlstm.forecast.forecaster import Forecaster
from fastlstm.forecast.table_evaluation import EvaluationSums
from fastlstm.runs.parts import Part, PartDirectory, StoredPart, refuse_part_name
from fastlstm.system import hardware
from fastlstm.system.folder import write_whole
from fastlstm.system.storage import encode_json, parse_json

_MAX_SUMS_BYTES = 1 << 24


def forecast_part(
    model: Forecaster,
    frame: Any,
    part: Part,
    directory: str | Path,
    quantiles: Sequence[float] = (),
    future: Any = None,
    facts: Mapping[str, Any] | None = None,
) -> StoredPart | None:
    """Forecasts one part of the series of a table, as `Forecaster.predict` forecasts all.

    Args:
        model: fitted or loaded.
        frame: the past of the series.
        part: which part.
        directory: of all parts; a path or a URL.
        quantiles: levels, a column each; none for point forecasts.
        future: a table of future covariates, if the forecaster reads some.
        facts: JSON values stored with the part.

    Returns:
        The part; None if it was there already.

    Raises:
        DataError: the directory has parts of something else; and as `Forecaster.predict`.
    """
    parts = PartDirectory(directory)
    forecasts = model.forecasts(frame, quantiles, future)
    options = {"quantiles": list(forecasts.quantiles)}
    work = _work("forecast", model, forecasts.dataset, part, options)
    if forecasts.future is not None:
        work["future table"] = fingerprint(forecasts.future)
    if parts.holds(part, work):
        return None
    first, end = part.share(forecasts.num_blocks)

    def produce(file: Any) -> None:
        with ipc.new_file(file, forecasts.schema) as writer:
            for table in forecasts.blocks(first, end):
                writer.write_table(table)

    known = {**_machine(), "whole_seconds": forecasts.has_whole_seconds}
    return parts.write(part, work, {**known, **(facts or {})}, ".arrow", produce)


def evaluate_part(
    model: Forecaster,
    frame: Any,
    part: Part,
    directory: str | Path,
    split: Literal["train", "valid", "test"] = "test",
    stride: int = 1,
    season: int | None = None,
    scaled: bool = False,
    quantiles: Sequence[float] = (),
    facts: Mapping[str, Any] | None = None,
) -> StoredPart | None:
    """Evaluates one part of the windows of a table, as `Forecaster.backtest` evaluates all.

    `split` is its `part`; see `forecast_part` for the others.
    """
    parts = PartDirectory(directory)
    evaluation = model.evaluation(split, stride, season, scaled, frame, quantiles)
    options: dict[str, Any] = {"split": split, "stride": stride, "scaled": scaled}
    options |= {"season": evaluation.season, "quantiles": list(quantiles)}
    work = _work("evaluate", model, evaluation.dataset, part, options)
    if parts.holds(part, work):
        return None
    sums = evaluation.sums(*part.share(evaluation.num_blocks))
    facts = {**_machine(), **(facts or {})}
    data = encode_json(sums.to_json())
    return parts.write(part, work, facts, ".sums", lambda file: file.write(data))


def collect_parts(directory: str | Path) -> tuple[PartDirectory, list[StoredPart]]:
    """Returns the parts of one result in order, all of them there and whole.

    Warns where they were computed by different kernels.

    Raises:
        DataError: some are missing, or they are of several results.
        CorruptFileError: some are damaged.
    """
    parts = PartDirectory(directory)
    stored = parts.collect()
    warn_of_kernels(stored)
    return parts, stored


def warn_of_kernels(stored: Sequence[StoredPart]) -> None:
    """Warns where parts were computed by different kernels."""
    for name, what in (("isa", "instruction sets"), ("torch", "versions of torch")):
        found = sorted({str(part.facts.get(name)) for part in stored})
        if len(found) > 1:
            warnings.warn(
                f"the parts were computed with several {what} ({', '.join(found)}): the result"
                " equals that of one process but for rounding",
                stacklevel=3,
            )


def merge_forecasts(
    parts: PartDirectory, stored: Sequence[StoredPart], out: str, suffix: str
) -> tuple[int, list[str]]:
    """Writes the forecasts of all parts to one file; returns its rows and columns.

    Args:
        parts: where they are.
        stored: of `collect_parts`.
        out: a path or a URL.
        suffix: of `forecast_file.SUFFIXES`.
    """
    refuse_part_name(out)
    with parts.reading(stored[0]) as file:
        schema = ipc.open_file(file).schema
        is_whole = stored[0].facts["whole_seconds"]
    num_rows = 0

    def tables() -> Iterator[pa.Table]:
        for part in stored:
            with parts.reading(part) as file:
                reader = ipc.open_file(file)
                if reader.schema != schema or part.facts["whole_seconds"] is not is_whole:
                    raise CorruptFileError(f"{parts.name}: part {part.part} has other columns")
                for number in range(reader.num_record_batches):
                    batch = reader.get_batch(number)
                    batch.validate(full=True)  # a bad offset would read beyond the memory
                    yield pa.Table.from_batches([batch])

    def produce(file: Any) -> None:
        nonlocal num_rows
        num_rows = write_rows(file, suffix, schema, tables(), is_whole is True)
        parts.require_unchanged(stored)

    write_whole(out, produce)
    return num_rows, list(schema.names)


def merge_evaluations(
    parts: PartDirectory, stored: Sequence[StoredPart]
) -> dict[str, dict[str, float]]:
    """Returns the figures of all parts together, those of `Forecaster.backtest`.

    Raises:
        CorruptFileError: a part holds no sums.
    """
    with parts.reading(stored[0]):
        sums = EvaluationSums(stored[0].work["options"]["quantiles"])
    for part in stored:
        with parts.reading(part) as file:
            sums.add_json(parse_json(file.read(_MAX_SUMS_BYTES), Path(part.file)))
    parts.require_unchanged(stored)
    try:
        return sums.figures()
    except (ArithmeticError, TypeError, ValueError) as error:
        raise CorruptFileError(f"{parts.name}: the parts hold no sums ({error})") from error


def _work(
    command: str, model: Forecaster, dataset: SeriesDataset, part: Part, options: dict[str, Any]
) -> dict[str, Any]:
    """Returns what makes the result what it is; the names are those of messages."""
    return {
        "command": command,
        "run": _model_hash(model),
        "table": fingerprint(dataset),
        "options": options,
        "version": fastlstm.__version__,
        "number of parts": part.count,
    }


def _model_hash(model: Forecaster) -> str:
    """Returns the SHA-256 of all that forecasts depend on, and not on how it was trained."""
    files = forecaster_files(model.stored_)
    sha = hashlib.sha256(json.dumps(asdict(model.stored_.network.config)).encode())
    for name in (MODEL_FILE, SCALER_FILE, SCHEMA_FILE):
        sha.update(files[name])
    return sha.hexdigest()


def _machine() -> dict[str, str]:
    import torch

    return {"isa": hardware.cpu().isa, "torch": torch.__version__}
