"""Compressing a text model: by rounding its weights, or by training on with them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastlstm.compression.callbacks import compression_callbacks
from fastlstm.compression.distillation import FeatureMatch
from fastlstm.compression.goal import WAYS_OF_TEXTS, Attempt
from fastlstm.compression.options import COMPRESS_MAY_CHANGE, TRAINING, CompressConfig, Job
from fastlstm.compression.pruning import pruned
from fastlstm.compression.report import (
    REPORT_FILE,
    CompressReport,
    TrainingFigures,
    quality_error,
    unfinished_error,
)
from fastlstm.compression.teacher_time import TeacherTime
from fastlstm.compression.text_model import (
    TextModel,
    compare_quality,
    compare_speed,
    compressed_files,
    encode_model,
    files_of,
    load_text_model,
    missing_features,
)
from fastlstm.compression.text_task import CompressedTextTask, Teaching
from fastlstm.compression.units import without_units
from fastlstm.errors import DataError, FastLSTMError, FormatError, Setting
from fastlstm.report.page import write_report
from fastlstm.runs.events import Event
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.runs.weight_formats import as_floats
from fastlstm.system.fields import built
from fastlstm.text.config import PARTS, ModelConfig, TrainConfig
from fastlstm.text.data.sources import Source, open_source
from fastlstm.text.data.text import UnknownPolicy
from fastlstm.text.files import LoadedModel, build_model, load_language_model
from fastlstm.text.held_out import RunText, part_of, read_text, validation_ids
from fastlstm.text.model import LanguageModel
from fastlstm.text.stored_model import CONFIG_FILE, MATCHER, MODEL_FILE, StoredModel
from fastlstm.text.task import FinalTest, TextTask, tokens_per_char
from fastlstm.text.train import TEXT_MAY_CHANGE, TextSession, stored_configs
from fastlstm.text.weight_report import writing_speed
from fastlstm.training.callbacks import Callback
from fastlstm.training.checkpoint import Checkpoint
from fastlstm.training.optimizer import DEFAULT_LEARNING_RATE
from fastlstm.training.plan import TrainingPlan
from fastlstm.training.resuming import checkpoint_to_resume, resumed_config
from fastlstm.training.session import locked_run
from fastlstm.training.trainer import Trainer

if TYPE_CHECKING:
    from numpy.typing import NDArray

FINE_TUNING_SHARE = 0.3
"""Of the source's peak learning rate, for training on from its weights."""


def compress_text(job: Job) -> CompressReport:
    """Rounds a text model, or trains a smaller one, and measures it beside its source."""
    stored, source = load_text_model(job.run)
    with locked_run(job.out) as run:
        assert run is not None
        is_resumed = job.resume and bool(run.checkpoints())
        if not is_resumed:
            job = job.with_goal_reached(
                WAYS_OF_TEXTS, lambda config: _attempt(source, config), "characters"
            )
        if is_resumed or job.config.trains:
            return _Session(run, job, stored, source).compress()
        job.config.require_work()
        return _round(run, job, stored, source)


def _attempt(source: TextModel, config: CompressConfig) -> Attempt:
    """Prunes and rounds the source's weights without training, and measures what comes out."""
    weights, sizes = as_floats(source.weights), source.config
    if config.prune is not None:
        tensors = {name: torch.from_numpy(weight) for name, weight in weights.items()}
        if config.structured == "units":
            tensors, sizes = without_units(tensors, sizes, config.prune)
        else:
            tensors = pruned(build_model(weights, sizes), config.prune, "blocks")
        weights = {name: tensor.numpy() for name, tensor in tensors.items()}
    data = encode_model(weights, config.to)
    if config.target is None:
        return Attempt(len(data), None)
    result = TextModel.of_file(data, Path(source.path), sizes, config.to)
    return Attempt(len(data), writing_speed(result.decoder, config.streams))


def _compression(
    job: Job, config: CompressConfig, source: TextModel, teacher: Mapping[str, str] | None
) -> dict[str, Any]:
    """Returns what config.json says of a compression."""
    sizes = {n: getattr(source.config, n) for n in ("rnn_size", "num_layers", "embed_size")}
    return {
        "weights": config.to,
        "prune": config.prune,
        "structured": None if config.prune is None else config.structured,
        "options": dataclasses.asdict(config),
        "source": {"path": str(job.run), "model_sha256": source.sha256, **sizes},
        "teacher": teacher,
    }


def _notes_of(job: Job, stored: StoredModel, source: TextModel) -> list[str]:
    notes = [*job.notes] if stored.note is None else [*job.notes, stored.note]
    if source.weight_format in ("int8", "int4"):
        notes.append(f"the source's weights are stored as {source.weight_format}: it starts there")
    return notes


# rounding ----------------------------------------------------------------------------------------


def _round(run: RunDirectory, job: Job, stored: StoredModel, source: TextModel) -> CompressReport:
    """Stores the weights in another format, rounded to the nearest."""
    checkpoint_to_resume(run, False, lambda level, text: None)  # refuses a run that is there
    data = encode_model(source.weights, job.config.to)
    result = TextModel.of_file(data, run.path, source.config, job.config.to)
    methods = [f"{job.config.to}, rounded to the nearest"]
    notes = _notes_of(job, stored, source)
    if job.config.to == "int4":
        notes.append("int4 loses less when it is trained: give a budget")
    ids, scored_on, why = _ids_to_score(job, stored)
    report = _measured(job.config, stored, source, result, ids, scored_on or why, methods, notes)
    if not report.is_published:
        raise quality_error(report, is_trained=False)
    files = compressed_files(files_of(stored), _compression(job, job.config, source, None))
    _publish(run, files, data, report)
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
    return ids, _name_of_text(config["data"]), None


def _name_of_text(data: Mapping[str, Any]) -> str:
    """Returns what a run is validated on, from `data` of its config.json."""
    if "valid" in data:
        return str(data["valid"]["source"])
    return f"the validation part of {data['source']}"


def _measured(
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
    before, after = compare_speed(source, result, per_token)
    report = CompressReport(
        kind="text", path=result.path, methods=methods,
        source=source.figures(before, quality[0]), result=result.figures(after, quality[1]),
        measure="bits_per_char", change=change,
        not_measured=None if ids is not None else about_ids, outputs=outputs, speed_unit=unit,
        lacks=missing_features(result), training=training, max_loss=config.max_loss,
        is_published=True, notes=notes,
    )  # fmt: skip
    return report.checked()


def _publish(
    run: RunDirectory, files: Mapping[str, bytes], data: bytes, report: CompressReport
) -> None:
    run.publish({**files, MODEL_FILE: data, REPORT_FILE: report.to_json()})


# training ----------------------------------------------------------------------------------------


class _Session(TextSession):
    """One start of a compression that trains."""

    unknown: UnknownPolicy = "count"

    def __init__(self, run: RunDirectory, job: Job, stored: StoredModel, source: TextModel) -> None:
        super().__init__(run, list(job.observers), job.stop, job.started)
        self._job, self._stored, self._source = job, stored, source
        self._config, self.tokenizer = job.config, stored.tokenizer
        self._first: CompressConfig | None = None
        self._teacher: LoadedModel | None = None
        self.report: CompressReport | None = None

    def compress(self) -> CompressReport:
        """Trains, measures and publishes."""
        job, config = self._job, self._train_config()
        names = job.given & set(TRAINING)
        with self.start(config, names, job.resume, self._options_of, TEXT_MAY_CHANGE) as start:
            if self._first is None:
                self._config.require_work()
            else:
                options = self._config, job.given, self._first, self._first
                self._config = resumed_config(*options, COMPRESS_MAY_CHANGE)
            self._open_teacher(start.device)
            self.notes += _notes_of(dataclasses.replace(job, notes=()), self._stored, self._source)
            self.train(self._open_text(), start, [*self._callbacks(), *job.callbacks])
        if self.report is None:
            raise unfinished_error()
        if not self.report.is_published:
            raise quality_error(self.report, is_trained=True)
        return self.report

    def _options_of(self, checkpoint: Checkpoint) -> tuple[TrainConfig, TrainConfig]:
        """Returns the options of a checkpoint's training; keeps those of its compression."""
        stored = json.loads(checkpoint.files[CONFIG_FILE]).get("compression")
        if not isinstance(stored, dict):
            raise FormatError(
                f"'{self._job.out}' was started by train, not by compress; give another ",
                Setting("out"),
            )  # fmt: skip
        if stored["source"]["model_sha256"] != self._source.sha256:
            raise FormatError(
                f"'{self._job.out}' was started from another model ({stored['source']['path']}),"
                f" or {self._job.run} has changed since; give another ", Setting("out"),
            )  # fmt: skip
        self._first = built(CompressConfig, stored["options"], "config.json")
        return stored_configs(checkpoint)

    def _train_config(self) -> TrainConfig:
        """Returns the options of training: the source's, with those of this compression."""
        config, fields = self._config, {field.name for field in dataclasses.fields(TrainConfig)}
        values = {n: v for n, v in self._stored.config.get("train", {}).items() if n in fields}
        model = dataclasses.asdict(self._start_model()[1])
        values |= {name: value for name, value in model.items() if name != "vocab_size"}
        values |= {name: getattr(TrainConfig, name) for name in ("ema", *_OF_MACHINE)}
        own = {name: getattr(config, name) for name in TRAINING}
        values |= {n: v for n, v in own.items() if v is not None or n in _OPEN}
        if config.is_new_student:
            values |= {n: None for n in ("learning_rate", "dropout") if own[n] is None}
        elif own["learning_rate"] is None:
            peak = values.get("learning_rate")
            peak = DEFAULT_LEARNING_RATE[values.get("optimizer", "muon")] if peak is None else peak
            values["learning_rate"] = FINE_TUNING_SHARE * peak
        sizes = {n: getattr(config, n) for n in ("rnn_size", "embed_size", "num_layers")}
        values |= {name: size for name, size in sizes.items() if size is not None}
        if self._source.config.tie_weights and sizes["embed_size"] is None:
            values["embed_size"] = None  # as wide as the hidden units
        if self._job.data is not None:
            values |= dict.fromkeys(PARTS)
        return built(TrainConfig, values, "config.json")

    def _open_text(self) -> Source:
        """Returns what is trained on; raises DataError where the source's text is gone."""
        if self._job.data is not None:
            return open_source(self._job.data)
        name = self._stored.config.get("data", {}).get("source")
        if not name:
            raise DataError(
                f"{self._job.run} does not say what it was trained on; give the text as ",
                Setting("data"),
            )
        try:
            return open_source(name)
        except DataError as error:
            raise DataError(
                f"the text of {self._job.run} cannot be read ({error}); give it as ",
                Setting("data"),
            ) from None

    def _open_teacher(self, device: torch.device) -> None:
        if not self._config.distils:
            return
        path = self._config.distil or self._job.run
        teacher = load_language_model(path)
        if teacher.tokenizer.fingerprint != self._stored.tokenizer.fingerprint:
            raise FormatError(
                f"the teacher {path} has another tokenizer than {self._job.run}; their predictions"
                " cannot be compared: train both on one vocabulary"
            )
        teacher.model.to(device).requires_grad_(False)
        self._teacher = teacher

    def _callbacks(self) -> list[Callback]:
        teacher = [] if self._teacher is None else [TeacherTime()]
        return [*compression_callbacks(self._config, rounding_begin=0.0), *teacher]

    def _start_model(self) -> tuple[dict[str, torch.Tensor], ModelConfig]:
        """Returns the model that training starts from: the source, or what is left of its units."""
        floats = as_floats(self._source.weights)
        weights = {name: torch.from_numpy(weight.copy()) for name, weight in floats.items()}
        if self._config.prune is None or self._config.structured != "units":
            return weights, self._source.config
        return without_units(weights, self._source.config, self._config.prune)

    # parts of the session -------------------------------------------------------------------------

    def set_weights(self, model: LanguageModel, texts: RunText, config: TrainConfig) -> None:
        if self._config.is_new_student:
            super().set_weights(model, texts, config)
        else:
            model.load_state_dict(self._start_model()[0], strict=False)  # tied: one is stored
        if self._config.match_hidden and self._teacher is not None:
            torch.default_generator.manual_seed(config.seed)
            sizes = model.config.rnn_size, self._teacher.model_config.rnn_size
            model.add_module(MATCHER, FeatureMatch(*sizes, self._config.match_hidden))
            model.to(model.output.bias.device)

    def model_files(
        self, model: ModelConfig, config: TrainConfig, texts: RunText, first: TrainConfig
    ) -> dict[str, bytes]:
        """Returns the JSON files for checkpoints, whose weights are fp32."""
        files = super().model_files(model, config, texts, first)
        return compressed_files(files, {**self._about(), "weights": "fp32"})

    def _about(self) -> dict[str, Any]:
        teacher = None
        if self._teacher is not None:
            model = TextModel.of_run(self._teacher, self._config.distil or self._job.run)
            teacher = {"path": model.path, "model_sha256": model.sha256}
        return _compression(self._job, self._config, self._source, teacher)

    def make_task(self, **parts: Any) -> TextTask:
        teaching = None
        if self._teacher is not None:
            config = self._config
            teaching = Teaching(self._teacher.model, config.temperature, config.alpha)
        return CompressedTextTask(**parts, teaching=teaching, conclude=self._conclude)

    def final_test(self, texts: RunText, plan: TrainingPlan) -> FinalTest | None:
        """Returns None: source and result are compared on the validation text."""
        return None

    def _conclude(self, trainer: Trainer) -> Event:
        """Measures the best weights beside the source, and publishes them if they are good."""
        task, run = trainer.task, self.run
        assert isinstance(task, CompressedTextTask)
        assert run is not None
        if not trainer.best.weights:
            return {}
        weights = {
            name: weight.detach().float().cpu().numpy()
            for name, weight in trainer.best.weights.items()
            if not name.startswith(f"{MATCHER}.")
        }
        data = encode_model(weights, self._config.to)
        result = TextModel.of_file(data, run.path, task.model.config, self._config.to)
        progress = trainer.progress
        training = TrainingFigures(
            steps=progress.step, seconds=trainer.elapsed_s(), teacher_s=task.teacher_s,
            reason=trainer.reason,
        )  # fmt: skip
        notes = _notes_of(self._job, self._stored, self._source)
        if self._config.prune is not None and self._config.structured == "none":
            notes.append(
                f"{100 * self._config.prune:g} % zeros, same speed: nothing here multiplies faster"
                " for zeros in no order"
            )
        self.report = _measured(
            self._config, self._stored, self._source, result,
            task.valid_ids, _name_of_text(json.loads(task.model_files[CONFIG_FILE])["data"]),
            self._methods(), notes, training,
        )  # fmt: skip
        if self.report.is_published:
            files = compressed_files(task.model_files, self._about())
            _publish(run, files, data, self.report)
        return {"compression": self.report.to_dict()}

    def _methods(self) -> list[str]:
        config, methods = self._config, []
        if config.prune is not None:
            kind = {"none": "weights", "blocks": "blocks of weights", "units": "hidden units"}
            methods.append(f"{100 * config.prune:g} % of the {kind[config.structured]} pruned")
        if config.distils:
            sizes = ", a new model" if config.is_new_student else ""
            methods.append(f"distilled from {config.distil or self._job.run}{sizes}")
        if config.to != "fp32":
            methods.append(f"{config.to}, trained with its rounding")
        return methods or ["trained on"]


_OPEN = ("budget", "steps", "epochs", "eval_every", "checkpoint_every", "log_every", "threads")
"""Options of training that are never the source's."""
_OF_MACHINE = ("memory_limit_gb", "strict_kernels")
