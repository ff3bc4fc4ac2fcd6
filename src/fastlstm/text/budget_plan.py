"""What a text run decides by timing steps: precision and, within a budget, size and batch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fastlstm.text.model import LanguageModel
from fastlstm.text.plan import LONG, fit_batch, tokens_of_budget, training_s
from fastlstm.text.size_plan import (
    EMBED_SIZES,
    FIRST_SIZE,
    SizePlan,
    can_choose_size,
    step_seconds,
)
from fastlstm.training.device import random_numbers_kept
from fastlstm.training.precision import (
    PrecisionChoice,
    allow_tf32,
    choose_precision,
    pass_seconds,
)
from fastlstm.training.remembered_plan import ChosenPlan, changes, remembered_plan
from fastlstm.training.schedule import StopCriterion

if TYPE_CHECKING:
    from fastlstm.text.config import TrainConfig
    from fastlstm.text.data.tokenizer import Ids, Tokenizer


def budget_plan(
    config: TrainConfig,
    chosen: Collection[str] | None,
    ids: Ids,
    tokenizer: Tokenizer,
    device: torch.device,
    started: float,
    *,
    is_new: bool,
) -> tuple[ChosenPlan, PrecisionChoice]:
    """Returns the precision of a run and, where a budget chooses them, size, batch and optimizer.

    `chosen` names the options that were given; None keeps the size. The plan of a new run repeats
    (`remembered_plan`).
    """

    def make() -> ChosenPlan:
        if chosen is not None and can_choose_size(config, chosen, device, len(ids)):
            return _sized(config, chosen, ids, tokenizer, device, started)
        choice = _precision(config, device, ids, tokenizer)
        return ChosenPlan(precision=choice, tokens=tokens_of_budget(config, choice, started))

    data = {
        "tokens": len(ids),
        "vocabulary": tokenizer.vocab_size,
        "chosen": None if chosen is None else sorted(chosen),
    }
    left_s = training_s(config, started)
    plan = remembered_plan(config, data, device, left_s, make) if is_new else make()
    if plan.precision is None:  # a damaged file
        plan = make()
    assert plan.precision is not None
    allow_tf32(plan.precision.name)
    return plan, plan.precision


def _sized(
    config: TrainConfig,
    chosen: Collection[str],
    ids: Ids,
    tokenizer: Tokenizer,
    device: torch.device,
    started: float,
) -> ChosenPlan:
    """Returns the size, batch, optimizer and precision that suit the budget."""
    first, choice = config, None
    if device.type == "cpu":
        first = replace(config, rnn_size=FIRST_SIZE, embed_size=EMBED_SIZES[FIRST_SIZE])
        choice = _precision(first, device, ids, tokenizer)
        first = replace(first, precision=choice.name)
    search = SizePlan(first, chosen, ids, tokenizer, started, device)
    best, why = search.choose()
    choice = search.precision(best, config.precision, choice)
    sized = (
        replace(best.config, precision=config.precision) if device.type == "cpu" else best.config
    )
    why = f"{why} (steps measured earlier)" if search.is_recalled else why
    return ChosenPlan(changes(config, sized), why, choice, tokens_of_budget(sized, choice, started))


def _precision(
    config: TrainConfig, device: torch.device, ids: Ids, tokenizer: Tokenizer
) -> PrecisionChoice:
    """Returns the precision to train in; `auto` times the candidates: passes of the real model on
    a CPU, whole steps on a GPU, where the host may take longer to start kernels than they run."""
    sizes = config.model_config(tokenizer.vocab_size, config.dropout or 0.0)
    shape = (config.seq_length or LONG, config.batch_size)
    about: dict[str, Any] = {"model": sizes.to_dict(), "batch": list(shape)}
    is_open = config.precision == "auto" or StopCriterion.of(config, 1).budget_s is not None
    if device.type == "cuda":
        names = ("optimizer", "accumulate", "ema", "memory_limit_gb")
        about |= {name: getattr(config, name) for name in names}

        def step_s(name: Any) -> float:
            return _gpu_step_s(replace(config, precision=name), ids, tokenizer, device)

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


def _gpu_step_s(config: TrainConfig, ids: Ids, tokenizer: Tokenizer, device: torch.device) -> float:
    """Returns the seconds of one pass of a step with the configured batch."""
    fitting, _ = fit_batch(replace(config, seq_length=config.seq_length or LONG), len(ids))
    # A batch that a short text has made smaller reads fewer tokens in about the same time.
    share = config.batch_size * (config.seq_length or LONG) / fitting.batch_size
    share /= fitting.seq_length or LONG
    return share * step_seconds(fitting, ids, tokenizer, device) / fitting.accumulate
