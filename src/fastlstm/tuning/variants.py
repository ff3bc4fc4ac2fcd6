"""Variants of a training run with one option changed, to time their steps in turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from fastlstm.forecast.plan import LEARNING_RATES
from fastlstm.system import hardware
from fastlstm.system.machine_usage import CORE_WAIT, LEAST_OTHERS, MachineUsage
from fastlstm.text.model import LanguageModel
from fastlstm.text.plan import LONG
from fastlstm.text.task import TextTask
from fastlstm.training.optimizer import DEFAULT_LEARNING_RATE
from fastlstm.training.options import TrainingOptions
from fastlstm.training.step_time import use_up_batches
from fastlstm.training.trainer import Trainer
from fastlstm.tuning.turns import Candidate

EXACT = "exact"
SAME_QUALITY = "same quality expected"
CHANGES_LEARNING = "changes learning"
_LONG_STEP_S = 0.5
"""A step of this length is enough to warm up."""
_WIDE_OUTPUT = 0.3
"""Share of the output matrix in the operations of a step, above which a narrower one is tried."""


@dataclass
class Variant:
    """A training run with one option changed.

    Attributes:
        cause: what holds the run back, should this variant be faster.
        effect: effect on learning: `EXACT`, `SAME_QUALITY` or `CHANGES_LEARNING`.
        step: takes one step and returns its units.
        step_s: approximate seconds of a step.
        has_loader: whether batches come from its loader.
        waits: mean number of threads that waited for a core, by turn.
    """

    cause: str
    effect: str
    options: dict[str, Any]
    trainer: Trainer
    threads: int
    step: Callable[[], int]
    step_s: float = 0.0
    has_loader: bool = True
    waits: list[float] = field(default_factory=list)

    @property
    def is_held_back(self) -> bool:
        """Whether its threads waited for cores that other processes used."""
        return bool(self.waits) and statistics.fmean(self.waits) > CORE_WAIT

    def warm_up(self, count: int = 2) -> None:
        """Takes steps that do not count, and sets `step_s`."""
        torch.set_num_threads(self.threads)
        for _ in range(count):
            started = time.perf_counter()
            self.step()
            self.step_s = time.perf_counter() - started
            if self.step_s > _LONG_STEP_S:
                break

    def turn(self, seconds: float) -> float:
        """Returns the mean seconds per unit of a turn of at least one step.

        No batch is made before the first step. All steps after the first quarter count, as in a
        run: also a wait in every fifth step, and slow steps of threads that share a core.
        """
        usage = MachineUsage()
        if (before := torch.get_num_threads()) != self.threads:
            torch.set_num_threads(self.threads)
            if before > hardware.cores():
                # These threads waited for each other, not for other processes.
                hardware.native().note_core_wait(0.0, self.threads)
            self.step()  # sleeping threads take up to 10 ms to get a core
        if self.has_loader:
            use_up_batches(self.trainer.task.loader)
        times, end = list[float](), time.perf_counter() + seconds
        while not times or time.perf_counter() < end:
            started = time.perf_counter()
            units = self.step()
            times.append((time.perf_counter() - started) / units)
        used = usage.read()
        if "waiting_threads" in used:  # without other processes, own threads share the cores
            is_beside_others = used.get("others_share", 1.0) >= LEAST_OTHERS
            self.waits.append(used["waiting_threads"] if is_beside_others else 0.0)
        return statistics.fmean(times[(len(times) + 1) // 4 :])  # threads wake up in the first ones

    def close(self) -> None:
        if self.has_loader:
            self.trainer.task.loader.close()


def steps_of(trainer: Trainer) -> Callable[[], int]:
    """Returns a function that takes the next step of a run and returns its units."""

    def step() -> int:
        before = trainer.progress.tokens
        trainer.take_step()
        taken = trainer.progress.tokens - before
        # A step with a non-finite loss is skipped: it counts no units, but takes its time.
        return taken or max(1, round(trainer.task.step_units))

    return step


def as_it_is(trainer: Trainer) -> Variant:
    """Returns the run without a change."""
    return Variant("", EXACT, {}, trainer, _threads(trainer.plan.options), steps_of(trainer))


def without_loader(trainer: Trainer) -> Candidate:
    """Returns the run with one batch in memory instead of the loader."""
    task, base = trainer.task, as_it_is(trainer)
    batch = task.loader.next()

    def cached() -> int:
        trainer.step(batch)
        return task.size(batch)

    base.warm_up()
    variant = replace(base, cause="input", step=cached, step_s=0.0, has_loader=False, waits=[])
    return Candidate(lambda: variant, base)


def candidates(trainer: Trainer) -> list[Candidate]:
    """Returns the variants of a run to time.

    Batch, accumulation and sequence length move towards their defaults, which were measured
    (benchmarks/log), and no further.
    """
    task, options = trainer.task, trainer.plan.options
    now = _threads(options)  # variants are made later, when torch may have other threads

    def chain(cause: str, effect: str, values: list[dict[str, Any]]) -> list[Candidate]:
        following: Candidate | None = None
        for changed in reversed(values):
            # A smaller batch makes more steps, each of less speed.
            is_smaller = changed.get("batch_size", math.inf) < options.batch_size
            make = partial(changed_run, trainer, cause, effect, changed, now)
            may_be_slower = "optimizer" in changed or is_smaller
            following = Candidate(make, then=following, may_be_slower=may_be_slower)
        return [following] if following else []

    found = list[Candidate]()
    if trainer.plan.device.type == "cpu":
        cores = hardware.cores()
        for threads in sorted({1, max(1, cores // 2), cores} - {now}, reverse=True):
            found += chain("threads", SAME_QUALITY, [{"threads": threads}])
        if hardware.may_gain_by_bf16():
            other = "fp32" if options.precision == "bf16" else "bf16"
            found += chain("precision", SAME_QUALITY, [{"precision": other}])
    elif options.precision == "fp32":
        found += chain("precision", SAME_QUALITY, [{"precision": "bf16"}])
    if options.accumulate > 1:
        rows = options.accumulate * options.batch_size
        found += chain("accumulation", EXACT, [{"accumulate": 1, "batch_size": rows}])
    for cause, values in _towards_default(task, options).items():
        found += chain(cause, CHANGES_LEARNING, values)
    if isinstance(task, TextTask) and has_wide_output(task):
        rank = narrow_rank(task.model.config.rnn_size)
        found += chain("output layer", CHANGES_LEARNING, [{"output_rank": rank}])
    return found


def _threads(options: TrainingOptions) -> int:
    return options.threads or torch.get_num_threads()


def _towards_default(task: Any, options: TrainingOptions) -> dict[str, list[dict[str, Any]]]:
    """Returns values from an option towards its default, nearest first, by cause."""
    default = type(options)()
    found: dict[str, list[dict[str, Any]]] = {"batch size": [], "sequence length": []}
    batch = 2 * options.batch_size
    while batch * options.accumulate <= default.batch_size:
        found["batch size"].append({"batch_size": batch})
        batch *= 2
    if options.batch_size > 2 * default.batch_size:
        found["batch size"] = [{"batch_size": default.batch_size}]
    if isinstance(task, TextTask):
        assert task.config.seq_length is not None
        length = 2 * task.config.seq_length
        while length <= LONG:
            found["sequence length"].append({"seq_length": length})
            length *= 2
    if options.optimizer != default.optimizer:
        rates = DEFAULT_LEARNING_RATE if isinstance(task, TextTask) else LEARNING_RATES
        changed = {"optimizer": default.optimizer, "learning_rate": rates[default.optimizer]}
        found["optimizer"] = [changed]
    return found


def narrow_rank(rnn_size: int, part: int = 4) -> int:
    """Returns the width of a projection: a part of the hidden units."""
    return max(8, rnn_size // part)


def has_wide_output(task: TextTask) -> bool:
    """Returns whether the output matrix of a text model takes a large share of the operations of a
    step, and can be made narrower."""
    config = task.model.config
    if config.output_rank or config.tie_weights:
        return False
    output = 6 * config.output_width * config.vocab_size
    return output > _WIDE_OUTPUT * task.flop_per_unit


def changed_run(
    trainer: Trainer, cause: str, effect: str, options: dict[str, Any], threads: int
) -> Variant:
    """Returns a variant with its own loader, carried state and optimizers, on the same model.

    Times do not depend on the values of the model, which is thrown away. An option that changes the
    model gives the variant a new one. `threads` are those of torch, unless the options change them.
    """
    changed = replace(trainer.plan.options, **options)
    task = trainer.task.changed(changed, trainer.stop)
    if "output_rank" in options:
        assert isinstance(task, TextTask)
        sizes = replace(task.model.config, output_rank=options["output_rank"])
        task = replace(task, model=LanguageModel(sizes).to(task.device))
    other = Trainer(task, replace(trainer.plan, options=changed), emit=lambda _: None)
    threads = options.get("threads", threads)
    return Variant(cause, effect, options, other, threads, steps_of(other))
