"""`compress()`: makes a trained model smaller and faster, and measures the cost.

A `CompressionSession` compresses a text model (`text.py`) or a forecaster (`forecast.py`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from fastlstm.compression.fake_quantization import FakeQuantization
from fastlstm.compression.options import (
    COMPRESS_MAY_CHANGE,
    OF_FORECASTERS,
    OF_TEXTS,
    STUDENT_SIZES,
    CompressConfig,
    Structure,
    WeightFormat,
)
from fastlstm.compression.pruning import Config, HeldZeros, Pruning, num_units, smaller_size
from fastlstm.compression.report import (
    REPORT_FILE,
    CompressReport,
    TrainingFigures,
    quality_error,
)
from fastlstm.errors import ConfigError, FastLSTMError, FormatError, RunDirectoryError
from fastlstm.report.page import write_report
from fastlstm.report.progress import default_output
from fastlstm.runs.events import SPELLING, Event, Observer, checked_observers
from fastlstm.runs.find_run import require_run
from fastlstm.runs.run_directory import RunDirectory, kind_of_run
from fastlstm.runs.weight_formats import checked_compression
from fastlstm.system.fields import built, called_with
from fastlstm.system.storage import encode_json
from fastlstm.training.callbacks import Callback, checked_callbacks
from fastlstm.training.session import (
    checkpoint_to_resume,
    locked_run,
    resumed_config,
    torch_settings_kept,
)
from fastlstm.training.signals import StopFlag
from fastlstm.training.trainer import Trainer

NEW_ROUNDING_BEGIN = 0.6
"""Share of the run after which a new student is rounded; other models are rounded from the
start."""


def compress(
    run: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    data: Any = None,
    resume: bool = False,
    config: CompressConfig | None = None,
    observers: Sequence[Observer] | None = None,
    callbacks: Sequence[Callback] = (),
    stop: StopFlag | None = None,
    given: Collection[str] = (),
    started: float | None = None,
    **fields: Any,
) -> CompressReport:
    """Makes a trained text model or forecaster smaller and faster.

    The result is a run like any other: `LM.load(out)`, `fastlstm serve`, … take it.

    Args:
        run: the run directory of the source, one of its checkpoints, or the result of `train()`.
        out: the run directory to write.
        data: text or table to train and measure on, in any form that `train` takes; default is the
            data of the source, if it can still be read.
        resume: continue from a checkpoint in `out`, or start without one.
        config: all options at once; or give single `fields` of `CompressConfig` instead.
        observers: called with every event of training, a plain dict; by default progress is shown
            on standard output, `()` is silent.
        callbacks: see `fastlstm.Callback`.
        stop: function that is polled; by default the first SIGTERM or Ctrl-C stops the run.
        given: fields of `config` that were chosen, not defaults; a resumed compression compares
            them with its first start.
        started: `time.perf_counter()` from which a budget counts; default now.
        **fields: fields of `CompressConfig`: to, prune, structured, distil, budget, max_loss, ….

    Returns:
        The model before and after; also in `out` as compression.json.

    Raises:
        UsageError: an argument is wrong.
        QualityError: the loss is above `max_loss`; nothing is published.
        Stopped: SIGTERM or Ctrl-C; the state is saved.
        NonFiniteError: NaN or Inf that training could not recover from.
        BudgetError: the budget was over before the first step.
    """
    started = time.perf_counter() if started is None else started
    config = called_with(CompressConfig, config, fields, "compress()", stop)
    observers = None if observers is None else checked_observers(observers)
    callbacks = checked_callbacks(callbacks)
    target = RunDirectory(out).path
    require_run(run, verb="compress")
    path = Path(run)
    inside = [path.absolute(), *path.absolute().parents[:1]]
    if any(target.exists() and os.path.samefile(target, place) for place in inside):
        raise RunDirectoryError(f"{target} holds the run to compress; give another `out`")
    is_text = kind_of_run(path) != "forecaster"
    config.refuse(OF_FORECASTERS if is_text else OF_TEXTS, "a text" if is_text else "a forecaster")
    with ExitStack() as stack:
        stack.enter_context(torch_settings_kept())
        if stop is None:
            stop = stack.enter_context(StopFlag())
        if observers is None:
            observers = [stack.enter_context(default_output(use_json=False))]
        if is_text:
            from fastlstm.compression.text import TextCompression

            kind: type[CompressionSession] = TextCompression
        else:
            from fastlstm.compression.forecast import ForecastCompression

            kind = ForecastCompression
        return kind(
            run=path, out=target, data=data, config=config, given=frozenset({*given, *fields}),
            resume=resume, observers=observers, callbacks=callbacks, stop=stop, started=started,
        ).compress()  # fmt: skip


class Result(NamedTuple):
    """A compressed model, of the type that its `CompressionSession` measures, and its files."""

    model: Any
    sizes: Config
    files: Mapping[str, bytes]


@dataclass(eq=False, kw_only=True)
class CompressionSession(ABC):
    """One call of `compress` with checked arguments: reads, trains and measures one kind of model.

    Attributes:
        run: directory of the model to compress (the source), or one of its checkpoints.
        out: directory of the result.
        config: options; a resumed session has those of its first start.
        given: names of the options that were set.
        notes: remarks for the user.
        report: the result.
        before: `compression` of the source's config.json; empty for an ordinary run.
        learning_rate: peak learning rate of the source; None if unknown.
        facts: entries on the source in config.json of a result, besides path and hash.
        own_facts: entries of `compression` that only this kind has.
    """

    unit: ClassVar[str]
    run: Path
    out: Path
    data: Any
    config: CompressConfig
    given: frozenset[str]
    resume: bool
    observers: list[Observer]
    callbacks: Sequence[Callback]
    stop: Callable[[], bool] | None
    started: float
    notes: list[str] = field(default_factory=list, init=False)
    report: CompressReport | None = field(default=None, init=False)
    teacher: dict[str, str] | None = field(default=None, init=False)
    sizes: Config = field(init=False)
    sha256: str = field(init=False)
    before: Mapping[str, Any] = field(init=False)
    learning_rate: float | None = field(init=False)
    facts: Mapping[str, Any] = field(init=False)
    own_facts: Mapping[str, Any] = field(default_factory=dict, init=False)

    @abstractmethod
    def __post_init__(self) -> None:
        """Reads the source."""

    @property
    def peak_rate(self) -> float | None:
        """The peak learning rate of the first run in a chain of compressions.

        A student is the first run of a new chain.
        """
        own, options = self.learning_rate, self.before.get("options", {})
        if any(options.get(name) is not None for name in STUDENT_SIZES):
            return own
        rate: float | None = self.before.get("source", {}).get("learning_rate", own)
        return rate

    @abstractmethod
    def ways(self) -> Sequence[CompressionWay]:
        """Returns the ways to compress, mildest first."""

    @abstractmethod
    def attempt(self, config: CompressConfig) -> Attempt:
        """Prunes and rounds the weights without training, and measures the result."""

    @abstractmethod
    def open_teacher(self) -> dict[str, str] | None:
        """Opens the teacher, if any; returns its path and hash for config.json."""

    @abstractmethod
    def find_data(self) -> None:
        """Opens the data to measure on, or finds the reason why there is none."""

    @abstractmethod
    def plain(self) -> Result:
        """Returns the source in the requested rank and format, without training."""

    @abstractmethod
    def train(self) -> None:
        """Trains, then calls `conclude` with the result."""

    @abstractmethod
    def measured(
        self, result: Result, methods: list[str], training: TrainingFigures | None
    ) -> CompressReport:
        """Measures a result beside the source."""

    def student_text(self, sizes: Any) -> str:
        return "a new model"

    def compress(self) -> CompressReport:
        """Rounds or trains a model, and measures it beside its source."""
        if is_resumed := self.resume and bool(RunDirectory(self.out).checkpoints()):
            first = self._first_start()
        else:
            self.config.require_change(self.before)
            self._reach_goal()
            self.config.require_teacher(self.config.is_taught)
        if not (is_resumed or self.config.trains):
            self.config.require_work()
            return self._round()
        self.teacher = self.open_teacher()
        before, now = first.get("teacher") if is_resumed else None, self.teacher or {}
        if before is not None and before.get("model_sha256") != now.get("model_sha256"):
            raise FormatError(
                f"'{self.out}' was started with another teacher, or {before.get('path')} has"
                " changed since; give another `out`"
            )
        self.train()
        if self.report is None:
            raise ConfigError(
                "training ended before the weights were pruned and rounded, so there is no"
                " compressed model; give `resume=True` and more `budget` or `steps`"
            )
        if not self.report.is_published:
            raise quality_error(self.report, is_trained=True)
        return self.report

    def _first_start(self) -> Mapping[str, Any]:
        """Restores the options of a resumed compression; returns its record."""
        checkpoint = RunDirectory(self.out).intact_checkpoint()
        if checkpoint is None:
            return {}
        data = RunDirectory(checkpoint).read_published(["config.json"])[1]["config.json"]
        about = json.loads(data).get("compression")
        if not isinstance(about, dict):
            raise FormatError(
                f"'{self.out}' was started by train, not by compress; give another `out`"
            )
        try:
            checked_compression(about)
        except ValueError as error:
            raise FormatError(f"{checkpoint / 'config.json'}: {error}") from None
        if about["source"]["model_sha256"] != self.sha256:
            raise FormatError(
                f"'{self.out}' was started from another model ({about['source']['path']}), or"
                f" {self.run} has changed since; give another `out`"
            )
        first = built(CompressConfig, about["options"], "config.json")
        self.config = resumed_config(self.config, self.given, first, first, COMPRESS_MAY_CHANGE)
        return about

    def _reach_goal(self) -> None:
        if not self.config.has_goal:
            return
        self.config.refuse_method()

        def say(text: str) -> None:
            text = SPELLING.get()(text)
            self.notes.append(text)
            for observer in self.observers:
                observer({"event": "message", "level": "info", "text": text})

        self.config = chosen(self.config, self.ways(), self.attempt, self.unit, say)

    def _round(self) -> CompressReport:
        with locked_run(self.out) as run:
            assert run is not None
            checkpoint_to_resume(run, False, lambda level, text: None)  # refuses a run
            self.find_data()
            result = self.plain()
            self.report = report = self._measured(result, None)
            if not report.is_published:
                raise quality_error(report, is_trained=False)
            run.publish({**result.files, **self.report_files()})
            with suppress(FastLSTMError):  # the model is there; a page is not worth an error
                write_report(run.path)
        return report

    def conclude(self, trainer: Trainer, trained: Callable[[], Result]) -> Result | None:
        """Measures what was trained; returns it if it may be published, else None."""
        if trainer.progress.best_step < 0:
            return None
        training = TrainingFigures(
            steps=trainer.progress.step,
            seconds=trainer.elapsed_s(),
            teacher_s=trainer.task.teacher_s,  # type: ignore[attr-defined]
            reason=trainer.reason,
        )
        with trainer.progress.counted("measuring"):
            result = trained()
            self.report = self._measured(result, training)
        return result if self.report.is_published else None

    def end_event(self) -> Event:
        return {} if self.report is None else {"compression": self.report.to_dict()}

    def report_files(self) -> dict[str, bytes]:
        return {} if self.report is None else {REPORT_FILE: encode_json(self.report.to_dict())}

    def _measured(self, result: Result, training: TrainingFigures | None) -> CompressReport:
        methods = self._methods(result, is_trained=training is not None)
        return self.measured(result, methods, training).checked()

    def _methods(self, result: Result, *, is_trained: bool) -> list[str]:
        config, methods = self.config, list[str]()
        before, after = self.sizes, result.sizes
        if config.prune is not None and config.structured == "units":
            old, new = num_units(before), num_units(after)
            removed = f"{100 * (1 - new / old):.4g} % of the hidden units pruned"
            methods.append(f"{removed} ({old:,} -> {new:,})")
        elif config.prune is not None:
            what = "weights" if config.structured == "none" else "blocks of weights"
            methods.append(f"{100 * config.prune:g} % of the {what} pruned")
        if config.output_rank is not None and not config.is_new_student:
            rank, width = getattr(after, "output_rank", None), getattr(before, "output_width", None)
            methods.append(f"output of rank {rank} instead of {width}")
        if config.is_taught and is_trained:
            text = f", {self.student_text(after)}"
            student = text if config.is_new_student else ""
            methods.append(f"distilled from {config.distil or self.run}{student}")
        if config.to != "fp32":
            how = "trained with its rounding" if is_trained else "rounded to the nearest"
            methods.append(f"{config.to}, {how}")
        return methods or ["trained on"]

    def about(self, config: CompressConfig) -> dict[str, Any]:
        """Returns `compression` for config.json of a result."""
        share, structured = config.prune, None if config.prune is None else config.structured
        if share is not None and structured == "units":
            units = num_units(self.sizes)
            share = 1.0 - smaller_size(units, share) / units
        if structured is None and not config.is_new_student:  # zeros of the source stay
            share, structured = self.before.get("prune"), self.before.get("structured")
        return {
            "weights": config.to,
            "prune": share,
            "structured": structured,
            "options": dataclasses.asdict(config),
            "source": {
                "path": str(self.run),
                "model_sha256": self.sha256,
                **self.facts,
            },
            "teacher": self.teacher,
            **self.own_facts,
        }

    def all_callbacks(self) -> list[Callback]:
        """Returns the callbacks of training: pruning, then rounding, then the caller's.

        Rounding begins when pruning ends. A pruned source keeps its zeros.
        """
        config, callbacks = self.config, list[Callback]()
        rounding_begin = NEW_ROUNDING_BEGIN if config.is_new_student else 0.0
        zeros: Any = self.before.get("structured")
        is_zero = zeros in ("none", "blocks") and not config.is_new_student
        if is_zero and config.structured != "units":
            callbacks.append(HeldZeros(zeros))
        if config.prune is not None and config.structured != "units":
            schedule = config.pruning_schedule()
            callbacks.append(Pruning(schedule, config.structured))
            rounding_begin = schedule.end
        if config.to != "fp32":
            callbacks.append(FakeQuantization(config.to, rounding_begin))
        if config.is_taught:
            callbacks.append(TeacherTime())
        return [*callbacks, *self.callbacks]


class TeacherTime(Callback):
    """Adds up `teacher_s` of a task, the seconds in the teacher, over all starts of a run."""

    def __init__(self) -> None:
        self._earlier_s = 0.0
        self._task: Any = None

    def on_begin(self, trainer: Trainer) -> None:
        self._task = trainer.task
        self._task.teacher_s += self._earlier_s  # with the time to catch up

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self._task.teacher_s}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._earlier_s = float(state["seconds"])
        if not math.isfinite(self._earlier_s):
            raise ValueError("the teacher's seconds are not finite")


class CompressionWay(NamedTuple):
    """A way to compress; the fields are those of `CompressConfig`."""

    to: WeightFormat
    prune: float | None = None
    structured: Structure = "none"
    output_rank: int | None = None

    def __str__(self) -> str:
        parts: list[str] = [self.to]
        if self.output_rank is not None:
            parts.insert(0, f"output of rank {self.output_rank}")
        if self.prune is not None:
            what = "hidden units" if self.structured == "units" else "blocks"
            parts.insert(0, f"{100 * self.prune:g} % of the {what} removed")
        return ", ".join(parts)


class Attempt(NamedTuple):
    """A way, tried without training: bytes of the file, and speed if there is a target."""

    num_bytes: int
    speed: float | None


WAYS_OF_TEXTS = (
    CompressionWay("int8"),  # +0.0003
    CompressionWay("int4"),  # +0.0084
    CompressionWay("int8", 0.5, "blocks"),  # -0.0465
    CompressionWay("int8", 0.75, "blocks"),  # -0.0225
    CompressionWay("int8", 0.25, "units"),
    CompressionWay("int8", 0.5, "units"),  # +0.0102
    CompressionWay("int4", 0.5, "units"),
    CompressionWay("int8", 0.9, "blocks"),  # +0.0511
    CompressionWay("int8", 0.95, "blocks"),
    CompressionWay("int8", 0.75, "units"),  # +0.1406
    CompressionWay("int4", 0.75, "units"),
    CompressionWay("int4", 0.875, "units"),
)
"""Mildest first: ways that keep every weight, then the others by loss. The comments are the loss in
bits per character after 1,200 steps (int4: 150) of a model of 512 units on tinyshakespeare
(benchmarks/compression.py, docs/compress.md); ways without one were not measured."""
WAYS_OF_FORECASTERS = (
    CompressionWay("int8"),
    CompressionWay("int4"),
    *(
        CompressionWay(to, share, "units")
        for share in (0.25, 0.5, 0.75, 0.875)
        for to in ("int8", "int4")
    ),
)
"""Forecasts are computed in float32 with all zeros: only fewer units make them faster."""


def ways_of_text(output_width: int | None) -> tuple[CompressionWay, ...]:
    """Returns the ways to compress a text model, mildest first.

    With the `output_width` of a large output matrix, some ways lower the rank of that matrix.
    """
    ways = list(WAYS_OF_TEXTS)
    if output_width is None:
        return tuple(ways)
    for before, share, way in (
        (CompressionWay("int8", 0.5, "blocks"), 2, CompressionWay("int8")),
        (CompressionWay("int8", 0.75, "blocks"), 4, CompressionWay("int8")),
        (CompressionWay("int8", 0.9, "blocks"), 8, CompressionWay("int8", 0.5, "units")),
        (CompressionWay("int8", 0.95, "blocks"), 16, CompressionWay("int8", 0.75, "units")),
    ):
        rank = output_width // share // 16 * 16
        if rank:
            ways.insert(ways.index(before), way._replace(output_rank=rank))
    return tuple(ways)


def chosen(
    config: CompressConfig, ways: Sequence[CompressionWay],
    attempt: Callable[[CompressConfig], Attempt], unit: str, say: Callable[[str], None],
) -> CompressConfig:  # fmt: skip
    """Returns the options with the first way that reaches the goal, `target` and `max_bytes`.

    Calls `say` with a line on each attempt. Raises ConfigError, with the best figures, if no way
    reaches the goal.
    """
    speed, limit = config.goal
    attempts: list[tuple[CompressionWay, Attempt]] = []
    for way in ways:
        try:
            own = dataclasses.replace(config, **way._asdict())
            found = attempt(own)
        except ConfigError as error:  # too few units to remove some
            say(f"goal: {way}: {error}")
            continue
        attempts.append((way, found))
        is_fast = speed is None or (found.speed is not None and found.speed >= speed)
        is_small = limit is None or found.num_bytes <= limit
        size = f"{found.num_bytes:,} bytes"
        figures = size if found.speed is None else f"{size}, {found.speed:,.0f} {unit}/s"
        say(f"goal: {way}: {figures}, {'chosen' if is_fast and is_small else 'not enough'}")
        if is_fast and is_small:
            return own
    raise _unreachable(config, attempts, unit)


def _unreachable(
    config: CompressConfig, attempts: Sequence[tuple[CompressionWay, Attempt]], unit: str
) -> ConfigError:
    goal = {"target": config.target, "max_bytes": config.max_bytes}
    asked = [f"`{name}={value!r}`" for name, value in goal.items() if value is not None]
    text = f"{' and '.join(asked)} cannot be reached with this model here"
    if attempts:
        smallest = min(attempts, key=lambda pair: pair[1].num_bytes)
        text += f"; the smallest has {smallest[1].num_bytes:,} bytes ({smallest[0]})"
        if config.target is not None:
            fastest = max(attempts, key=lambda pair: pair[1].speed or 0.0)
            rate = f"{fastest[1].speed or 0.0:,.0f} {unit}/s"
            text += f", the fastest reaches {rate} ({fastest[0]})"
    text += "; train a smaller model as its student, or ask for less"
    return ConfigError(text)
