"""The settings of text models for `tune`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastlstm.text.config import TrainConfig
from fastlstm.text.quality_law import OPTIMIZERS, Length
from fastlstm.text.size_plan import EMBED_SIZES, expected_bits, step_seconds
from fastlstm.text.task import TextTask
from fastlstm.text.train import train
from fastlstm.training.optimizer import DEFAULT_LEARNING_RATE
from fastlstm.training.schedule import StopCriterion
from fastlstm.tuning.job import MIN_STEPS_PER_EPOCH, Changes, Job, Show, Space
from fastlstm.tuning.predict import law_of
from fastlstm.tuning.variants import has_wide_output, narrow_rank

if TYPE_CHECKING:
    from fastlstm.runs.events import Event
    from fastlstm.training.trainer import Trainer
    from fastlstm.tuning.tune import Search

_SEQ_LENGTHS = (64, 512)
"""Shorter ones ended worse at equal time (benchmarks/log)."""
_RANKS = (4, 2)
"""Ratios of the hidden units to the width of a projection before the output matrix."""
_LAW_AXES = ("batch", "seq-length", "size", "optimizer")
"""Axes of the law of quality."""
_NUM_PROMISING, _NUM_WITH_RATE = 5, 2
"""Best changes by the law, and how many of them are also tried with a higher learning rate."""
_RATE_SHIFT = 0.029
"""The gain of twice the learning rate falls by 2 points in a run e times as long."""


@dataclass(frozen=True)
class TextJob(Job):
    """Compares runs of a text by the result of the whole run that the law of quality predicts.

    Without the law (`has_law` is False: BPE tokens), runs of equal time are compared by their own
    result.
    """

    has_law: bool = True

    fields = {  # noqa: RUF012
        "batch": ("batch_size", "accumulate"),
        "seq-length": ("seq_length",),
        "optimizer": ("optimizer", "learning_rate"),
        "lr": ("learning_rate",),
        "output-rank": (),  # open for a wide output matrix, whatever is given
        "size": ("rnn_size", "preset", "embed_size", "num_layers", "tie_weights", "output_rank"),
        "threads": ("threads",),
        "precision": ("precision",),
    }
    names = {  # noqa: RUF012
        "size": "{} units", "batch": "batch {}", "seq-length": "sequences of {}",
        "optimizer": "{}", "lr": "learning rate x {:g}", "threads": "threads {}",
        "output-rank": "output rank 1/{} of the units", "precision": "{}",
    }  # fmt: skip
    more = ("num_layers", "embed_size")
    size, per = "rnn_size", "token"

    @property
    def ending(self) -> str:
        return " expected" if self.has_law else super().ending

    def train(self, source: Any, config: TrainConfig, **options: Any) -> None:
        stop: Any = self.stop
        train(source, config=config, as_text=True, stop=stop, **options)

    def prepare(self, trainer: Trainer, search: Search, show: Show) -> Space:
        task, config = trainer.task, trainer.plan.options
        assert isinstance(task, TextTask)
        assert isinstance(config, TrainConfig)
        model, train_tokens = task.model.config, len(task.loader.ids)
        size = {name: getattr(model, name) for name in ("rnn_size", "num_layers", "embed_size")}
        config, space = self.space_around(
            replace(config, **size), list(EMBED_SIZES),
            lambda each: search.limits.cost(each.model_config(task.tokenizer.vocab_size, 0.0)),
            lambda each: values_around(each, train_tokens, has_wide_output(task)), search, show,
        )  # fmt: skip
        values, default = space.values, space.options
        if task.device.type != "cpu" or not self.has_law:
            return space

        def token_s(changes: Changes) -> float:
            timed = replace(config, **self.options_of(default, changes))
            tokens = timed.batch_size * timed.accumulate * (timed.seq_length or 1)
            return float(step_seconds(timed, task.loader.ids, task.tokenizer) / tokens)

        # The time of a step is about a product of one factor for each axis.
        base_s = token_s({})
        law = {axis: v for axis, v in values.items() if axis in _LAW_AXES}
        factors = {(a, v): token_s({a: v}) / base_s for a, tried in law.items() for v in tried[1:]}
        budget_s = StopCriterion.of(config, 1).budget_s
        assert budget_s is not None

        def bits(changes: Changes) -> float:
            tokens = budget_s / base_s / math.prod(factors[pair] for pair in changes.items())
            changed = replace(config, **self.options_of(default, changes))
            return expected_bits(changed, tokens, train_tokens, config.batch_size)

        pairs = [list(zip(law, cell, strict=True)) for cell in itertools.product(*law.values())]
        combined = [{a: v for a, v in each if v != law[a][0]} for each in pairs]
        best = sorted(filter(None, combined), key=bits)[:_NUM_PROMISING]
        label = self.label_of(best[0]) if best else "the default"
        show("speed", f"{1.0 / base_s:,.0f} tokens/s; best by the law of quality: {label}")
        rates = {axis: values[axis][1] for axis in ("lr",) if axis in values}
        with_rate = [{**changes, **rates} for changes in best[:_NUM_WITH_RATE] if rates]
        promising = itertools.zip_longest(best, with_rate)
        first = [change for change in space.first if not set(change) & set(law)]
        first = [*(each for pair in promising for each in pair if each), *first]
        return replace(space, first=first, units_per_s=1.0 / base_s)

    def options_of(self, default: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
        own, changes = dict(default), dict(changes)
        part = changes.pop("output-rank", 0)
        if "size" in changes:
            own["embed_size"] = EMBED_SIZES[changes["size"]]
        if "optimizer" in changes:
            own["learning_rate"] = DEFAULT_LEARNING_RATE[changes["optimizer"]]
        options = super().options_of(own, changes)
        return options | ({"output_rank": narrow_rank(options["rnn_size"], part)} if part else {})

    def result(
        self, start: Event, end: Event, options: Mapping[str, Any], space: Space, seconds: float,
        budget_s: float,
    ) -> tuple[float, float]:  # fmt: skip
        measured, setup_s = float(end["best_bits_per_char"]), float(end["spent_s"]["setup"])
        if not (self.has_law and setup_s < seconds < budget_s):
            return measured, measured
        lengths_s = seconds - setup_s, budget_s - setup_s
        return measured, whole_run_bits(start, end, options, space, lengths_s)

    def figure(self, value: float, has_unit: bool = True) -> str:
        return f"{value:.3f}" + " bits/char" * has_unit


def values_around(
    options: TrainConfig, train_tokens: int, has_wide_output: bool = False
) -> dict[str, list[Any]]:
    """Returns the values of every axis but size, the default first; a batch is at most an eighth of
    the `train_tokens` of the training part."""
    batch, length, optimizer = options.batch_size, options.seq_length, options.optimizer
    assert length is not None
    room = train_tokens // MIN_STEPS_PER_EPOCH // options.accumulate
    batches = [n for n in (batch // 2, 2 * batch) if n >= 1 and n * length <= room]
    low, high = _SEQ_LENGTHS
    lengths = [n for n in (length // 2, 2 * length) if low <= n <= high and n * batch <= room]
    others = [name for name in OPTIMIZERS if name != optimizer] if optimizer in OPTIMIZERS else []
    return {
        "batch": [batch, *batches], "seq-length": [length, *lengths],
        "optimizer": [optimizer, *others], "lr": [1.0, 2.0, 0.5],
        "output-rank": [0, *(_RANKS if has_wide_output else ())],
    }  # fmt: skip


def whole_run_bits(
    start: Event, end: Event, options: Mapping[str, Any], space: Space,
    lengths_s: tuple[float, float],
) -> float:  # fmt: skip
    """Returns the expected result of the whole run, from a complete short run.

    The law errs by 2 to 4 % between optimizers and batches, so its ratio for the settings is moved
    halfway to its ratio for the default. The law holds for the default learning rate; a higher rate
    gains less in a longer run. `lengths_s` are the seconds of training of both runs.
    """
    times, optimizer = lengths_s[1] / lengths_s[0], options["optimizer"]
    law = law_of(start, end, optimizer)
    ratio = law.after(law.measured.times(times)).bits / law.measured_bits
    if space.units_per_s:
        tokens = space.units_per_s * lengths_s[0]
        sizes = [o["batch_size"] * o["seq_length"] for o in (options, space.options)]
        steps = tokens / (law.measured.tokens / law.measured.steps * sizes[1] / sizes[0])
        of_default = replace(
            law, rnn_size=space.options["rnn_size"], optimizer=space.options["optimizer"],
            measured=Length(tokens, steps), measured_bits=1.0,
        )  # fmt: skip
        ratio = math.sqrt(ratio * of_default.after(of_default.measured.times(times)).bits)
    rate = options["learning_rate"] / DEFAULT_LEARNING_RATE.get(optimizer, options["learning_rate"])
    return law.measured_bits * ratio * math.exp(_RATE_SHIFT * math.log(rate) * math.log(times))
