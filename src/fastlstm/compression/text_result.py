"""The result of compressing a text model: what config.json says of it, measured, published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastlstm.compression.job import Job, method_facts, peak_rate
from fastlstm.compression.options import CompressConfig
from fastlstm.compression.report import (
    REPORT_FILE,
    CompressReport,
    TrainingFigures,
    notes_of_speed,
)
from fastlstm.compression.text_model import (
    TextModel,
    compare_quality,
    compare_speed,
    missing_features,
)
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system.measurements import CpuTimer
from fastlstm.text.stored_model import MODEL_FILE, StoredModel
from fastlstm.text.task import tokens_per_char

if TYPE_CHECKING:
    from numpy.typing import NDArray


def compression_of(
    job: Job,
    config: CompressConfig,
    source: TextModel,
    teacher: Mapping[str, str] | None,
    stored: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns what config.json says of a compression; `stored` is config.json of the source."""
    before = stored.get("compression", {})
    sizes = {n: getattr(source.config, n) for n in ("rnn_size", "num_layers", "embed_size")}
    return {
        **method_facts(config, before, source.config.rnn_size),
        "source": {
            "path": str(job.run),
            "model_sha256": source.sha256,
            "learning_rate": peak_rate(stored),
            **sizes,
        },
        "teacher": teacher,
    }


def notes_of(job: Job, stored: StoredModel, source: TextModel) -> list[str]:
    """Returns what the report notes about the job and the source."""
    notes = [*job.notes] if stored.note is None else [*job.notes, stored.note]
    if source.weight_format in ("int8", "int4"):
        notes.append(f"the source's weights are stored as {source.weight_format}: it starts there")
    return notes


def name_of_text(data: Mapping[str, Any]) -> str:
    """Returns what a run is validated on, from `data` of its config.json."""
    if "valid" in data:
        return str(data["valid"]["source"])
    return f"the validation part of {data['source']}"


def measured(
    config: CompressConfig,
    stored: StoredModel,
    source: TextModel,
    result: TextModel,
    ids: NDArray[Any] | None,
    about_ids: str | None,
    methods: list[str],
    notes: list[str],
    training: TrainingFigures | None = None,
) -> CompressReport:
    """Measures both models; `about_ids` is the name of the text, or why there is none."""
    change, outputs = None, None
    quality: tuple[float | None, float | None] = None, None
    if ids is not None:
        both = source, result
        quality, change, outputs = compare_quality(*both, stored.tokenizer, ids, str(about_ids))
    per_token = 1.0 if ids is None else 1.0 / tokens_per_char(ids, stored.tokenizer)
    unit = "characters" if ids is not None or stored.tokenizer.kind == "char" else "tokens"
    with CpuTimer(threads=1) as timer:
        before, after = compare_speed(source, result, per_token)
    report = CompressReport(
        kind="text", path=result.path, methods=methods,
        source=source.figures(before, quality[0]), result=result.figures(after, quality[1]),
        measure="bits_per_char", change=change,
        not_measured=None if ids is not None else about_ids, outputs=outputs, speed_unit=unit,
        lacks=missing_features(result), training=training, max_loss=config.max_loss,
        is_published=True, notes=[*notes, *notes_of_speed(timer)],
    )  # fmt: skip
    return report.checked()


def publish(
    run: RunDirectory, files: Mapping[str, bytes], data: bytes, report: CompressReport
) -> None:
    """Publishes a model with its JSON files and the report."""
    run.publish({**files, MODEL_FILE: data, REPORT_FILE: report.to_json()})
