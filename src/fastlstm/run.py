"""`train()`: from a text to a trained run directory. The main path of the package."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastlstm import hardware
from fastlstm.config import TrainConfig, from_dict
from fastlstm.data.lanes import LaneBatches, WindowBatches
from fastlstm.data.text import Splits, TextDataset, prepare_text
from fastlstm.data.tokenizer import load_tokenizer
from fastlstm.errors import (
    ConfigError,
    CorruptFileError,
    FastLSTMError,
    FormatError,
    RunDirectoryError,
    UsageError,
)
from fastlstm.infer.language_model import sample_text
from fastlstm.nn.evaluation import Evaluation
from fastlstm.nn.initialization import initialize
from fastlstm.nn.io import model_files, weights_file
from fastlstm.nn.language_model import LanguageModel
from fastlstm.ops.cost import training_flop_per_token
from fastlstm.ops.dispatch import LayerReport, explain
from fastlstm.report.page import write_report
from fastlstm.report.progress import default_output
from fastlstm.run_directory import RunDirectory
from fastlstm.training.checkpoint import Checkpoint, find_checkpoint, truncate_metrics
from fastlstm.training.metrics import Event, MetricsFile, Observer, TensorBoardWriter
from fastlstm.training.plan import (
    Resolved,
    choose_device,
    choose_seq_length,
    fit_batch,
    open_batches,
    resolve,
    time_precision,
)
from fastlstm.training.precision import autocast
from fastlstm.training.signals import StopFlag
from fastlstm.training.trainer import Trainer, TrainPlan

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
        **fields: fields of TrainConfig.

    Returns:
        The run; `run.path` is the directory, `run.bits_per_char` the final quality.

    Raises:
        UsageError: something given cannot be done as asked.
        Stopped: SIGTERM or Ctrl-C; the state is saved.
        NonFiniteError: NaN or Inf that could not be cured.
    """
    if config is not None and fields:
        raise ConfigError("give either config=… or single fields, not both")
    config = config if config is not None else from_dict(fields, "train()")
    path = Path(out) if out is not None else Path("runs") / _source_name(source)
    run = RunDirectory(path)
    run.create()
    with ExitStack() as stack:
        if stop is None:
            stop = stack.enter_context(StopFlag())
        stack.enter_context(run.lock())
        if observers is None:
            observers = [stack.enter_context(default_output(use_json=False))]
        session = _Session(source, config, {*given, *fields}, run, list(observers), stop)
        try:
            return session.train(resume)
        except UsageError:
            run.remove_if_empty()
            raise


class _Session:
    """One start of a run: prepares the text, builds the model, trains, reports."""

    def __init__(
        self,
        source: Source,
        config: TrainConfig,
        names: Collection[str],
        run: RunDirectory,
        observers: list[Observer],
        stop: StopFlag,
    ) -> None:
        self._source, self._config, self._run, self._stop = source, config, run, stop
        self._observers, self._names = observers, names

    def train(self, resume: bool) -> Run:
        found = self._find(resume)
        config = self._config
        if found is not None:
            config = resumed_config(config, self._names, found.files)
        device = _set_up_device(config)
        text = self._prepare(config, found)
        started = time.perf_counter()
        splits = text.split(config.split)
        model = LanguageModel(
            config.model_config(text.tokenizer.vocab_size, config.dropout or 0.0)
        ).to(device)
        precision = time_precision(config, model, device)
        model.strict_kernels = config.strict_kernels
        notes: tuple[str, ...] = ()
        if found is None:
            config = choose_seq_length(config, precision, len(splits.train))
            config, notes = fit_batch(config, len(splits.train))
        batches = open_batches(config, splits.train)
        initialize(model, text.train_counts(config.split), config.seed)
        torch.manual_seed(config.seed)
        sizes = (len(splits.train), len(splits.valid), batches.steps_per_epoch)
        resolved = resolve(config, precision, device, *sizes, model.num_parameters)
        config = resolved.config
        model.config = config.model_config(text.tokenizer.vocab_size, config.dropout or 0.0)
        ceiling = hardware.ceilings(
            config.precision, torch.get_num_threads(), device=device.type
        ).gemm_gflops
        plan = TrainPlan(
            config=config,
            given=self._config if found is None else given_config(found.files),
            ending=resolved.ending,
            device=device,
            flop_per_token=training_flop_per_token(model.config),
            ceiling_gflops=ceiling,
            started=started,
            evaluation_tokens=resolved.evaluation_tokens,
        )
        with self._outputs(found, config):
            self._announce(text, splits, plan, model, resolved, found)
            for note in (*text.notes, *notes, *resolved.notes):
                self._say("info", note)
            trainer = self._trainer(plan, model, batches, splits, text)
            evaluation = trainer.train(found)
        return Run(self._run.path, evaluation)

    def _find(self, resume: bool) -> Checkpoint | None:
        found, damage = find_checkpoint(self._run) if self._run.checkpoints() else (None, [])
        if found is not None and not resume:
            raise RunDirectoryError(
                f"'{self._run.path}' holds a run already (step {found.step}); --resume goes on"
                " with it, another --out starts a new one"
            )
        if not self._run.checkpoints() and self._run.has_published():
            raise RunDirectoryError(
                f"'{self._run.path}' holds a model without a checkpoint to go on from; give another"
                " --out"
            )
        for error in damage:
            if found is None:
                raise error
            self._say("warning", f"{error}; going on from {found.path.name}")
        return found

    def _prepare(self, config: TrainConfig, found: Checkpoint | None) -> TextDataset:
        tokenizer = None if found is None else load_tokenizer(found.files["tokenizer.json"])
        text = prepare_text(
            self._source,
            vocab=config.vocab,
            vocab_size=config.vocab_size,
            text_field=config.text_field,
            keep_crlf=config.keep_crlf,
            invalid_utf8=config.invalid_utf8,
            cache_dir=config.cache_dir,
            tokenizer=tokenizer,
            on_progress=lambda done, total: self._emit(
                {"event": "prepare", "done_bytes": done, "total_bytes": total}
            ),
            should_stop=self._stop,
        )
        if found is not None:
            begun = json.loads(found.files["config.json"])["data"]["key"]
            if begun != text.key:
                raise FormatError(
                    f"the text differs from the one '{self._run.path}' was started with; resume"
                    " with the same text, or start a new run with another --out"
                )
        return text

    @contextmanager
    def _outputs(self, found: Checkpoint | None, config: TrainConfig) -> Iterator[None]:
        """Adds metrics.jsonl and TensorBoard to the observers; writes the report at the end."""
        self._run.unseal_metrics()
        if found is not None and "metrics" in found.meta:
            self._continue_metrics(found)
        outputs: list[MetricsFile | TensorBoardWriter] = [MetricsFile(self._run.metrics_path)]
        if config.tensorboard:
            first = 0 if found is None else found.step
            outputs.append(TensorBoardWriter(self._run.tensorboard_dir, first))
        self._observers[:0] = outputs
        try:
            yield
        finally:
            for output in outputs:
                self._try(output.close)
            self._try(self._run.seal_metrics)
            self._try(lambda: write_report(self._run.path))

    def _try(self, finish: Callable[[], object]) -> None:
        """Does what a run can end without: its own outcome counts for more."""
        try:
            finish()
        except (FastLSTMError, OSError) as error:
            self._say("warning", str(error))

    def _continue_metrics(self, found: Checkpoint) -> None:
        try:
            truncate_metrics(self._run.metrics_path, found.meta["metrics"])
        except CorruptFileError as error:
            aside = self._run.metrics_path.with_suffix(".damaged")
            self._run.metrics_path.replace(aside)
            self._say("warning", f"{error}; it is kept as {aside.name}, a new one is begun")

    def _trainer(
        self,
        plan: TrainPlan,
        model: LanguageModel,
        batches: LaneBatches | WindowBatches,
        splits: Splits,
        text: TextDataset,
    ) -> Trainer:
        files = model_files(model.config, plan.config, text, given=plan.given)

        def publish(model: LanguageModel) -> None:
            self._run.publish({**files, "model.safetensors": weights_file(model)})

        def sample(model: LanguageModel) -> str:
            return sample_text(model, text.tokenizer, "", _SAMPLE_LENGTH, 0.8, plan.config.seed)

        return Trainer(
            plan, model, batches, splits.valid, text.tokenizer, self._run, files,
            publish=publish, emit=self._emit, stop=self._stop, sample=sample,
        )  # fmt: skip

    def _announce(
        self,
        text: TextDataset,
        splits: Splits,
        plan: TrainPlan,
        model: LanguageModel,
        resolved: Resolved,
        found: Checkpoint | None,
    ) -> None:
        config = plan.config
        self._emit(
            {
                "event": "start",
                "run": str(self._run.path),
                "source": text.source,
                "device": str(plan.device),
                "precision_why": resolved.precision.why,
                "model": dataclasses.asdict(model.config),
                "num_parameters": model.num_parameters,
                "flop_per_token": plan.flop_per_token,
                "ceiling_gflops": plan.ceiling_gflops,
                "vocab_size": text.tokenizer.vocab_size,
                "train_tokens": len(splits.train),
                "valid_tokens": len(splits.valid),
                "test_tokens": len(splits.test),
                "kernels": [str(line) for line in explain_training(model, plan)],
                "end": resolved.ending.text,
                "resumed_from": None if found is None else found.step,
                **{name: getattr(config, name) for name in _ANNOUNCED},
            }
        )

    def _emit(self, event: Event) -> None:
        """Hands an event to every observer; one whose disk or pipe fails gets no more."""
        for observer in list(self._observers):
            try:
                observer(event)
            except OSError as error:
                self._observers.remove(observer)
                name = type(observer).__name__
                self._say("warning", f"{name} stopped ({error.strerror}); the run goes on")

    def _say(self, level: str, text: str) -> None:
        self._emit({"event": "message", "level": level, "text": text})


def explain_training(model: LanguageModel, plan: TrainPlan) -> list[LayerReport]:
    """Returns one report per layer for the batch and precision that training uses."""
    config = plan.config
    assert config.seq_length is not None
    tokens = torch.zeros(config.seq_length, config.batch_size, dtype=torch.long, device=plan.device)
    with autocast(config.precision, plan.device):
        return explain(model, tokens)


def given_config(files: dict[str, bytes]) -> TrainConfig:
    """Returns the configuration as the user first gave it, before anything was decided."""
    return from_dict(json.loads(files["config.json"])["given"], "config.json")


def resumed_config(
    new_config: TrainConfig, names: Collection[str], files: dict[str, bytes]
) -> TrainConfig:
    """Returns the configuration a run was begun with, with what may change taken from the new one.

    Args:
        new_config: what is asked for now.
        names: the fields of it that were given; the others are defaults.
        files: of the checkpoint.

    Raises:
        ConfigError: a field is given that belongs to what was begun and differs from it.
    """
    begun = from_dict(json.loads(files["config.json"])["train"], "config.json")
    first = given_config(files)
    changes = {}
    for name in names:
        new = getattr(new_config, name)
        if new in (getattr(first, name), getattr(begun, name)):
            continue
        if name not in _MAY_CHANGE:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} {new}: this run was begun with {getattr(begun, name)}; leave the flag out"
                " to resume, or start a new run with another --out"
            )
        changes[name] = new
    if changes.keys() & {"steps", "epochs", "budget"}:
        changes = {"steps": None, "epochs": None, "budget": None, **changes}
    return dataclasses.replace(begun, **changes)


def _set_up_device(config: TrainConfig) -> torch.device:
    hardware.keep_freed_memory()
    torch.set_num_threads(config.threads or hardware.default_threads())
    device = choose_device(config.device)
    if device.type == "cpu" and config.memory_limit_gb is not None:
        raise ConfigError(
            "--memory-limit-gb bounds GPU memory and this run is on the CPU; leave it out"
        )
    if config.memory_limit_gb is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, config.memory_limit_gb * 2**30 / total), device
        )
    return device


def _source_name(source: Source) -> str:
    first = source if isinstance(source, str | Path) else (source[0] if source else "run")
    return "stdin" if str(first) == "-" else Path(first).name.split(".")[0] or "run"
