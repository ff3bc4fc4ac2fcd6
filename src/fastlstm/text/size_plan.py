"""What a text run decides by timing steps: precision and, within a budget, size and batch.

Training steps of a few candidates are timed on the real text, with loader and optimizer. A law of
quality (`quality_law`) predicts what each candidate would end at. The search climbs from 256 units
while the next size ends better, climbs again with two layers, then tries the batches and the other
optimizer at the best size. Sizes that there is no time to time are estimated by their FLOP. Other
processes lengthen all steps by one factor, measured over all timings: candidates are compared by
the CPU time of their steps. On a GPU the search starts from 512 units and tries the sizes that
kernels hold without padding. At the best size it tries the precisions and takes the fastest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from fastlstm.system import hardware, measurements
from fastlstm.text.config import PRESETS, TrainConfig
from fastlstm.text.model import LanguageModel
from fastlstm.text.plan import (
    LONG,
    MIN_STEPS_PER_EPOCH,
    SHORT,
    SHORT_RUN_TOKENS,
    fit_batch,
    tokens_of_budget,
    training_loader,
    training_s,
)
from fastlstm.text.quality_law import MOST_LAYERS, OPTIMIZERS, relative_bits
from fastlstm.text.task import TextTask, training_flop_per_token
from fastlstm.training.device import random_numbers_kept
from fastlstm.training.plan import TrainingPlan
from fastlstm.training.precision import (
    MIN_GAIN,
    PrecisionChoice,
    allow_tf32,
    choose_precision,
    pass_seconds,
    precisions_of,
)
from fastlstm.training.remembered_plan import ChosenPlan, changes, remembered_plan
from fastlstm.training.schedule import StopCriterion
from fastlstm.training.step_time import LONG_STEP_S, MIN_TIMED, TIMED_S, fastest_step_s
from fastlstm.training.trainer import Trainer

if TYPE_CHECKING:
    from fastlstm.system.fields import Precision
    from fastlstm.text.data.tokenizer import Ids, Tokenizer

CPU = torch.device("cpu")
EMBED_SIZES = {96: 64, 128: 64, 192: 64, 256: 128, 384: 128, 512: 128, 768: 256, 1024: 256}
"""Hidden units that are tried, with the width of the embedding the law was measured with."""
FIRST_SIZE = 256
_GPU_SIZES, _FIRST_GPU_SIZE = (128, 256, 512, 1024), 512
_BATCHES = {"cpu": (64, 16), "cuda": (64, 128, 256)}
"""Batch sizes that are tried beside the default."""
_MIN_STEPS_OF_SMALL = 900
"""With fewer steps, batches under the default lose at the default rate (benchmarks/log)."""
PLANNING_SHARE = 0.05
"""Share of the budget for the search, which ends when the next timing may not fit."""
_GPU_PLANNING_S = 1.2
"""Limit of the search on a GPU, after a first timing that loads libraries and compiles kernels."""
_GPU_TIMING_S = 0.4
"""Expected seconds of the second timing on a GPU."""
MIN_BUDGET_S = 10.0
_SETUP_S = 0.1
"""Seconds to build a model and take its first step, before it is timed."""
_SIZES = {
    *("preset", "rnn_size", "num_layers", "embed_size"),
    *("tie_weights", "output_rank", "residual"),
}
"""Options that fix the size; if one is given, the budget does not choose the size."""
_SMALLER_POWER = 0.75
"""A step of a smaller size takes its share of the FLOP to this power: measured from 256 to 96 units
0.85 in float32, 0.6 in bf16; a larger one takes time in proportion (512 units 1.0, 1.1)."""
_CLEAR_GAIN = 0.01
"""Predicted gain from which a second layer, another batch or another optimizer is chosen."""


@dataclass(frozen=True)
class SizeCandidate:
    """A configuration, its measured rate, and predicted bits, which only compare candidates."""

    config: TrainConfig
    tokens_per_s: float
    bits: float

    @property
    def name(self) -> str:
        config = self.config
        layers = "" if config.num_layers == 1 else f"{config.num_layers} layers of "
        return f"{layers}{config.rnn_size} units, batch {config.batch_size}, {config.optimizer}"


def how_sized(
    config: TrainConfig, chosen: Collection[str] | None, train_tokens: int
) -> Literal["as given", "tiny", "searched"]:
    """Returns how the size of a model is chosen; `chosen` are the given options, None keeps it.

    A search needs a budget and a run for which the law was measured. In a text that is too short
    for the law, a tiny model memorises later: on 20 kB, 512 units ended at 2.86 bits/char where 128
    ended at 2.65.
    """
    budget_s = StopCriterion.of(config, 1).budget_s
    if chosen is None or not _SIZES.isdisjoint(chosen) or config.vocab == "bpe" or budget_s is None:
        return "as given"
    if train_tokens <= MIN_STEPS_PER_EPOCH * config.batch_size * config.accumulate * LONG:
        return "tiny"
    is_measured = budget_s >= MIN_BUDGET_S and not config.pipeline and config.order == "lanes"
    return "searched" if is_measured else "as given"


class SizePlan:
    """Finds the size, batch and optimizer for a budget; options named in `chosen` stay.

    `started` is `time.perf_counter()` when the budget began. On a CPU the precision is given.
    """

    def __init__(
        self,
        config: TrainConfig,
        chosen: Collection[str],
        ids: Ids,
        tokenizer: Tokenizer,
        started: float,
        device: torch.device = CPU,
    ) -> None:
        budget_s = StopCriterion.of(config, 1).budget_s
        assert budget_s is not None
        self._precisions: list[Precision] = []
        self._sizes, self._first = list(EMBED_SIZES), FIRST_SIZE
        self._planning_s = PLANNING_SHARE * budget_s
        if device.type == "cuda":
            self._sizes, self._first = list(_GPU_SIZES), _FIRST_GPU_SIZE
            self._planning_s = min(self._planning_s, _GPU_PLANNING_S)
            if config.precision == "auto":
                full, *faster = precisions_of(device)
                first, *others = [*faster, full]
                config, self._precisions = replace(config, precision=first), others
        self._config, self._chosen, self._ids, self._tokenizer = config, chosen, ids, tokenizer
        self._device = device
        self._train_s = training_s(config, started)
        self._until = math.inf
        self._tried: list[SizeCandidate] = []
        self._step_s: dict[TrainConfig, float] = {}
        self._last_step_s = self._last_timing_s = 0.0
        self._slowdowns = list[float]()
        self.is_recalled = False

    def choose(self) -> tuple[SizeCandidate, str]:
        """Returns the best candidate, and the sentence that says why."""
        best = self._fastest(self._best_size())
        for change in self._changes(best.config):
            if not self._fits(1.0):
                break
            changed = self._try(replace(best.config, **change))
            best = _clearly_better(changed, self._rated(best.config))
        best = self._rated(best.config)
        others = [self._rated(c.config) for c in self._tried if c.config != best.config]
        others = sorted((c for c in others if math.isfinite(c.bits)), key=lambda c: c.bits)[:4]
        text = "; ".join(f"{c.name} {100 * (c.bits / best.bits - 1):+.1f} %" for c in others)
        precision = f" in {best.config.precision}" if self._device.type == "cuda" else ""
        why = f"chose {best.name} ({best.tokens_per_s:,.0f} tokens/s{precision})"
        why += f"; predicted bits/char of others: {text}" if text else ""
        if others and others[0].bits < best.bits:
            why += f"; a second layer, batch or optimizer is taken from {100 * _CLEAR_GAIN:g} % on"
        return best, why

    def precision(
        self, best: SizeCandidate, asked: str, first: PrecisionChoice | None = None
    ) -> PrecisionChoice:
        """Returns the precision of a candidate, with the seconds of its steps, in words."""
        config = best.config
        tokens = config.batch_size * (config.seq_length or LONG)
        step_s = tokens / best.tokens_per_s if best.tokens_per_s else 0.0
        if first is not None:
            is_of_other = " ms" in first.why and config.rnn_size != self._first
            why = f"{first.why}, with {self._first} units" if is_of_other else first.why
            return replace(first, why=why, step_s=step_s)
        why = "as asked"
        if asked == "auto":
            others = [
                f"{tried.tokens_per_s:,.0f} in {tried.config.precision}"
                for tried in self._tried
                if tried.config != config
                and replace(tried.config, precision=config.precision) == config
            ]
            why = ", ".join([f"{best.tokens_per_s:,.0f} tokens/s", *others])
        return PrecisionChoice(config.precision, why, step_s, self.is_recalled)

    def _fastest(self, best: SizeCandidate) -> SizeCandidate:
        """Returns the candidate in the precision whose steps are clearly faster than in others."""
        for precision in self._precisions:
            if not self._fits(1.0):
                break
            candidate = self._try(replace(best.config, precision=precision))
            is_exact = precision == self._precisions[-1]
            gain = 1 / MIN_GAIN if is_exact else MIN_GAIN  # the most exact one is tried last
            if candidate.tokens_per_s > gain * best.tokens_per_s:
                best = candidate
        return best

    def _best_size(self) -> SizeCandidate:
        sizes = self._sizes
        at = sizes.index(self._first)
        best = self._try_size(sizes[at])
        # What torch loads for the first step does not count as planning: training needs it too.
        self._until = time.perf_counter() + self._planning_s - TIMED_S
        if self._device.type == "cuda":
            # Two layers first: a GPU reads a text often enough for more units to pay, and time
            # allows few timings. On an H100 two layers of 512 ended at 1.47 bits/char where one
            # ended at 1.57 (War and Peace, 60 s).
            self._last_timing_s = _GPU_TIMING_S  # the first one has loaded libraries
            deep = self._try_size(sizes[at], 2) if self._fits(1.0) else best
            return self._best_around(_clearly_better(deep, best), sizes, at)
        best = self._best_around(best, sizes, at)
        assert best.config.rnn_size is not None
        smaller = max(0, sizes.index(best.config.rnn_size) - 1)
        first = self._try_size(sizes[smaller], 2, self._fits(1.0))
        deep = self._best_around(first, sizes, smaller)
        return _clearly_better(deep, self._rated(best.config))

    def _best_around(self, first: SizeCandidate, sizes: list[int], at: int) -> SizeCandidate:
        """Returns the best of the sizes above the first one, or of those below it."""
        above = self._climb(first, sizes[at + 1 :], growth=2.5)
        if above.config != first.config:
            return above
        return self._climb(above, sizes[:at][::-1], growth=0.7)

    def _climb(self, best: SizeCandidate, sizes: list[int], growth: float) -> SizeCandidate:
        """Tries sizes in turn until two end worse than the best: a single timing may be off."""
        num_worse, num_layers = 0, best.config.num_layers or 1
        for size in sizes:
            is_timed = self._fits(growth)
            if num_worse == 2 or not (is_timed or self._device.type == "cpu"):
                break
            candidate = self._try_size(size, num_layers, is_timed)
            best = self._rated(best.config)  # the factor of other processes has changed
            num_worse = 0 if candidate.bits < best.bits else num_worse + 1
            best = min(best, candidate, key=lambda c: c.bits)
        return best

    def _changes(self, config: TrainConfig) -> Iterator[dict[str, Any]]:
        if "batch_size" not in self._chosen:
            yield from ({"batch_size": size} for size in _BATCHES[self._device.type])
        if not {"optimizer", "learning_rate"} & set(self._chosen):
            yield from ({"optimizer": name} for name in OPTIMIZERS if name != config.optimizer)

    def _fits(self, growth: float) -> bool:
        """Returns whether planning has time for steps `growth` times as long as the last ones."""
        if self._device.type == "cuda":
            return time.perf_counter() + self._last_timing_s < self._until
        steps_s = growth * self._last_step_s
        steps_s *= 1 + (MIN_TIMED if steps_s < LONG_STEP_S else 1)
        return time.perf_counter() + max(TIMED_S, steps_s) + _SETUP_S < self._until

    def _try_size(self, size: int, num_layers: int = 1, is_timed: bool = True) -> SizeCandidate:
        config = replace(self._config, rnn_size=size, num_layers=num_layers)
        return self._try(replace(config, embed_size=EMBED_SIZES[size]), is_timed)

    def _try(self, config: TrainConfig, is_timed: bool = True) -> SizeCandidate:
        candidate = self._predict(replace(config, seq_length=config.seq_length or LONG), is_timed)
        tokens = candidate.tokens_per_s * self._train_s
        if "seq_length" not in self._chosen and tokens < SHORT_RUN_TOKENS:
            candidate = self._predict(replace(config, seq_length=SHORT), is_timed)
        self._tried.append(candidate)
        return candidate

    def _predict(self, config: TrainConfig, is_timed: bool) -> SizeCandidate:
        began = time.perf_counter()
        about = self._about_step(config)
        if is_timed or measurements.recall_seconds("step", about) is not None:
            data = config, self._ids, self._tokenizer, self._device, self._slowdowns
            step_s, is_recalled = measurements.timed_seconds(
                "step", about, self._device.type, lambda: step_seconds(*data)
            )
            self.is_recalled |= is_recalled
        else:
            step_s = self._estimated_s(config)
        self._last_timing_s = time.perf_counter() - began
        self._step_s[config] = step_s
        self._last_step_s = step_s * self._slowdown
        return self._rated(config)

    @property
    def _slowdown(self) -> float:
        """How many times as long as alone a step takes beside other processes."""
        return min(self._slowdowns, default=1.0)

    def _rated(self, config: TrainConfig) -> SizeCandidate:
        """Returns a configuration whose step time is known, rated beside the other processes."""
        assert config.seq_length is not None
        step_tokens = config.batch_size * config.accumulate * config.seq_length
        rate = step_tokens / (self._step_s[config] * self._slowdown)
        tokens, batch_size = rate * self._train_s, self._config.batch_size
        bits = expected_bits(config, tokens, len(self._ids), batch_size)
        return SizeCandidate(config, rate, bits)

    def _estimated_s(self, config: TrainConfig) -> float:
        """Returns the seconds of a step from the known one with the most similar FLOP."""

        def flop(other: TrainConfig) -> float:
            sizes = other.model_config(self._tokenizer.vocab_size, 0.0)
            return float(training_flop_per_token(sizes) * (other.seq_length or LONG))

        alike = [c for c in self._step_s if c.seq_length == config.seq_length]
        own = flop(config)
        near = min(alike or self._step_s, key=lambda other: abs(math.log(flop(other) / own)))
        ratio = own / flop(near)
        return self._step_s[near] * (ratio if ratio > 1 else ratio**_SMALLER_POWER)

    def _about_step(self, config: TrainConfig) -> dict[str, Any]:
        model = config.model_config(self._tokenizer.vocab_size, config.dropout or 0.0)
        names = ["precision", "optimizer", "batch_size", "seq_length", "accumulate", "ema"]
        names += ["memory_limit_gb"] if self._device.type == "cuda" else []
        return {
            **hardware.machine(self._device.type, torch.get_num_threads()),
            "model": model.to_dict(),
            **{name: getattr(config, name) for name in names},
        }


def _clearly_better(candidate: SizeCandidate, best: SizeCandidate) -> SizeCandidate:
    return candidate if candidate.bits < (1.0 - _CLEAR_GAIN) * best.bits else best


def expected_bits(config: TrainConfig, tokens: float, train_tokens: int, batch_size: int) -> float:
    """Returns the bits that a run of so many tokens may end at; compares runs on one text only.

    A run with fewer rows than `batch_size`, the default, and too few steps ends at infinite bits.
    """
    assert config.rnn_size is not None
    assert config.seq_length is not None
    steps = tokens / (config.batch_size * config.accumulate * config.seq_length)
    if not tokens or (config.batch_size < batch_size and steps < _MIN_STEPS_OF_SMALL):
        return math.inf
    known = config.optimizer if config.optimizer in OPTIMIZERS else "adamw"
    return relative_bits(
        config.rnn_size, config.num_layers or 1, tokens, steps, known, train_tokens
    )


def step_seconds(
    config: TrainConfig,
    ids: Ids,
    tokenizer: Tokenizer,
    device: torch.device = CPU,
    slowdowns: list[float] | None = None,
) -> float:
    """Returns the seconds of the fastest of a few training steps (`fastest_step_s`).

    The model is new and thrown away; random numbers do not change. Raises `torch.OutOfMemoryError`
    if not even one row at a time fits.
    """
    config = replace(config, learning_rate=config.learning_rate or 1e-3)
    allow_tf32(config.precision)
    with random_numbers_kept(device):
        sizes = config.model_config(tokenizer.vocab_size, config.dropout or 0.0)
        model = LanguageModel(sizes).to(device)
        loader = training_loader(config, ids)
        task = TextTask(config, model, loader, ids[:2], tokenizer, device)
        plan = TrainingPlan(config, StopCriterion.of(config, loader.steps_per_epoch), device)
        return fastest_step_s(Trainer(task, plan, emit=lambda _: None), slowdowns)


def budget_plan(
    config: TrainConfig,
    chosen: Collection[str] | None,
    ids: Ids,
    tokenizer: Tokenizer,
    device: torch.device,
    started: float,
    *,
    is_new: bool,
) -> ChosenPlan:
    """Returns the precision of a run and, where a budget chooses them, size, batch and optimizer.

    `chosen` names the options that were given; None keeps the size. The plan of a new run is
    remembered for the same command (`remembered_plan`).
    """

    def make() -> ChosenPlan:
        how, sized, why = how_sized(config, chosen, len(ids)), config, ""
        if how == "tiny":
            tiny: dict[str, Any] = {**PRESETS["tiny"]}
            sized = replace(config, **tiny)
            why = f"chose {sized.rnn_size} units: the text has only {len(ids):,} training tokens"
        if how == "searched":
            first, timed = config, None
            if device.type == "cpu":
                first = replace(config, rnn_size=FIRST_SIZE, embed_size=EMBED_SIZES[FIRST_SIZE])
                timed = _precision(first, device, ids, tokenizer)
                first = replace(first, precision=timed.name)
            search = SizePlan(first, chosen or (), ids, tokenizer, started, device)
            best, why = search.choose()
            choice, sized = search.precision(best, config.precision, timed), best.config
            if device.type == "cpu":
                sized = replace(sized, precision=config.precision)
            why = f"{why} (steps measured earlier)" if search.is_recalled else why
        else:
            choice = _precision(sized, device, ids, tokenizer)
        tokens = tokens_of_budget(sized, choice, started)
        return ChosenPlan(changes(config, sized), why, choice, tokens)

    data = {
        "tokens": len(ids),
        "vocabulary": tokenizer.vocab_size,
        "chosen": None if chosen is None else sorted(chosen),
        "law": [relative_bits(512, 1 + n, 2e8, 2000, "adamw", 10**6) for n in range(MOST_LAYERS)],
    }
    left_s = training_s(config, started)
    plan = remembered_plan(config, data, device, left_s, make) if is_new else make()
    assert plan.precision is not None
    allow_tf32(plan.precision.name)
    return plan


def _precision(
    config: TrainConfig, device: torch.device, ids: Ids, tokenizer: Tokenizer
) -> PrecisionChoice:
    """Returns the precision to train in; `auto` times passes of the real model on a CPU and whole
    steps on a GPU, where starting kernels may take longer than running them."""
    sizes = config.model_config(tokenizer.vocab_size, config.dropout or 0.0)
    shape = (config.seq_length or LONG, config.batch_size)
    about: dict[str, Any] = {"model": sizes.to_dict(), "batch": list(shape)}
    is_open = config.precision == "auto" or StopCriterion.of(config, 1).budget_s is not None
    if device.type == "cuda":
        names = ("optimizer", "accumulate", "ema", "memory_limit_gb")
        about |= {name: getattr(config, name) for name in names}

        def step_s(name: Any) -> float:
            own = replace(config, precision=name, seq_length=shape[0])
            fitting, _ = fit_batch(own, len(ids))
            # A batch that a short text has made smaller reads fewer tokens in about the same time.
            share = math.prod(shape) / fitting.batch_size / (fitting.seq_length or LONG)
            return share * step_seconds(fitting, ids, tokenizer, device) / fitting.accumulate

        return choose_precision(
            config.precision, device, about, step_s if is_open else None, timed="step"
        )

    def pass_s(name: str) -> float:
        with random_numbers_kept(device):
            model, tokens = LanguageModel(sizes), torch.zeros(shape, dtype=torch.long)

        def forward() -> torch.Tensor:
            return model.loss(tokens, tokens, model.initial_state(config.batch_size))[0]

        return pass_seconds(model, forward, name, device)

    return choose_precision(config.precision, device, about, pass_s if is_open else None)
