"""Compressing a text model by training on with it, or a new one with it as the teacher."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import torch

from fastlstm.compression.callbacks import compression_callbacks
from fastlstm.compression.distillation import FeatureMatch
from fastlstm.compression.job import Job
from fastlstm.compression.low_rank import with_output_rank
from fastlstm.compression.options import (
    COMPRESS_MAY_CHANGE,
    TRAINING,
    CompressConfig,
)
from fastlstm.compression.report import (
    CompressReport,
    TrainingFigures,
    pruning_method,
    quality_error,
    unfinished_error,
)
from fastlstm.compression.teacher_time import TeacherTime
from fastlstm.compression.text_model import (
    TextModel,
    Weights,
    compressed_files,
    encode_model,
    files_of,
    max_scored,
    require_finite,
)
from fastlstm.compression.text_recipe import training_options
from fastlstm.compression.text_result import (
    compression_of,
    measured,
    name_of_text,
    notes_of,
    publish,
)
from fastlstm.compression.text_rounding import CompressedModel, output_method, rounded_model
from fastlstm.compression.text_task import CompressedTextTask
from fastlstm.compression.text_teacher import Teaching
from fastlstm.compression.units import without_units
from fastlstm.errors import DataError, FormatError
from fastlstm.runs.events import Event
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.runs.weight_formats import as_floats
from fastlstm.text.config import ModelConfig, TrainConfig
from fastlstm.text.data.sources import Source, open_source
from fastlstm.text.data.text import UnknownPolicy
from fastlstm.text.files import LoadedModel, load_language_model
from fastlstm.text.held_out import RunText
from fastlstm.text.model import LanguageModel
from fastlstm.text.stored_model import CONFIG_FILE, MATCHER, StoredModel
from fastlstm.text.task import FinalTest, TextTask
from fastlstm.text.train import TEXT_MAY_CHANGE, TextSession, stored_configs
from fastlstm.training.callbacks import Callback
from fastlstm.training.checkpoint import Checkpoint
from fastlstm.training.plan import TrainingPlan
from fastlstm.training.resuming import resumed_config
from fastlstm.training.trainer import Trainer


class CompressionSession(TextSession):
    """One start of a compression that trains."""

    unknown: UnknownPolicy = "count"
    needs_steps = False  # with a larger max_loss there is only publishing left

    def __init__(self, run: RunDirectory, job: Job, stored: StoredModel, source: TextModel) -> None:
        super().__init__(run, list(job.observers), job.stop, job.started)
        self._job, self._stored, self._source = job, stored, source
        self._config, self.tokenizer = job.config, stored.tokenizer
        self._first: CompressConfig | None = None
        self._first_config: dict[str, Any] = {}
        self._teacher: LoadedModel | None = None
        self.report: CompressReport | None = None

    def compress(self) -> CompressReport:
        """Trains, measures and publishes."""
        job = self._job
        config = training_options(job, self._config, self._stored, self._start_model()[1])
        names = job.given & set(TRAINING)
        with self.start(config, names, job.resume, self._options_of, TEXT_MAY_CHANGE) as start:
            if self._first is None:
                self._config.require_work()
            else:
                options = self._config, job.given, self._first, self._first
                self._config = resumed_config(*options, COMPRESS_MAY_CHANGE)
            self._open_teacher(start.device)
            if self._first is not None:
                teacher = self._about()["teacher"]
                sha256 = None if teacher is None else teacher["model_sha256"]
                job.require_same_teacher(self._first_config, sha256)
            self.notes += notes_of(dataclasses.replace(job, notes=()), self._stored, self._source)
            self.train(self._open_text(), start, [*self._callbacks(), *job.callbacks])
        if self.report is None:
            raise unfinished_error()
        if not self.report.is_published:
            raise quality_error(self.report, is_trained=True)
        return self.report

    def _options_of(self, checkpoint: Checkpoint) -> tuple[TrainConfig, TrainConfig]:
        """Returns the options of a checkpoint's training; keeps those of its compression."""
        stored = json.loads(checkpoint.files[CONFIG_FILE])
        self._first = self._job.first_options(stored, self._source.sha256)
        self._first_config = stored
        return stored_configs(checkpoint)

    def _open_text(self) -> Source:
        """Returns what is trained on; raises DataError where the source's text is gone."""
        if self._job.data is not None:
            return open_source(self._job.data)
        name = self._stored.config.get("data", {}).get("source")
        if not name:
            raise DataError(
                f"{self._job.run} does not say what it was trained on; give the text as `data`"
            )
        try:
            return open_source(name)
        except DataError as error:
            raise DataError(
                f"the text of {self._job.run} cannot be read ({error}); give it as `data`"
            ) from None

    def _open_teacher(self, device: torch.device) -> None:
        if not self._config.is_taught:
            return
        path = self._config.distil or self._job.run
        teacher = load_language_model(path)
        named = teacher.model.named_parameters()
        require_finite(teacher.path, {name: p.detach().numpy() for name, p in named})
        if teacher.tokenizer.fingerprint != self._stored.tokenizer.fingerprint:
            raise FormatError(
                f"the teacher {path} has another tokenizer than {self._job.run}; their predictions"
                " cannot be compared: train both on one vocabulary"
            )
        teacher.model.to(device).requires_grad_(False)
        self._teacher = teacher

    def _callbacks(self) -> list[Callback]:
        teacher = [] if self._teacher is None else [TeacherTime()]
        source = self._stored.config.get("compression")
        return [*compression_callbacks(self._config, source), *teacher]

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
            weights, sizes = self._start_model()
            if (rank := self._config.output_rank) is not None:
                floats = {name: weight.numpy() for name, weight in weights.items()}
                floats, _ = with_output_rank(floats, sizes, rank)
                weights = {name: torch.from_numpy(weight) for name, weight in floats.items()}
            model.load_state_dict(weights, strict=False)  # tied: one is stored
        if self._config.match_hidden and self._teacher is not None:
            torch.default_generator.manual_seed(config.seed)
            widths = model.config.output_width, self._teacher.model_config.output_width
            model.add_module(MATCHER, FeatureMatch(*widths, self._config.match_hidden))
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
        return compression_of(self._job, self._config, self._source, teacher, self._stored.config)

    def make_task(self, **parts: Any) -> TextTask:
        teaching = None
        if self._teacher is not None:
            config = self._config
            teaching = Teaching(
                self._teacher.model, config.temperature, config.alpha,
                needs_features=config.match_hidden > 0,
            )  # fmt: skip
        models = self._source.config, parts["model"].config
        num_scored = min(len(parts["valid_ids"]), max_scored(*models))
        return CompressedTextTask(
            **parts, teaching=teaching, conclude=self._conclude, num_scored=num_scored,
            watch=self.watch("reading the text again with the teacher", "tokens"),
            num_results=2 if self._config.needs_no_training else 1,
        )  # fmt: skip

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
        training = TrainingFigures.of(trainer, task.teacher_s)
        notes = notes_of(self._job, self._stored, self._source)
        if self._config.prune is not None and self._config.structured == "none":
            notes.append(
                "the same speed as without zeros: nothing here multiplies faster for zeros in no"
                " order"
            )
        scored_on = name_of_text(json.loads(task.model_files[CONFIG_FILE])["data"])
        reports = []
        for model in self._results(weights, task.model.config):
            report = measured(
                self._config, self._stored, self._source, model.loaded(run.path), task.valid_ids,
                scored_on, model.methods, notes, training,
            )  # fmt: skip
            reports.append((report, model))
        self.report, best = min(reports, key=lambda pair: pair[0].result.quality or math.inf)
        is_trained = best is reports[0][1]
        if self.report.is_published and not is_trained:
            text = "training lost more than the same without training, which is"
            trainer.say("warning", f"{text} published instead")
        if self.report.is_published:
            about = {**self._about(), "is_trained": is_trained}
            files = task.model_files if is_trained else files_of(self._stored, best.config)
            publish(run, compressed_files(files, about), best.data, self.report)
        return {"compression": self.report.to_dict()}

    def _results(self, weights: Weights, sizes: ModelConfig) -> list[CompressedModel]:
        """Returns the models that may be published: the trained one first."""
        to = self._config.to
        results = [CompressedModel(encode_model(weights, to), sizes, to, self._methods(sizes))]
        if self._config.needs_no_training:
            plain = rounded_model(self._source, self._config)
            last = f"{plain.methods[-1]}, which lost less than training for it"
            results.append(plain._replace(methods=[*plain.methods[:-1], last]))
        return results

    def _methods(self, sizes: ModelConfig) -> list[str]:
        config, methods = self._config, []
        if config.prune is not None:
            units = self._source.config.rnn_size, sizes.rnn_size
            methods.append(pruning_method(config.prune, config.structured, units))
        if config.output_rank is not None and not config.is_new_student:
            methods.append(output_method(self._source.config, sizes))
        if config.is_taught:
            new = ", a new model" if config.is_new_student else ""
            methods.append(f"distilled from {config.distil or self._job.run}{new}")
        if config.to != "fp32":
            methods.append(f"{config.to}, trained with its rounding")
        return methods or ["trained on"]
