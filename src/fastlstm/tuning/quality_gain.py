"""What a variant that changes learning gains: how much sooner a run reaches the same quality."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from fastlstm.text.quality_law import (
    MOST_LAYERS,
    OPTIMIZERS,
    Length,
    QualityPrediction,
    relative_bits,
)
from fastlstm.text.task import TextTask
from fastlstm.tuning.variants import CHANGES_LEARNING, changed_run
from fastlstm.tuning.verdicts import Verdict, training_seconds

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer

_LAW_ERROR = 0.012
"""Of the bits per character that the law gives (benchmarks/log)."""
_HIGH_RATE = 2.0
"""Times the default learning rate, from which a lower one is tried."""
_PROBE_STEPS, _MIN_PROBE_STEPS = 48, 24


def quality_gain(
    trainer: Trainer, units_per_s: float, options: Mapping[str, Any], ratios: tuple[float, float]
) -> tuple[float, float] | None:
    """Returns by how much sooner a run with other options reaches what this one ends at: expected,
    and at least.

    For texts the law of quality says it. Else the options are towards the defaults of the job, and
    the gain of speed counts. None is returned where nothing is known. `ratios` are the speed of the
    variant over the run's: expected, and at least.
    """
    task, run = trainer.task, trainer.plan.options
    if not isinstance(task, TextTask):
        return ratios[0] - 1.0, ratios[1] - 1.0
    model, text, own_step = task.model.config, len(task.loader.ids), task.step_units
    has_law = task.config.vocab != "bpe" and model.num_layers <= MOST_LAYERS
    optimizer = options.get("optimizer", run.optimizer)
    if not has_law or not {run.optimizer, optimizer} <= OPTIMIZERS.keys():
        return None
    if "output_rank" in options:
        return None
    sizes = [n for n in ("batch_size", "seq_length") if n in options]
    step = own_step * math.prod(options[name] / getattr(task.config, name) for name in sizes)

    run_s = training_seconds(trainer, own_step / units_per_s)

    def law(rate: float, step: float, optimizer: str) -> QualityPrediction:
        size, length = (model.rnn_size, model.num_layers), Length(rate * run_s, rate * run_s / step)
        bits = relative_bits(*size, length.tokens, length.steps, optimizer, text)
        return QualityPrediction(*size, optimizer, text, length, bits, rate, setup_s=0.0)

    own = law(units_per_s, own_step, run.optimizer).measured_bits

    def gain(ratio: float, error: float) -> float:
        changed = law(max(ratio, 1e-3) * units_per_s, step, optimizer)
        needed_s = changed.seconds_to(own / (1.0 + error))
        return -1.0 if needed_s is None else run_s / needed_s - 1.0

    return gain(ratios[0], 0.0), gain(ratios[1], _LAW_ERROR)


def lower_rate(trainer: Trainer, default_rate: float, seconds: float) -> Verdict | None:
    """Returns the verdict on a quarter of the learning rate, where the rate is far above the
    default.

    Both rates take the same steps from the same weights; a rate that is too high ends with the
    higher loss. The weights are as before afterwards. Returns None where too few steps fit into
    so many `seconds` for both.
    """
    rate = trainer.plan.options.learning_rate
    if rate is None or rate < _HIGH_RATE * default_rate:
        return None
    start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    losses, lower = dict[float, list[float]](), rate / 4.0
    count, threads = _PROBE_STEPS, torch.get_num_threads()
    for value in (rate, lower):
        trainer.model.load_state_dict(start)
        options = {"learning_rate": value}
        variant = changed_run(trainer, "learning rate", CHANGES_LEARNING, options, threads)
        try:
            if value == rate:
                variant.warm_up()
                trainer.model.load_state_dict(start)
                count = min(count, int(seconds / 2.0 / max(variant.step_s, 1e-6)))
                if count < _MIN_PROBE_STEPS:
                    return None
            losses[value] = _losses(variant.trainer, count)
        finally:
            variant.close()
    trainer.model.load_state_dict(start)
    return _of_losses(losses[rate], losses[lower], lower)


def _losses(trainer: Trainer, count: int) -> list[float]:
    """Returns the losses of steps at the whole learning rate; an infinite one ends them."""
    found = list[float]()
    for _ in range(count):
        loss, _ = trainer.step(trainer.task.loader.next())
        if not math.isfinite(loss):
            return [*found, *[math.inf] * (count - len(found))]
        found.append(loss)
    return found


def _of_losses(own: list[float], other: list[float], rate: float) -> Verdict:
    """Returns the verdict: how many steps sooner the lower rate has the loss of the higher one."""
    window = max(4, len(own) // 6)
    ends = [sum(losses[-window:]) / window for losses in (own, other)]
    means = [sum(other[i : i + window]) / window for i in range(len(other) - window + 1)]
    reached = next((i + window for i, mean in enumerate(means) if mean <= ends[0]), None)
    gain = -1.0 if reached is None else len(own) / reached - 1.0
    evidence = (
        f"loss after {len(own)} steps from the same weights: {ends[0]:.3f} ->"
        f" {ends[1]:.3f} at a quarter of the rate"
    )
    share = max(0.0, 1.0 - 1.0 / (1.0 + gain)) if gain > -1.0 else 0.0
    return Verdict(
        "learning rate", share, 0.0, 0.0, 0.0, CHANGES_LEARNING, {"learning_rate": rate},
        evidence, False, gain, gain,
    )  # fmt: skip
