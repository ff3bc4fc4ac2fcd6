"""`train()`: from a text to a trained run directory. The main path of the package."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastlstm.errors import (
    ConfigError,
    DataError,
    FormatError,
    Setting,
    UnknownCharacterError,
    UsageError,
    counted,
    kind_of_value,
)
from fastlstm.ops.dispatch import LayerReport, explain
from fastlstm.report.progress import default_output
from fastlstm.runs.events import Event, Observer, checked_observers
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system import hardware, measurements
from fastlstm.text.config import OPTIONS_OF_TABLES, TrainConfig, from_dict
from fastlstm.text.data.lanes import LaneBatches, WindowBatches
from fastlstm.text.data.source_kind import kind_of_source
from fastlstm.text.data.sources import Source as Documents
from fastlstm.text.data.sources import open_source
from fastlstm.text.data.text import Splits, TextDataset, prepare_text
from fastlstm.text.data.tokenizer import load_tokenizer
from fastlstm.text.evaluation import Evaluation
from fastlstm.text.files import model_files, weights_file
from fastlstm.text.initialization import initialize
from fastlstm.text.lm import sample_text
from fastlstm.text.model import LanguageModel
from fastlstm.text.pass_time import time_precision
from fastlstm.text.plan import (
    LONG,
    Resolved,
    choose_device,
    choose_seq_length,
    fit_batch,
    open_batches,
    resolve,
)
from fastlstm.text.token_cost import training_flop_per_token
from fastlstm.text.trainer import Trainer, TrainPlan
from fastlstm.training.checkpoint import Checkpoint, reading
from fastlstm.training.precision import autocast
from fastlstm.training.session import RunSession, resumed, resumed_config, torch_settings_kept
from fastlstm.training.signals import StopFlag

Source = str | Path | Sequence[str | Path]

_SAMPLE_LENGTH = 200
_ANNOUNCED = (
    *("batch_size", "seq_length", "accumulate", "optimizer", "learning_rate", "dropout", "seed"),
    *("vocab", "precision", "threads"),
)
_MAY_CHANGE = frozenset(
    {"steps", "epochs", "budget", "patience", "eval_every", "checkpoint_every", "keep_checkpoints"}
    | {"sample_every", "log_every", "tensorboard", "device", "threads", "memory_limit_gb"}
    | {"strict_kernels", "cache_dir"}
)
"""Fields that a resumed run may be given anew; the others belong to what was begun."""


@dataclass(frozen=True)
class Run:
    """A finished training run.

    Attributes:
        path: the run directory; `LM.load(run)` takes it.
        evaluation: the last evaluation of the validation split.
    """

    path: Path
    evaluation: Evaluation

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def bits_per_char(self) -> float:
        return self.evaluation.bits_per_char


def train(
    source: Source,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    config: TrainConfig | None = None,
    observers: Sequence[Observer] | None = None,
    stop: StopFlag | None = None,
    given: Collection[str] = (),
    began: float | None = None,
    as_text: bool = False,
    **fields: Any,
) -> Run:
    """Trains a language model on a text.

    Args:
        source: a file, several, a directory, a glob, "-", or a built-in corpus ("python-docs").
        out: the run directory; default `runs/<name of the source>`.
        resume: go on if `out` holds a checkpoint, else start.
        config: all settings at once; or give single `fields` of TrainConfig instead.
        observers: called with every event, a plain dict (docs/architecture.md lists them);
            by default progress is shown on standard output, `()` is silent.
        stop: polled; by default the first SIGTERM or Ctrl-C sets it.
        given: the fields of `config` that were chosen and are no defaults; a resumed run checks
            them against what it was begun with.
        began: `time.perf_counter()` from which a budget counts; default now.
        as_text: train on the characters of a table; else a table is refused.
        **fields: fields of TrainConfig.

    Returns:
        The run; `run.path` is the directory, `run.bits_per_char` the final quality.

    Raises:
        UsageError: something given cannot be done as asked.
        Stopped: SIGTERM or Ctrl-C; the state is saved.
        NonFiniteError: NaN or Inf that could not be cured.
        BudgetError: the budget was over before the first step.
    """
    began = time.perf_counter() if began is None else began
    if config is not None and fields:
        raise ConfigError("give either config=… or single fields, not both")
    _refuse_options_of_tables(fields)
    config = config if config is not None else from_dict(fields, "train()")
    if not isinstance(config, TrainConfig):
        raise ConfigError(f"config is {kind_of_value(config)}, expected a TrainConfig")
    if stop is not None and not callable(stop):
        raise ConfigError(f"stop is {kind_of_value(stop)}, expected a function that is polled")
    observers = None if observers is None else checked_observers(observers)
    opened = open_source(source)
    if not (as_text or resume):
        _refuse_tables(source)
    run = RunDirectory(Path("runs") / _source_name(source) if out is None else out)
    run.create()
    with ExitStack() as stack:
        stack.enter_context(torch_settings_kept())
        if stop is None:
            stop = stack.enter_context(StopFlag())
        stack.enter_context(run.lock())
        if observers is None:
            observers = [stack.enter_context(default_output(use_json=False))]
        names = {*given, *fields}
        session = _Session(opened, config, names, run, observers, stop, began)
        try:
            return session.train(resume)
        except UsageError:
            run.remove_if_empty()
            raise


class _Session(RunSession):
    """One start of a run: prepares the text, builds the model, trains, reports."""

    def __init__(
        self,
        source: Documents,
        config: TrainConfig,
        names: Collection[str],
        run: RunDirectory,
        observers: list[Observer],
        stop: StopFlag,
        began: float,
    ) -> None:
        super().__init__(run, observers, began)
        self._source, self._config, self._stop, self._names = source, config, stop, names

    def train(self, resume: bool) -> Run:
        found = self.find(resume)
        config = self._config
        if found is not None:
            with reading(found):
                begun = from_dict(json.loads(found.files["config.json"])["train"], "config.json")
                first = given_config(found.files)
            config = resumed_config(config, self._names, begun, first, _MAY_CHANGE)
        self.set_threads(config.threads)
        device = _set_up_device(config)
        devices = [torch.cuda.current_device()] if device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # the caller's random numbers stay as they are
            return self._train(config, device, found)

    def _train(self, config: TrainConfig, device: torch.device, found: Checkpoint | None) -> Run:
        text = self._prepare(config, found)
        self.mark()
        splits = text.split(config.split)
        model = LanguageModel(
            config.model_config(text.tokenizer.vocab_size, config.dropout or 0.0)
        ).to(device)
        precision = time_precision(
            config.precision, model, device, (config.seq_length or LONG, config.batch_size)
        )
        model.strict_kernels = config.strict_kernels
        notes: tuple[str, ...] = ()
        if found is None:
            config = choose_seq_length(config, precision, len(splits.train))
            config, notes = fit_batch(config, len(splits.train))
        batches = open_batches(config, splits.train)
        initialize(model, text.train_counts(config.split), config.seed)
        torch.default_generator.manual_seed(config.seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(config.seed)
        sizes = (len(splits.train), len(splits.valid), batches.steps_per_epoch)
        resolved = resolve(config, precision, device, *sizes, model.num_parameters)
        config = resolved.config
        model.config = config.model_config(text.tokenizer.vocab_size, config.dropout or 0.0)
        ceiling = self.ceiling(config.precision, device.type)
        if precision.is_recalled:
            self.notes.append(measurements.note("the times of a pass were"))
        plan = TrainPlan(
            config=config,
            given=self._config if found is None else given_config(found.files),
            ending=self.remaining(found, resolved.ending),
            device=device,
            flop_per_token=training_flop_per_token(model.config),
            ceiling_gflops=ceiling["ceiling_gflops"],
            started=self.began,
        )
        with self.outputs(found, config.tensorboard):
            self._announce(text, splits, plan, model, resolved, found, ceiling)
            for note in (*self.notes, *text.notes, *notes, *resolved.notes):
                self.say("info", note)
            plan = dataclasses.replace(plan, report_s=self.report_s())
            trainer = self._trainer(plan, model, batches, splits, text)
            evaluation = trainer.train(found)
        return Run(self.run.path, evaluation)

    def _prepare(self, config: TrainConfig, found: Checkpoint | None) -> TextDataset:
        tokenizer = None
        if found is not None:
            with reading(found):
                tokenizer = load_tokenizer(found.files["tokenizer.json"])
                _begun_with(found)
        try:
            text = prepare_text(
                self._source,
                vocab=config.vocab,
                vocab_size=config.vocab_size,
                text_field=config.text_field,
                keep_crlf=config.keep_crlf,
                invalid_utf8=config.invalid_utf8,
                cache_dir=config.cache_dir,
                tokenizer=tokenizer,
                on_progress=lambda done, total: self.emit(
                    {"event": "prepare", "done_bytes": done, "total_bytes": total}
                ),
                should_stop=self._stop,
            )
        except UnknownCharacterError:
            assert found is not None  # a new run takes all characters of its text
            raise self._another_text(found) from None
        if found is not None and text.key != _begun_with(found)["key"]:
            raise self._another_text(found)
        return text

    def _another_text(self, found: Checkpoint) -> FormatError:
        data = _begun_with(found)
        name, size = data["source"], counted(data["num_chars"], "character")
        told = f"'{self.run.path}' was started with {name} ({size})"
        if name == self._source.name:
            told += ", which has changed since; resume with it as it was"
        else:
            told += f", not with {self._source.name}; resume with {name}"
        return FormatError(f"{told}, or start a new run with another ", Setting("out"))

    def _trainer(
        self,
        plan: TrainPlan,
        model: LanguageModel,
        batches: LaneBatches | WindowBatches,
        splits: Splits,
        text: TextDataset,
    ) -> Trainer:
        files = model_files(model.config, plan.config, text, given=plan.given)

        def publish(weights: Mapping[str, torch.Tensor]) -> None:
            self.run.publish({**files, "model.safetensors": weights_file(weights)})

        def sample(model: LanguageModel) -> str:
            return sample_text(model, text.tokenizer, "", _SAMPLE_LENGTH, 0.8, plan.config.seed)

        return Trainer(
            plan, model, batches, splits.valid, text.tokenizer, self.run, files,
            publish=publish, emit=self.emit, stop=self._stop, sample=sample,
            watch=self.watch("evaluating", "tokens"),
        )  # fmt: skip

    def _announce(
        self,
        text: TextDataset,
        splits: Splits,
        plan: TrainPlan,
        model: LanguageModel,
        resolved: Resolved,
        found: Checkpoint | None,
        ceiling: Event,
    ) -> None:
        config = plan.config
        self.emit(
            {
                "event": "start",
                "run": str(self.run.path),
                "source": text.source,
                "device": str(plan.device),
                "precision_why": resolved.precision.why,
                "model": dataclasses.asdict(model.config),
                "num_parameters": model.num_parameters,
                "flop_per_token": plan.flop_per_token,
                **ceiling,
                "vocab_size": text.tokenizer.vocab_size,
                "train_tokens": len(splits.train),
                "valid_tokens": len(splits.valid),
                "test_tokens": len(splits.test),
                "kernels": [str(line) for line in explain_training(model, plan)],
                "end": plan.ending.text,
                **resumed(found),
                **{name: getattr(config, name) for name in _ANNOUNCED},
            }
        )


def explain_training(model: LanguageModel, plan: TrainPlan) -> list[LayerReport]:
    """Returns one report per layer for the batch and precision that training uses."""
    config = plan.config
    assert config.seq_length is not None
    tokens = torch.zeros(config.seq_length, config.batch_size, dtype=torch.long, device=plan.device)
    with autocast(config.precision, plan.device):
        return explain(model, tokens)


def _begun_with(found: Checkpoint) -> dict[str, Any]:
    """Returns what a checkpoint says of the text that the run was started with."""
    data: dict[str, Any] = json.loads(found.files["config.json"])["data"]
    kinds = {"source": str, "key": str, "num_chars": int}
    for name, kind in kinds.items():
        if type(data[name]) is not kind:
            raise TypeError(f"data.{name} of config.json is {data[name]!r:.80}")
    return data


def given_config(files: dict[str, bytes]) -> TrainConfig:
    """Returns the configuration as the user first gave it, before anything was decided."""
    return from_dict(json.loads(files["config.json"])["given"], "config.json")


def _set_up_device(config: TrainConfig) -> torch.device:
    hardware.keep_freed_memory()
    device = choose_device(config.device)
    if device.type == "cpu" and config.memory_limit_gb is not None:
        raise ConfigError(
            Setting("memory_limit_gb"),
            " bounds GPU memory and this run is on the CPU; leave it out",
        )
    if config.memory_limit_gb is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, config.memory_limit_gb * 2**30 / total), device
        )
    return device


def _refuse_tables(source: Source) -> None:
    for name in [source] if isinstance(source, str | Path) else source:
        kind = kind_of_source(str(name))
        if kind in ("csv", "binary table", "mixed"):
            raise DataError(
                f"{name} holds {'tables and texts' if kind == 'mixed' else 'a table'}:"
                " fastlstm.Forecaster(horizon=N).fit(table) trains a forecaster; to train a text"
                " model on the characters, give as_text=True"
            )


def _refuse_options_of_tables(fields: Collection[str]) -> None:
    for name in fields:
        if name in OPTIONS_OF_TABLES:
            raise ConfigError(
                f"train() trains a text model and '{name}' is for a table; to train a forecaster:"
                f" fastlstm.Forecaster({name}=…).fit(table)"
            )


def _source_name(source: Source) -> str:
    first = source if isinstance(source, str | Path) else (source[0] if source else "run")
    return "stdin" if str(first) == "-" else Path(first).name.split(".")[0] or "run"
