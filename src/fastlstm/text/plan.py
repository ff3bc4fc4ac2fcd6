"""Chooses, at the start of a run, the options of a language model that are None."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from fastlstm.distributed.world import Share
from fastlstm.errors import DataError, counted
from fastlstm.system.fields import Precision
from fastlstm.text.config import PRESETS, TrainConfig
from fastlstm.text.data.lanes import TextLoader
from fastlstm.text.data.tokenizer import Ids
from fastlstm.training.precision import PrecisionChoice
from fastlstm.training.schedule import EVALUATION_SHARE, StopCriterion

_EVALUATION_COST = 0.7
"""Cost of scoring a token in float32 relative to training on it in bf16."""
LONG, SHORT = 128, 64
"""Default sequence lengths. On our kernels LONG reads 1.45 times as many characters per second as
SHORT, because the optimizer's share of a step halves, and it wins in runs from 20 s on. From the
first million characters SHORT learns more (benchmarks/log)."""
SHORT_RUN_TOKENS = 1_500_000
MIN_STEPS_PER_EPOCH = 8
_SMALL_MODEL = 500_000
"""Number of parameters up to which a model counts half of its parameters per token, but at least
`_FEW`; measured at 214,000 to 430,000 and 1.0 to 1.4 million."""
_FEW = 17.0
_DROPOUTS = ((3.5, 0.0), (5.5, 0.1), (7.0, 0.2), (_FEW, 0.3), (40.0, 0.4), (80.0, 0.5),
    (math.inf, 0.6))  # fmt: skip
"""Limits of epochs times parameters per token, and the dropout of one-layer models below each
limit. At 38, a model with dropout 0.4 was best at two thirds of its steps; values beyond 38, and
of small models beyond 34, are provisional."""
_DEEP_DROPOUTS = ((5.0, 0.0), (8.0, 0.05), (12.0, 0.1), (_FEW, 0.15), (42.0, 0.2), (55.0, 0.25),
    (100.0, 0.3), (math.inf, 0.35))  # fmt: skip
"""Limits of epochs times the square root of parameters per token, and the dropout of models with
more layers, in which it acts on the output of each layer. Measured with 2 x 128 to 2 x 320 units,
2 to 64 epochs, on three texts (benchmarks/log)."""
_FRESH_EPOCHS = 1.5
"""A text that is read once is not memorised, however large the model."""
_TRAINING_SHARE = 0.9
"""Share of the remaining budget for steps; evaluations, checkpoints and report take the rest."""


def training_s(config: TrainConfig, started: float) -> float:
    """Returns about how many seconds a run with a budget will take steps; 0 without a budget."""
    budget_s = StopCriterion.of(config, 1).budget_s
    if budget_s is None:
        return 0.0
    return _TRAINING_SHARE * max(budget_s - (time.perf_counter() - started), 1.0)


def tokens_of_budget(config: TrainConfig, precision: PrecisionChoice, started: float) -> float:
    """Returns about how many tokens a run with a budget will train on; 0 without a budget.

    The step of `precision` was timed with the configured sequence length, or LONG.
    """
    step_tokens = config.batch_size * (config.seq_length or LONG)
    return training_s(config, started) / max(precision.step_s, 1e-4) * step_tokens


def choose_seq_length(config: TrainConfig, budget_tokens: float, train_tokens: int) -> TrainConfig:
    """Returns the configuration with a sequence length, shorter if the run reads little text."""
    if config.seq_length is not None:
        return config
    step_tokens = config.batch_size * config.accumulate * LONG
    if config.steps is not None:
        total = float(config.steps * step_tokens)
    elif config.epochs is not None:
        total = config.epochs * train_tokens
    else:
        total = budget_tokens
    return replace(config, seq_length=SHORT if total < SHORT_RUN_TOKENS else LONG)


def fit_batch(config: TrainConfig, train_tokens: int) -> tuple[TrainConfig, tuple[str, ...]]:
    """Reduces lanes and sequence length until a short text gives a few steps per epoch."""
    assert config.seq_length is not None
    batch, length, accumulate = config.batch_size, config.seq_length, config.accumulate

    def steps() -> int:
        return (train_tokens - 1) // (batch * accumulate * length)

    while steps() < MIN_STEPS_PER_EPOCH and batch * accumulate > 1:
        if accumulate > 1:
            accumulate //= 2
        else:
            batch //= 2
    while steps() < MIN_STEPS_PER_EPOCH and length > 8:
        length //= 2
    if steps() < 1:
        size = counted(train_tokens, "token")
        raise DataError(f"the training split has {size}; give a text at least 50 times as long")
    if (batch, length, accumulate) == (config.batch_size, config.seq_length, config.accumulate):
        return config, ()
    changes = (
        ("batch", config.batch_size, batch),
        ("sequence length", config.seq_length, length),
        ("accumulation", config.accumulate, accumulate),
    )
    shown = ", ".join(f"{name} {old} -> {new}" for name, old, new in changes if old != new)
    note = f"the text is short ({counted(train_tokens, 'training token')}): {shown}"
    return replace(config, batch_size=batch, seq_length=length, accumulate=accumulate), (note,)


def training_loader(
    config: TrainConfig,
    ids: Ids,
    should_stop: Callable[[], bool] | None = None,
    share: Share | None = None,
) -> TextLoader:
    """Returns the loader of the training split; with several processes, of this one's lanes."""
    assert config.seq_length is not None
    num = config.batch_size * config.accumulate
    lanes = None if share is None else share.rows(num)
    return TextLoader(
        ids,
        num,
        config.seq_length,
        config.seed,
        config.order,
        config.lane_reset,
        lanes,
        should_stop,
    )


def resolve(
    config: TrainConfig,
    precision: Precision,
    budget_tokens: float,
    device: torch.device,
    train_tokens: int,
    valid_tokens: int,
    steps_per_epoch: int,
    num_parameters: int,
) -> tuple[TrainConfig, tuple[str, ...]]:
    """Chooses dropout and evaluation interval; also returns the notes to show."""
    stop_criterion = StopCriterion.of(config, steps_per_epoch)
    assert config.seq_length is not None
    step_tokens = config.batch_size * config.accumulate * config.seq_length
    steps = stop_criterion.total_steps
    total = budget_tokens if steps is None else float(steps * step_tokens)
    notes: tuple[str, ...] = ()
    dropout = config.dropout
    if dropout is None:
        epochs, share = total / train_tokens, num_parameters / train_tokens
        layers = config.num_layers or PRESETS[config.preset]["num_layers"]
        dropout = default_dropout(epochs, share, num_parameters, layers)
        notes = (
            f"dropout {dropout:g}: about {_rounded(epochs)} epochs, {_rounded(share)} parameters"
            " per training token",
        )
    every = config.eval_every
    if every is None:
        scored = valid_tokens
        if stop_criterion.budget_s is not None:  # an evaluation takes at most a tenth
            scored = min(scored, int(0.1 * total))
        every = math.ceil(scored * _EVALUATION_COST / EVALUATION_SHARE / step_tokens)
        every = max(1, every, math.ceil(total / step_tokens / 20))
    chosen = replace(
        config,
        precision=precision,
        dropout=dropout,
        eval_every=every,
        device="cuda" if device.type == "cuda" else "cpu",
        threads=torch.get_num_threads(),
    )
    return chosen, notes


def _rounded(number: float) -> str:
    return f"{number:,.{0 if number >= 10 else 2}f}"


def default_dropout(
    epochs: float,
    parameters_per_token: float,
    num_parameters: float = math.inf,
    num_layers: int = 1,
) -> float:
    """Returns the best dropout for a text read `epochs` times (measured, benchmarks/log).

    A model with more parameters per token memorises the text sooner; a small model lacks the units
    that are dropped.
    """
    if epochs <= _FRESH_EPOCHS:
        return 0.0
    table, power = (_DROPOUTS, 1.0) if num_layers == 1 else (_DEEP_DROPOUTS, 0.5)
    pressure = epochs * parameters_per_token**power
    if num_parameters <= _SMALL_MODEL and pressure > _FEW:
        pressure = max(_FEW, pressure / 2**power)
    return next(value for limit, value in table if pressure <= limit)
