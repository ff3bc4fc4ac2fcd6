"""The same training run with one thing changed, whose steps can be timed beside it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fastlstm.ops.backends.onednn import bf16_instructions
from fastlstm.system import hardware
from fastlstm.text.config import TrainConfig
from fastlstm.text.data.loader import TextLoader
from fastlstm.text.plan import open_batches
from fastlstm.text.task import TextTask
from fastlstm.training.optimizer import DEFAULT_LEARNING_RATE
from fastlstm.training.trainer import Trainer

EXACT = "exact"
SAME_QUALITY = "same quality expected"
CHANGES_LEARNING = "changes learning"
_MAX_STEP_TOKENS = 65_536
_QUEUED = 5
"""One more than the batches that the loader makes ahead."""


@dataclass
class Variant:
    """A training run with one option changed.

    Attributes:
        cause: what would hold the run back if the variant is faster.
        effect: on learning: `EXACT`, `SAME_QUALITY` or `CHANGES_LEARNING`.
        options: changed, by name of the field.
        trainer: takes its steps.
        threads: of torch.
        step: takes one step and returns its units.
        prepare: called before a turn; not timed.
        step_s: seconds of one step, about.
    """

    cause: str
    effect: str
    options: dict[str, Any]
    trainer: Trainer
    threads: int
    step: Callable[[], int]
    prepare: Callable[[], None] = field(default=lambda: None)
    step_s: float = 0.0

    def warm_up(self, count: int = 2) -> None:
        """Takes steps that do not count; the last one says how long a step takes."""
        torch.set_num_threads(self.threads)
        for _ in range(count):
            started = time.perf_counter()
            self.step()
            self.step_s = time.perf_counter() - started

    def turn(self, seconds: float, use_mean: bool = False) -> float:
        """Returns the seconds per unit of the median step, of steps for so many seconds.

        Args:
            seconds: of the turn, about; at least two steps are taken.
            use_mean: take the mean instead, which counts a wait in every fifth step.
        """
        torch.set_num_threads(self.threads)
        self.prepare()
        times = []
        for _ in range(max(2, round(seconds / max(self.step_s, 1e-6)))):
            started = time.perf_counter()
            units = self.step()
            times.append((time.perf_counter() - started) / units)
        return statistics.fmean(times) if use_mean else statistics.median(times)

    def close(self) -> None:
        self.trainer.task.loader.close()


def steps_of(trainer: Trainer) -> Callable[[], int]:
    """Returns what takes the next step of a run and returns its units."""

    def step() -> int:
        before = trainer.progress.tokens
        trainer.take_step()
        return max(1, trainer.progress.tokens - before)

    return step


def as_it_is(trainer: Trainer) -> Variant:
    """Returns the run with nothing changed, with a wait for a batch where it would wait."""
    threads = trainer.plan.options.threads
    assert threads is not None  # chosen at the start of the run
    return Variant("", EXACT, {}, trainer, threads, steps_of(trainer))


def without_loader(trainer: Trainer) -> tuple[Variant, Variant]:
    """Returns the run with the loader, beginning with no batches made ahead, and with one batch
    in memory instead."""
    task = trainer.task
    assert isinstance(task, TextTask)
    batch = task.loader.next()

    def cached() -> int:
        trainer.step(batch)
        return task.size(batch)

    def drain() -> None:
        for _ in range(_QUEUED):
            task.loader.next()

    threads = trainer.plan.options.threads
    assert threads is not None
    with_loader = Variant("", EXACT, {}, trainer, threads, steps_of(trainer), drain)
    return with_loader, Variant("input", EXACT, {}, trainer, threads, cached)


def candidates(trainer: Trainer) -> list[Callable[[], Variant]]:
    """Returns what makes the variants of a run that are worth timing, cheapest change first."""
    task, config = trainer.task, trainer.plan.options
    assert isinstance(task, TextTask)
    assert isinstance(config, TrainConfig)
    found = list[Callable[[], Variant]]()

    def add(cause: str, effect: str, **options: Any) -> None:
        found.append(lambda: _changed(trainer, cause, effect, options))

    if task.device.type == "cpu":
        now, cores = config.threads, hardware.cores()
        for threads in sorted({1, max(1, cores // 2), cores} - {now}, reverse=True):
            add("threads", SAME_QUALITY, threads=threads)
        if bf16_instructions() is not None:
            other = "fp32" if config.precision == "bf16" else "bf16"
            add("precision", SAME_QUALITY, precision=other)
    elif config.precision == "fp32":
        add("precision", SAME_QUALITY, precision="bf16")
    if config.optimizer != "adamw":
        rate = DEFAULT_LEARNING_RATE["adamw"]
        add("optimizer", CHANGES_LEARNING, optimizer="adamw", learning_rate=rate)
    assert config.seq_length is not None
    for factor in (2, 4, 8):
        if task.step_units * factor <= min(_MAX_STEP_TOKENS, len(_ids(task)) // 8):
            add("batch size", CHANGES_LEARNING, batch_size=config.batch_size * factor)
    if task.step_units * 2 <= min(_MAX_STEP_TOKENS, len(_ids(task)) // 8):
        add("sequence length", CHANGES_LEARNING, seq_length=config.seq_length * 2)
    return found


def _ids(task: TextTask) -> Any:
    return task.loader.ids


def _changed(trainer: Trainer, cause: str, effect: str, options: dict[str, Any]) -> Variant:
    """Returns a variant with a loader, carried state and optimizers of its own, on the same model.

    The model is shared: what is timed does not depend on its values, and nothing of it is kept.
    """
    task, config = trainer.task, trainer.plan.options
    assert isinstance(task, TextTask)
    assert isinstance(config, TrainConfig)
    threads = options.get("threads", config.threads)
    assert threads is not None
    changed = replace(config, **options)
    loader = TextLoader(open_batches(changed, _ids(task)), trainer.stop)
    other_task = replace(task, config=changed, loader=loader)
    other = Trainer(other_task, replace(trainer.plan, options=changed), emit=lambda _: None)
    return Variant(cause, effect, options, other, threads, steps_of(other))
