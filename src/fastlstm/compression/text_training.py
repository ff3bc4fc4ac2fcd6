"""Training a text model that is compressed: on with it, or a new one with it as the teacher."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import torch

from fastlstm.compression.distillation import FeatureMatch
from fastlstm.compression.options import TRAINING, CompressConfig
from fastlstm.compression.session import Result
from fastlstm.compression.text import (
    TextSource,
    compressed_files,
    max_scored,
    name_of_text,
)
from fastlstm.compression.text_task import CompressedTextTask
from fastlstm.compression.text_teacher import Teaching
from fastlstm.errors import DataError
from fastlstm.runs.events import Event
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system.fields import built
from fastlstm.text.config import PARTS, ModelConfig, TrainConfig
from fastlstm.text.data.sources import Source as Documents
from fastlstm.text.data.sources import open_source
from fastlstm.text.data.text import UnknownPolicy
from fastlstm.text.held_out import RunText
from fastlstm.text.model import LanguageModel
from fastlstm.text.stored_model import CONFIG_FILE, MATCHER
from fastlstm.text.task import FinalTest, TextTask
from fastlstm.text.train import TEXT_MAY_CHANGE, TextSession, stored_configs
from fastlstm.training.optimizer import DEFAULT_LEARNING_RATE
from fastlstm.training.plan import TrainingPlan
from fastlstm.training.session import locked_run
from fastlstm.training.trainer import Trainer

_OPEN = ("budget", "steps", "epochs", "eval_every", "checkpoint_every", "log_every", "threads")
"""Options of training that are never the source's."""
_OF_MACHINE = ("memory_limit_gb", "strict_kernels")


def train_compressed(source: TextSource) -> None:
    """Trains, measures and publishes."""
    session = source.session
    with locked_run(session.out) as run:
        assert run is not None
        own = _Training(run, source)
        options = training_options(source, own.start_sizes)
        names = session.given & set(TRAINING)
        with own.start(options, names, session.resume, stored_configs, TEXT_MAY_CHANGE) as start:
            if source.loaded_teacher is not None:
                source.loaded_teacher.model.to(start.device).requires_grad_(False)
            own.notes += source.notes()
            own.train(_open_text(source), start, session.all_callbacks())


class _Training(TextSession):
    """One start of a compression that trains."""

    unknown: UnknownPolicy = "count"
    needs_steps = False  # with a larger max_loss there is only publishing left

    def __init__(self, run: RunDirectory, source: TextSource) -> None:
        session = source.session
        super().__init__(run, list(session.observers), session.stop, session.started)
        self._source, self._session, self._config = source, session, session.config
        self._teacher, self.tokenizer = source.loaded_teacher, source.stored.tokenizer
        self._start_weights, self.start_sizes = source.start(self._config)

    def set_weights(self, model: LanguageModel, texts: RunText, config: TrainConfig) -> None:
        if self._config.is_new_student:
            super().set_weights(model, texts, config)
        else:
            model.load_state_dict(self._start_weights, strict=False)  # tied: one is stored
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
        return compressed_files(files, {**self._session.about(), "weights": "fp32"})

    def make_task(self, **parts: Any) -> TextTask:
        teaching = None
        if self._teacher is not None:
            config = self._config
            teaching = Teaching(
                self._teacher.model, config.temperature, config.alpha,
                needs_features=config.match_hidden > 0,
            )  # fmt: skip
        models = self._source.sizes, parts["model"].config
        return CompressedTextTask(
            **parts, teaching=teaching, conclude=self._conclude,
            num_scored=min(len(parts["valid_ids"]), max_scored(*models)),
            watch=self.watch("reading the text again with the teacher", "tokens"),
            num_results=2 if self._config.needs_no_training else 1,
        )  # fmt: skip

    def final_test(self, texts: RunText, plan: TrainingPlan) -> FinalTest | None:
        """Returns None: source and result are compared on the validation text."""
        return None

    def _conclude(self, trainer: Trainer) -> Event:
        """Measures the best weights beside the source, and publishes them if they are good."""
        task, session = trainer.task, self._session
        assert isinstance(task, CompressedTextTask)
        self._source.ids = task.valid_ids
        self._source.about_ids = name_of_text(json.loads(task.model_files[CONFIG_FILE])["data"])
        best = session.conclude(trainer, self._results(trainer, task))
        if best is not None:
            assert self.run is not None
            self.run.publish({**best.files, **session.report_files()})
        return session.end_event()

    def _results(self, trainer: Trainer, task: CompressedTextTask) -> Iterator[Result]:
        """Yields the models that may be published: the trained one first."""
        weights = {
            name: weight.detach().float().cpu().numpy()
            for name, weight in trainer.best.weights.items()
            if not name.startswith(f"{MATCHER}.")
        }
        yield self._source.result(weights, task.model.config, task.model_files, is_trained=True)
        if self._config.needs_no_training:
            yield self._source.plain(is_trained=False)


def _open_text(source: TextSource) -> Documents:
    """Returns what is trained on; raises DataError where the source's text is gone."""
    session = source.session
    if session.data is not None:
        return open_source(session.data)
    name = source.stored.config.get("data", {}).get("source")
    if not name:
        raise DataError(
            f"{session.run} does not say what it was trained on; give the text as `data`"
        )
    try:
        return open_source(name)
    except DataError as error:
        raise DataError(
            f"the text of {session.run} cannot be read ({error}); give it as `data`"
        ) from None


def training_options(source: TextSource, start: ModelConfig) -> TrainConfig:
    """Returns the options of training: the source's, with those of a compression.

    Args:
        source: with the options of its session.
        start: sizes of the model that training starts from.
    """
    config, stored = source.session.config, source.stored.config
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    values = {n: v for n, v in stored.get("train", {}).items() if n in fields}
    values |= {n: v for n, v in dataclasses.asdict(start).items() if n != "vocab_size"}
    values |= {name: getattr(TrainConfig, name) for name in ("ema", *_OF_MACHINE)}
    own = {name: getattr(config, name) for name in TRAINING}
    values |= {n: v for n, v in own.items() if v is not None or n in _OPEN}
    is_less = config.is_new_student or (config.prune, config.output_rank) != (None, None)
    if is_less and own["dropout"] is None:
        values["dropout"] = 0.0  # fewer weights and the teacher are enough against overfitting
    if own["learning_rate"] is None:
        rate = source.peak_rate
        rate = DEFAULT_LEARNING_RATE[values.get("optimizer", "muon")] if rate is None else rate
        values["learning_rate"] = None if config.is_new_student else _rate_share(config) * rate
    sizes = {n: getattr(config, n) for n in ("rnn_size", "embed_size", "num_layers", "output_rank")}
    values |= {name: size for name, size in sizes.items() if size is not None}
    if start.tie_weights and sizes["embed_size"] is None:
        values["embed_size"] = None  # as wide as the hidden units
    if source.session.data is not None:
        values |= dict.fromkeys(PARTS)
    return built(TrainConfig, values, "config.json")


def _rate_share(config: CompressConfig) -> float:
    """Returns the share of the source's peak learning rate for training on (benchmarks/log)."""
    if config.prune is not None:
        kept = 1.0 - config.prune  # what a step of Muon moves a masked matrix by is its root
        return 1.0 if config.structured == "units" else min(kept**-0.5, 3.0)
    return 0.3 if config.to == "fp32" or config.output_rank is not None else 0.05
