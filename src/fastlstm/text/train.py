"""`train()`: from a text to a trained run directory. The main path of the package."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastlstm.distributed.joining import joined
from fastlstm.errors import ConfigError, DataError, FormatError, UnknownCharacterError
from fastlstm.ops.call import LSTMCall
from fastlstm.ops.cell_options import CellOptions
from fastlstm.ops.explain import explain
from fastlstm.report.history import read_history
from fastlstm.report.html import InNotebook
from fastlstm.report.lines import end_rows
from fastlstm.report.progress import default_output
from fastlstm.runs.events import Event, Observer, checked_observers
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system.fields import built, called_with
from fastlstm.text.config import (
    OPTIONS_OF_TABLES,
    PARTS,
    WHY_NOT_OF_TEXTS,
    ModelConfig,
    TrainConfig,
    require_format,
)
from fastlstm.text.data.source_kind import kind_of_source
from fastlstm.text.data.sources import InputText, open_source
from fastlstm.text.data.text import (
    READING,
    Splits,
    TextDataset,
    UnknownPolicy,
    prepare_text,
    split_shares,
)
from fastlstm.text.data.tokenizer import Ids, Tokenizer, load_tokenizer
from fastlstm.text.evaluation import Evaluation
from fastlstm.text.files import load_language_model, settings_files
from fastlstm.text.held_out import RunText, another_text, open_held_out
from fastlstm.text.model import LanguageModel, initialize
from fastlstm.text.pipelined_task import PipelinedTextTask, check_pipeline, stage_names
from fastlstm.text.plan import LONG, choose_seq_length, fit_batch, resolve, training_loader
from fastlstm.text.size_plan import budget_plan
from fastlstm.text.task import FinalTest, Outlook, Samples, TextTask, has_outlook
from fastlstm.text.warm_start import CONTINUED_RATE, WarmStart, refuse_other_start
from fastlstm.training.callbacks import Callback, checked_callbacks
from fastlstm.training.checkpoint import Checkpoint, reading
from fastlstm.training.optimizer import DEFAULT_LEARNING_RATE
from fastlstm.training.options import MAY_CHANGE, chosen_names
from fastlstm.training.plan import TrainingPlan
from fastlstm.training.precision import PrecisionChoice, autocast, require_fast_kernels
from fastlstm.training.remembered_plan import ChosenPlan
from fastlstm.training.session import RunSession, Start, locked_run, torch_settings_kept
from fastlstm.training.signals import StopFlag

if TYPE_CHECKING:
    from fastlstm.report.picture import Picture

Source = str | Path | Sequence[str | Path]

TEXT_MAY_CHANGE = MAY_CHANGE | {"sample_every", "cache_dir", "pipeline", *PARTS}
"""Also texts: they may be found under another name, as a resumed run compares their content."""


@dataclass(frozen=True)
class Run(InNotebook):
    """A finished training run.

    Attributes:
        path: the run directory; `LM.load(run)` takes it.
        evaluation: the last evaluation of the validation split.
        test: evaluation of the best model on the text `test`; None if no such text was given.
    """

    path: Path
    evaluation: Evaluation
    test: Evaluation | None = None

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def bits_per_char(self) -> float:
        """Bits per character of the validation split, at the end."""
        return self.evaluation.bits_per_char

    def plot(self) -> Picture:
        """Returns bits per character of training and validation by tokens, as a matplotlib Figure;
        by steps if `log_every` left no step events.

        Raises:
            DataError: metrics.jsonl is missing.
        """
        from fastlstm.report.picture import training_picture

        return training_picture(self.path)

    def _rows(self) -> list[tuple[str, str]]:
        history = read_history(self.path / "metrics.jsonl")
        return [("run", str(self.path)), *end_rows(history.end or {}, history.start)]


def train(
    source: Source,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    config: TrainConfig | None = None,
    observers: Sequence[Observer] | None = None,
    callbacks: Sequence[Callback] = (),
    stop: StopFlag | None = None,
    given: Collection[str] = (),
    began: float | None = None,
    as_text: bool = False,
    start: str | Path | None = None,
    **fields: Any,
) -> Run:
    """Trains a language model on a text.

    Args:
        source: a file, several files, a directory, a glob, "-", or a built-in corpus
            ("python-docs").
        out: the run directory; default `runs/<name of the source>`.
        resume: continue if `out` holds a checkpoint, else start.
        config: all settings at once; or give single `fields` of TrainConfig instead.
        observers: called with every event, a plain dict (docs/runs.md lists them); by default
            progress is shown on standard output; `()` shows nothing.
        callbacks: see `fastlstm.Callback`.
        stop: polled; by default the first SIGTERM or Ctrl-C sets it.
        given: names of the fields of `config` that the caller set; a resumed run compares them
            with its first start.
        began: `time.perf_counter()` from which a budget counts; default now.
        as_text: train on the characters of a table; else a table is refused.
        start: a run, such as an imported one, whose sizes, vocabulary and weights this run starts
            with; contradicting settings are refused. To resume, give the same run or none.
        **fields: fields of TrainConfig.

    Returns:
        The run; `run.path` is the directory, `run.bits_per_char` the final quality.

    Raises:
        UsageError: the request cannot be carried out as given.
        Stopped: SIGTERM or Ctrl-C; the state is saved.
        NonFiniteError: NaN or Inf that training could not recover from.
        BudgetError: the budget was over before the first step.
    """
    began = time.perf_counter() if began is None else began
    _refuse_options_of_tables(fields)
    config = called_with(TrainConfig, config, fields, "train()", stop)
    observers = None if observers is None else checked_observers(observers)
    with ExitStack() as stack:
        stack.enter_context(torch_settings_kept())
        world = stack.enter_context(joined(config, stop))
        with world.together():
            opened = open_source(source, config.text_field)
            if not (as_text or resume):
                _refuse_tables(source, config)
        callbacks, resume = checked_callbacks(callbacks), resume or world.attempt > 0
        path = Path("runs") / _source_name(source) if out is None else out
        is_resumed = resume and bool(RunDirectory(path).checkpoints())  # it has the weights
        first = None
        if start is not None and not is_resumed and world.is_leader:
            first = WarmStart.of_run(start)
        chosen = {*given, *fields} or chosen_names(config)
        if first is not None:
            config = first.options(config, chosen)
        if stop is None:
            stop = stack.enter_context(StopFlag())
        run = stack.enter_context(locked_run(path if world.is_leader else None))
        if observers is None and world.is_leader:
            observers = [stack.enter_context(default_output(use_json=False))]
        session = TextSession(run, observers or [], stop, began, world)
        session.chosen, session.path = chosen, Path(path)
        if first is not None:
            session.start_with(first, config)
        stored = partial(session.configs_of, start=start)
        with session.start(config, {*given, *fields}, resume, stored, TEXT_MAY_CHANGE) as begun:
            return session.train(opened, begun, callbacks)


class TextSession(RunSession):
    """One start of a run: prepares the text, builds the model, trains, reports.

    A subclass may start from a trained model in another way: it sets a `tokenizer`, says what to do
    with characters that the tokenizer lacks, and overrides `set_weights`, `model_files`,
    `make_task` and `final_test`.
    """

    tokenizer: Tokenizer | None = None
    unknown: UnknownPolicy = "refuse"
    chosen: Collection[str] | None = None
    """Names of the given options; with None a budget chooses no size."""
    path = Path()
    """The run directory, even if another process writes it."""
    _first_model: LanguageModel | None = None
    _first_text: str | None = None
    _started_with: dict[str, str] | None = None

    def start_with(self, first: WarmStart, config: TrainConfig) -> None:
        """Has training start with a trained model; `config` are the options with its sizes."""
        self._first_model = first.loaded.model
        self._started_with = {"path": first.path, "model_sha256": first.sha256}
        self._first_text = first.loaded.config.get("data", {}).get("key")
        self.is_trained = True
        self.tokenizer, self.unknown = first.loaded.tokenizer, "count"
        self.notes += first.notes(config)

    def configs_of(
        self, checkpoint: Checkpoint, start: str | Path | None
    ) -> tuple[TrainConfig, TrainConfig]:
        """Works like `stored_configs`, for a run that `train` started; adds `start` if given."""
        stored, path = json.loads(checkpoint.files["config.json"]), checkpoint.path.parent
        if "compression" in stored:
            raise FormatError(
                f"'{path}' was started by compress, not by train; continue it with compress and"
                " `resume=True`, or give another `out`"
            )
        self._started_with = refuse_other_start(path, stored, start)
        return stored_configs(checkpoint)

    def train(
        self, source: InputText, start: Start[TrainConfig], callbacks: Sequence[Callback]
    ) -> Run:
        config, device, checkpoint = start.options, start.device, start.checkpoint
        require_fast_kernels(config, _layer_call(config, device))
        texts = self._prepared(source, config, checkpoint)
        self.mark()
        text, splits = texts.source, texts.splits()
        num, is_new = len(splits.train), bool(self.world.decided(checkpoint is None)[0])
        chosen = self.of_leader(ChosenPlan, lambda: self._plan(start, splits.train, text.tokenizer))
        told: Any = chosen.precision  # from rank 0; the others get a dict
        precision = told if isinstance(told, PrecisionChoice) else PrecisionChoice(**told)
        config = replace(config, **chosen.changes)
        sizes = config.model_config(text.tokenizer.vocab_size, config.dropout or 0.0)
        model = LanguageModel(sizes).to(device)
        model.strict_kernels = config.strict_kernels
        config, notes = self._rated(config, text), tuple[str, ...]()
        if is_new:
            config, notes = fit_batch(choose_seq_length(config, chosen.tokens, num), num)
        of_pipeline = check_pipeline(config, sizes.num_layers, device, self.world)
        self.check_processes(config)
        share = self.world.share if config.divides_batch else None
        loader = training_loader(config, splits.train, self.loader_stop, share)
        if self.world.is_leader:
            self.set_weights(model, texts, config)
        lengths = num, len(splits.valid), loader.steps_per_epoch, model.num_parameters
        config, reasons = resolve(config, precision.name, chosen.tokens, device, *lengths)
        model.config = config.model_config(text.tokenizer.vocab_size, config.dropout or 0.0)
        self.notes += [*texts.notes(), *notes, *reasons, *of_pipeline]
        plan = self.plan(config, device, checkpoint, loader.steps_per_epoch, config.eval_every)
        short, others = texts.caveats()
        files = self.model_files(model.config, config, texts, start.first)
        task = self.make_task(
            config=config, model=model, loader=loader, valid_ids=splits.valid,
            tokenizer=text.tokenizer, device=device, model_files=files, run=self.run,
            report_s=self.report_s(), final_test=self.final_test(texts, plan),
            caveats=(*short, *others),
        )  # fmt: skip
        about = _about(text, splits, config, model, plan, start.why(precision))
        own = _callbacks(config, model, text.tokenizer, num)
        warning = "; ".join(short) or None
        result = self.fit(task, plan, checkpoint, [*own, *callbacks], about, warning)
        tested = self.world.told(None if task.tested is None else asdict(task.tested))
        return Run(self.path, result.last.detail, tested and Evaluation(**tested))

    def _plan(self, start: Start[TrainConfig], ids: Ids, tokenizer: Tokenizer) -> ChosenPlan:
        """Returns the precision and, where a budget chooses them, size, batch and optimizer."""
        is_new = start.checkpoint is None
        given = self.chosen if is_new and self._first_model is None else None
        with self.part_of_setup("the plan"):
            plan = budget_plan(
                start.options, given, ids, tokenizer, start.device, self.started, is_new=is_new
            )
        self.notes += [plan.why] if plan.why else []
        return plan

    def _rated(self, config: TrainConfig, text: TextDataset) -> TrainConfig:
        """Returns the options with a learning rate, lower for the text of the run in `start`."""
        is_same, rates = self.world.decided(text.key == self._first_text)[0], DEFAULT_LEARNING_RATE
        if is_same and config.learning_rate is None:
            rates = {name: CONTINUED_RATE * rate for name, rate in rates.items()}
            self.notes.append(
                f"learning rate {rates[config.optimizer]:.3g}, {CONTINUED_RATE:g} of the default:"
                " the run in `start` was trained on this text"
            )
        return self.with_rate(config, rates)

    def set_weights(self, model: LanguageModel, texts: RunText, config: TrainConfig) -> None:
        if self._first_model is None:
            initialize(model, texts.train_counts(), config.seed)
        else:
            model.load_state_dict(self._first_model.state_dict())

    def model_files(
        self, model: ModelConfig, config: TrainConfig, texts: RunText, first: TrainConfig
    ) -> dict[str, bytes]:
        names = ("source", "key", "num_bytes", "num_chars")
        named = {"": texts.source, **texts.held_out}
        data = {part: {n: getattr(own, n) for n in names} for part, own in named.items()}
        more = {} if self._started_with is None else {"start": self._started_with}
        return settings_files(
            model, texts.source.tokenizer, asdict(config), data.pop("") | data,
            given=asdict(first), **more,
        )  # fmt: skip

    def make_task(self, **parts: Any) -> TextTask:
        """Returns what is trained; `parts` are the fields of `TextTask`."""
        if parts["config"].pipeline and self.world.size > 1:
            return PipelinedTextTask(world=self.world, **parts)
        return TextTask(**parts)

    def final_test(self, texts: RunText, plan: TrainingPlan) -> FinalTest | None:
        """Returns what the best model is scored on at the end, or None."""
        if "test" not in texts.held_out or self.run is None:
            return None
        path, text = self.run.path, texts.held_out["test"]
        return FinalTest(
            text.source, text.ids, plan.stop_criterion.budget_s,
            lambda: load_language_model(path).model.to(plan.device),
            self.watch("scoring the test text", "tokens"),
        )  # fmt: skip

    def _prepared(
        self, source: InputText, config: TrainConfig, checkpoint: Checkpoint | None
    ) -> RunText:
        """Returns the text with its vocabulary; other processes read it after rank 0."""
        if self.world.is_leader:
            texts = self._prepare(source, config, checkpoint)
            self.world.told(texts.source.tokenizer.to_json().decode())
        else:
            self.tokenizer, self.unknown = load_tokenizer(self.world.told().encode()), "count"
        with self.world.together():
            if not self.world.is_leader:
                texts = self._prepare(source, config, checkpoint)
        keys = {name: held_out.key for name, held_out in texts.held_out.items() if name == "valid"}
        self.require_same([texts.source.key, keys], f"{texts.source.source} is another text")
        return texts

    def _prepare(
        self, source: InputText, config: TrainConfig, checkpoint: Checkpoint | None
    ) -> RunText:
        opened = open_held_out(config, source)
        tokenizer, stored, unknown = self.tokenizer, None, self.unknown
        if checkpoint is not None:
            unknown = "count"  # as at the first start; another text has another key
            with reading(checkpoint):
                tokenizer = load_tokenizer(checkpoint.files["tokenizer.json"])
                stored = _stored_data(checkpoint)
            for part in PARTS:
                if (part in stored) != (part in opened):
                    raise another_text(self.path, stored.get(part), opened.get(part), part)
        try:
            share = split_shares(config.split, opened)[0]
            text = self._encode(source, config, tokenizer, unknown, share)
        except UnknownCharacterError:
            if stored is None:  # a new run that has a vocabulary from the start
                raise
            raise another_text(self.path, stored, source) from None
        if stored is not None and text.key != stored["key"]:
            raise another_text(self.path, stored, source)
        held_out = {}
        for part, own in opened.items():
            held_out[part] = self._encode(own, config, text.tokenizer, "count")
            if stored is not None and held_out[part].key != stored[part]["key"]:
                raise another_text(self.path, stored[part], own, part)
        return RunText(text, held_out, config.split)

    def _encode(
        self,
        source: InputText,
        config: TrainConfig,
        tokenizer: Tokenizer | None,
        unknown: UnknownPolicy,
        train_share: float = 1.0,
    ) -> TextDataset:
        with self.part_of_setup("the text", is_cached=True):
            return prepare_text(
                source,
                **{name: getattr(config, name) for name in ("vocab", "vocab_size", *READING)},
                train_share=train_share,
                tokenizer=tokenizer,
                unknown=unknown,
                on_progress=lambda done, total: self.emit(
                    {"event": "prepare", "done_bytes": done, "total_bytes": total}
                ),
                should_stop=self.stop,
            )


def _callbacks(
    config: TrainConfig, model: LanguageModel, tokenizer: Tokenizer, train_tokens: int
) -> Iterator[Callback]:
    if config.sample_every:
        yield Samples(config.sample_every, tokenizer, config.seed)
    if has_outlook(config.cooldown, config.patience, config.vocab):
        yield Outlook(model.config, train_tokens)


def _about(
    text: TextDataset, splits: Splits, config: TrainConfig, model: LanguageModel,
    plan: TrainingPlan, precision_why: str,
) -> Event:  # fmt: skip
    """Returns the keys of the `start` event that only texts have."""
    assert config.seq_length is not None
    tokens = torch.zeros(config.seq_length, config.batch_size, dtype=torch.long, device=plan.device)
    with autocast(config.precision, plan.device):
        kernels = explain(model, tokens)
    return {
        "source": text.source,
        "model": model.config.to_dict(),
        **{name: getattr(config, name) for name in ("vocab", "seq_length", "dropout")},
        "vocab_size": text.tokenizer.vocab_size,
        "num_units": {part: len(ids) for part, ids in vars(splits).items()},
        "kernels": [str(line) for line in kernels],
        "precision_why": precision_why,
        **stage_names(config, model.config, plan.world),
    }


def _layer_call(config: TrainConfig, device: torch.device) -> LSTMCall:
    """Returns the call of the last layer of a training step, before the text is known."""
    H, T = config.model_config(1 << 20, 0.0).rnn_size, config.seq_length or LONG
    options = CellOptions.of(config)
    return LSTMCall(T, config.batch_size, H, H, torch.float32, device.type, True, options=options)


def _stored_data(checkpoint: Checkpoint) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(checkpoint.files["config.json"])["data"]
    kinds = {"source": str, "key": str, "num_chars": int}
    for text in (data, *(data[part] for part in PARTS if part in data)):
        for name, kind in kinds.items():
            if type(text[name]) is not kind:
                raise TypeError(f"data.{name} of config.json is {text[name]!r:.80}")
    return data


def stored_configs(checkpoint: Checkpoint) -> tuple[TrainConfig, TrainConfig]:
    """Returns the options of a checkpoint, resolved and as the user first gave them."""
    stored = json.loads(checkpoint.files["config.json"])
    require_format(stored)
    configs = [built(TrainConfig, stored[name], "config.json") for name in ("train", "given")]
    return configs[0], configs[1]


def _refuse_tables(source: Source, config: TrainConfig) -> None:
    names = [source] if isinstance(source, str | Path) else source
    parts = [name for name in (config.valid, config.test) if name is not None]
    for name in (*names, *parts):
        kind = kind_of_source(str(name), config.text_field)
        if kind in ("csv", "binary table", "mixed"):
            raise DataError(
                f"{name} holds {'tables and texts' if kind == 'mixed' else 'a table'}:"
                " fastlstm.Forecaster(horizon=N).fit(table) trains a forecaster; to train a text"
                " model on the characters, give as_text=True"
            )


def _refuse_options_of_tables(fields: Collection[str]) -> None:
    if "verbose" in fields:
        raise ConfigError("train() has no `verbose`; `observers=()` shows nothing")
    for name in fields:
        if name in OPTIONS_OF_TABLES:
            why = f" ({WHY_NOT_OF_TEXTS[name]})" if name in WHY_NOT_OF_TEXTS else ""
            raise ConfigError(
                f"train() trains a text model and '{name}' is for a table{why}; to train a"
                f" forecaster: fastlstm.Forecaster({name}=…).fit(table)"
            )


def _source_name(source: Source) -> str:
    first = source if isinstance(source, str | Path) else (source[0] if source else "run")
    return "stdin" if str(first) == "-" else Path(first).name.split(".")[0] or "run"
