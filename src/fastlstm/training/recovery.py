"""NaN and Inf: skip the step, go back to the last good state, and in the end stop with a name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fastlstm.errors import NonFiniteError, counted
from fastlstm.training.best_weights import COUNTERS
from fastlstm.training.guard import (
    bad_gradient,
    bad_weight,
    first_non_finite,
)

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer

_KEPT = (*COUNTERS, "spent", "scored", "train_s")
"""Counters that a roll-back leaves as they are."""


def handle_bad_step(
    trainer: Trainer, loss: float, gradient: str | None = None, *, is_reset: bool = False
) -> None:
    """Skips a step whose loss or gradient is not finite; rolls back when that does not help.

    Args:
        trainer: of the step.
        loss: of the step.
        gradient: the one that is not finite, where it is known already.
        is_reset: the carried state has been reset within the step.

    Raises:
        NonFiniteError: roll-backs did not help.
    """
    state, task = trainer.state, trainer.task
    trainer.stepper.gather()  # so that all processes see the same weights
    weight, gradient = bad_weight(task.model), gradient or bad_gradient(task.model)
    if weight is not None:
        culprit = f"weight {weight}"
    elif not math.isfinite(loss):
        carried = task.carried().items()
        name = first_non_finite((n, tensor) for n, tensor in carried if n not in task.may_be_nan)
        culprit = f"carried {name}" if name else "loss"
    else:
        culprit = f"gradient of {gradient or 'another rank'}"
    state.optimizers.zero_grad()
    # The scaler has halved its scale since: below 1 a smaller one cannot help.
    is_scaled = state.scaler is not None and state.scaler.get_scale() >= 1.0
    if weight is None and math.isfinite(loss) and is_scaled:
        return  # fp16 overflowed; the next batch is tried with the smaller scale
    if not is_reset:
        trainer.reset_carried()
    if not (state.guard.bad_step(state.progress.step, culprit) or weight is not None):
        _emit_skip(trainer, culprit, "step skipped, state reset")
    elif trainer.plan.is_local:
        trainer.culprit = culprit  # all go back at the end of the round
    else:
        roll_back(trainer, culprit)


def roll_back(trainer: Trainer, culprit: str) -> None:
    """Goes back to the last good state, with half the learning rate.

    Raises:
        NonFiniteError: there is none, or it happened too often.
    """
    _emit_skip(trainer, culprit, "rolled back to the last good checkpoint")
    guard, before = trainer.state.guard, trainer.progress
    checkpoint = trainer.snapshots.last_good()
    if guard.roll_back() or not trainer.world.decided(checkpoint is not None)[0]:
        raise NonFiniteError(
            f"step {before.step}: {culprit} is NaN or Inf and came back after"
            f" {counted(guard.rollbacks - 1, 'roll-back')}; lower `learning_rate` or `grad_clip`,"
            " or try `precision='fp32'`"
        )
    trainer.restore(checkpoint, is_roll_back=True)
    progress = trainer.progress
    progress.lr_scale = before.lr_scale * 0.5
    for name in _KEPT:
        setattr(progress, name, getattr(before, name))
    name = "" if checkpoint is None else checkpoint.path.name
    trainer.say("warning", f"continuing from {name} with half the learning rate")


def _emit_skip(trainer: Trainer, culprit: str, action: str) -> None:
    about = {"step": trainer.progress.step, "what": "non-finite", "tensor": culprit}
    trainer.emit({"event": "skip", **about, "action": action})
